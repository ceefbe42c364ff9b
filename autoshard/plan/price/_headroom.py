"""What a nearly full memory is expected to cost: the compiler recomputes, overlaps less, and in the end refuses.

The TPU compiler begins to recompute values on its own when what a program needs exceeds a share of the memory, the
more the more is missing, and no longer hides all of its communication; it refuses what exceeds the whole. What it will
need is known within the error of our memory model. So a plan near the limit is charged the mean over that error: of the
forward pass the share by which the need is between that share and the whole, and of hidden communication what is then
waited for. A plan that does not fit is charged all of the forward pass, since computing it again is the way out. With
room to spare all of it is nothing. The constants are data, written by `experiments/headroom.py --write`.
"""

import dataclasses
import functools
import json
import math
import pathlib

from autoshard.cost import Topology


_FILE = pathlib.Path(__file__).with_name("headroom.json")

FORWARD = 1.0 / 3.0
"""Share of a training step's compute that its forward pass is, each matmul having two in the backward pass."""


NEGLIGIBLE_DEVIATIONS = 5.0
"""Deviations below a limit from which on the chance to exceed it is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Headroom:
    """When the compiler recomputes, at what cost, and how well its need is foreseen."""

    recompute_from: float
    """Share of the memory above which the compiler recomputes."""
    unhidden: float
    """Share of hidden communication that is then waited for."""
    error_mean: float
    """Mean of (compiled - predicted) peaks of programs that need much of the memory, as shares of it."""
    error_deviation: float
    source: str

    def excess(self, predicted: float, limit: float) -> float:
        """Mean share of the memory by which the need exceeds `limit`, where so much is predicted."""
        above = (predicted + self.error_mean - limit) / self.error_deviation
        if above <= -NEGLIGIBLE_DEVIATIONS:
            return 0.0
        density = math.exp(-0.5 * above * above) / math.sqrt(2.0 * math.pi)
        return max(0.0, self.error_deviation * (density + above * self.chance(predicted, limit)))

    def chance(self, predicted: float, limit: float) -> float:
        """That the need exceeds `limit`."""
        above = (predicted + self.error_mean - limit) / self.error_deviation
        return 0.5 * math.erfc(-above / math.sqrt(2.0)) if above > -NEGLIGIBLE_DEVIATIONS else 0.0


@functools.cache
def load_headroom() -> Headroom:
    """The constants that `experiments/headroom.py` measured."""
    return Headroom(**json.loads(_FILE.read_text()))


def tight_seconds(topology: Topology, peak_bytes: int, compute_s: float, hidden_s: float) -> float:
    """Expected seconds that nearly full memory adds to a step of so much compute and hidden communication.

    Never negative, and 0 where no TPU compiler decides. Memory is what the chip gives, whatever limit was asked for.
    """
    if not topology.traits.compiles_ahead:
        return 0.0
    headroom, share = load_headroom(), peak_bytes / topology.usable_bytes
    begins = headroom.recompute_from
    again = (headroom.excess(share, begins) - headroom.excess(share, 1.0)) / (1.0 - begins)
    return FORWARD * compute_s * min(1.0, max(0.0, again)) + headroom.unhidden * hidden_s * headroom.chance(
        share, begins
    )


def roomy_bytes(topology: Topology) -> tuple[int, ...]:
    """Peaks at which it is about even that the compiler recomputes, and at which it most likely does not."""
    headroom = load_headroom()
    even = headroom.recompute_from - headroom.error_mean
    return tuple(int((even - far * headroom.error_deviation) * topology.usable_bytes) for far in (0.0, 2.0))
