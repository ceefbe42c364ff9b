"""What a nearly full memory is expected to cost: the compiler recomputes, or refuses.

The TPU compiler begins to recompute values on its own when what a program needs exceeds a share of the memory, and
refuses it when that does not bring it below the whole. What it will need is known within the error of our memory
model. So a plan near the limit is charged what recomputing first values takes times the chance that they must be, and
what recomputing the whole forward pass takes times the chance that it does not fit: its way out would be that.
With room to spare both are nothing. The constants are data, written by `experiments/headroom.py --write`.
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


NEGLIGIBLE = 5.0
"""Deviations from which on a chance is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Headroom:
    """When the compiler recomputes, at what cost, and how well its need is foreseen."""

    recompute_from: float
    """Share of the memory above which the compiler recomputes."""
    recompute: float
    """Share of the step's compute that it then adds."""
    error_mean: float
    """Of (compiled - predicted) peaks of programs that need much of the memory, as shares of it."""
    error_deviation: float
    source: str


@functools.cache
def load_headroom() -> Headroom:
    """The constants that `experiments/headroom.py` measured."""
    return Headroom(**json.loads(_FILE.read_text()))


def tight_seconds(topology: Topology, peak_bytes: int, compute_s: float) -> float:
    """Expected seconds that nearly full memory adds to a step of so much compute and so large a predicted peak.

    Never negative, and 0 where no TPU compiler decides. Memory is what the chip gives, whatever limit was asked for.
    """
    if topology.backend != "tpu":
        return 0.0
    headroom = load_headroom()
    needed = peak_bytes / topology.usable_bytes + headroom.error_mean
    recomputed = _chance((needed - headroom.recompute_from) / headroom.error_deviation)
    refused = _chance((needed - 1.0) / headroom.error_deviation)
    return compute_s * (headroom.recompute * recomputed + max(0.0, FORWARD - headroom.recompute) * refused)


def roomy_bytes(topology: Topology) -> tuple[int, ...]:
    """Peaks at which it is about even that the compiler recomputes, and at which it most likely does not."""
    headroom = load_headroom()
    even = headroom.recompute_from - headroom.error_mean
    return tuple(int((even - far * headroom.error_deviation) * topology.usable_bytes) for far in (0.0, 2.0))


def _chance(deviations: float) -> float:
    """That a normally distributed error is less than so many deviations above its mean."""
    return 0.5 * math.erfc(-deviations / math.sqrt(2.0)) if deviations > -NEGLIGIBLE else 0.0
