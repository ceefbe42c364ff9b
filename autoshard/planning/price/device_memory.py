"""Memory beside a program's values: collective buffers, results that replace no argument, and memory pressure."""

import bisect
import dataclasses
import functools
import json
import math
import pathlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Topology
from autoshard.graph import OpClass, OpGraph
from autoshard.planning.space.decision_model import Model, Reshard
from autoshard.planning.xla.axis_assignments import local_elements


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
    """The constants that `experiments/fidelity/headroom.py` measured."""
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


JOINED = 30 * 2**20 + 7
"""Bytes up to which collectives are joined: the default of the GPU compiler's thresholds."""

_Steps = Iterable[tuple[str, tuple[str, ...], float, float]]
_Group = tuple[str, tuple[str, ...], int]
"""Kind, mesh axes and block."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Buffered:
    """What one collective holds on a device during [start, stop)."""

    start: int
    stop: int
    size: int
    tensor: int


def in_flight(
    model: Model, choices: NDArray[np.int64], steps: Sequence[_Steps]
) -> list[tuple[int, int, int, str, int]]:
    """(first op, end, bytes, kind, tensor) of what collectives hold; `steps` are those of every reshard in its turn."""
    gathers: dict[_Group, list[_Buffered]] = defaultdict(list)
    sums: dict[_Group, list[_Buffered]] = defaultdict(list)
    users = _users(model)
    for number, reshard in enumerate(model.reshards):
        kinds = {kind: axes for kind, axes, *_ in steps[number]}
        if "all-gather" in kinds and (held := _gathered(model, reshard, choices, users)) is not None:
            gathers["all-gather", kinds["all-gather"], reshard.block].append(held)
        kind = next((kind for kind in ("reduce-scatter", "all-reduce") if kind in kinds), None)
        if kind is not None and model.nodes[reshard.source].kind == "op":
            sums[kind, kinds[kind], reshard.block].append(_unsummed(model, reshard, choices))
    return [
        (held.start, held.stop, held.size, kind, held.tensor)
        for kind, groups in (("gathered", gathers), ("temporaries", sums))
        for held in _joined(groups, first=groups is gathers)
    ]


def _users(model: Model) -> dict[tuple[int, int], list[int]]:
    """The heavy ops that take a tensor, by the tensor and their block."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for edge in model.structure.edges:
        if edge.op >= 0 and edge.operand >= 0 and model.graph.ops[edge.op].op_class is OpClass.HEAVY:
            found[edge.tensor, model.graph.ops[edge.op].loop].append(edge.op)
    return found


def _gathered(
    model: Model, reshard: Reshard, choices: NDArray[np.int64], users: Mapping[tuple[int, int], list[int]]
) -> _Buffered | None:
    """An operand of matmuls and the like as they take it; None for what else is gathered, and for what has a memory
    term of its own."""
    node, graph = model.nodes[reshard.target], model.graph
    if node.kind == "cluster" or node.memory and node.kind == "copy":
        return None
    block = graph.ops[reshard.op].loop
    taken = users[reshard.tensor, block] if node.kind == "copy" else [reshard.op]
    start, stop = min(taken), max(taken) + 1
    home, loop = graph.tensors[reshard.tensor].loop, block
    while loop not in (home, -1):  # gathered once, before the loops that leave it as it is
        start, stop = graph.loops[loop].start, graph.loops[loop].stop
        loop = graph.loops[loop].parent
    column = int(reshard.columns[int(choices[reshard.target])])
    return _Buffered(start, stop, _bytes(model, reshard, reshard.path.target[[column]]), reshard.tensor)


def _unsummed(model: Model, reshard: Reshard, choices: NDArray[np.int64]) -> _Buffered:
    """An op's result as one device computes it."""
    row = int(reshard.rows[int(choices[reshard.source])])
    return _Buffered(reshard.op, reshard.op + 1, _bytes(model, reshard, reshard.path.source[[row]]), reshard.tensor)


def _bytes(model: Model, reshard: Reshard, state: NDArray[np.int64]) -> int:
    elements = local_elements(state, reshard.path.factors, model.axis_sizes)
    return round(float(elements[0]) * reshard.path.itemsize)


def _joined(groups: Mapping[_Group, list[_Buffered]], first: bool) -> Iterator[_Buffered]:
    """The same, with what is joined held from the first on, or to the last one."""
    for members in groups.values():
        together: list[_Buffered] = []
        for held in (*sorted(members, key=lambda each: each.start), None):
            if together and (held is None or sum(each.size for each in together) + held.size > JOINED):
                start, stop = min(each.start for each in together), max(each.stop for each in together)
                for each in together:
                    ends = {"start": start} if first else {"stop": stop}
                    yield dataclasses.replace(each, **ends)
                together = []
            if held is not None:
                together.append(held)


NEGLIGIBLE_SHARE = 1e-4
"""Buffers below this share of all reserved memory keep their own place: they change no peak."""


class HeldBuffer(NamedTuple):
    """Bytes that every device holds during [start, stop), in op ids."""

    start: int
    stop: int
    size: int
    kind: str
    tensor: int
    """The tensor that they are of, or that they are held to make; -1 if none is known."""


def reserve(graph: OpGraph, buffers: Sequence[HeldBuffer], results: Collection[int]) -> list[HeldBuffer]:
    """Return a program's buffers with its `results` held from the start.

    A buffer that is placed in the memory of a result keeps its own bytes, and the result holds the rest meanwhile. An
    elementwise op may write its result over an operand of the same size.
    """
    end = len(graph.ops)
    homes = sorted(
        (each for each in buffers if each.tensor in results and each.stop > end and each.start > 0 and each.size),
        key=lambda each: (each.size, each.start),
    )
    sizes = [home.size for home in homes]
    least = NEGLIGIBLE_SHARE * sum(sizes)
    tenants: list[list[HeldBuffer]] = [[] for _ in homes]
    placed: list[HeldBuffer] = []
    for each in sorted(buffers, key=lambda each: (-each.size, each.start, each.stop)):
        for number in range(bisect.bisect_left(sizes, each.size), len(homes)):
            if not 0 < each.start < each.stop <= end or each.size <= least:
                break
            home = homes[number]
            over = each.size == home.size and graph.ops[home.start].op_class is OpClass.POINTWISE
            done = each._replace(stop=min(each.stop, home.start))
            apart = (each.stop <= other.start or other.stop <= each.start for other in tenants[number])
            if each.stop <= home.start + over and done.start < done.stop and all(apart):
                tenants[number].append(done)
                each = done
                break
        placed.append(each)
    for home, inside in zip(homes, tenants, strict=True):
        at = 0
        for tenant in sorted(inside):
            placed.append(home._replace(start=at, stop=tenant.start))
            placed.append(home._replace(start=tenant.start, stop=tenant.stop, size=home.size - tenant.size))
            at = tenant.stop
        placed.append(home._replace(start=at, stop=home.start))
    return [each for each in placed if each.size and each.start < each.stop]
