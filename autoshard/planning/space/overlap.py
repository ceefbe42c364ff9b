"""Overlap of communication with compute: the one rule of what is hidden and what is exposed."""

import bisect
import enum
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import PIPELINED, WHOLLY, Collectives, Mesh, hidden_seconds, hiding_shares
from autoshard.graph import Op, OpGraph, Structure
from autoshard.planning.space.decision_model import EXPOSED, Channel
from autoshard.planning.xla.axis_assignments import WHOLE, States, local_elements


class Overlap(enum.StrEnum):
    """Why a move may be hidden."""

    NONE = "none"
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    MATMUL = "matmul"
    GRADIENTS_AT_MATMUL = "gradients at a matmul"
    NETWORK = "the network alone"
    NETWORK_AT_MATMUL = "the network alone, at a matmul"


AT_NARROW = {
    Overlap.MATMUL: Overlap.NONE,
    Overlap.GRADIENTS_AT_MATMUL: Overlap.GRADIENTS,
    Overlap.NETWORK_AT_MATMUL: Overlap.NETWORK,
}
"""What a move may hide behind at a matmul that is too narrow to have it pipelined into it."""

ALONE = {
    Overlap.PARAMETERS: Overlap.NETWORK,
    Overlap.GRADIENTS: Overlap.NETWORK,
    Overlap.GRADIENTS_AT_MATMUL: Overlap.NETWORK_AT_MATMUL,
}
"""What a move may hide behind at an op that stands alone between loops, for what it may elsewhere."""

_EARLY = {
    "all-gather": ("gather_overlap",),
    "collective-permute": (WHOLLY,),
    "all-to-all": ("reduction_overlap",),
    "all-reduce": ("reduction_overlap",),
    "reduce-scatter": ("reduction_overlap",),
}
"""What hides a collective within a slice that waits for parameters only: gathers have a figure of their own, permutes
are asynchronous everywhere, and others where sums are."""


def columns_beside(op: Op, side: int, states: States, axes: Sequence[int]) -> NDArray[np.float64]:
    """Multiply-adds that a dot does in one device for each element of one of its tensors, in each state of the op.

    `side` counts operands and then results, as `Op.sides` does; `axes` are sizes of mesh axes. Of an operand these are
    the columns of the other one; of the result it is the length of the sums. XLA decides by it whether a collective
    of that tensor is worth a loop beside the matmul.
    """
    assert op.rule is not None
    sides = [{factor for dim in dims for factor in dim} for _, dims in op.sides]
    others = sorted(set().union(*sides) - sides[side])
    places = np.full(len(op.rule.sizes) + 1, WHOLE)
    places[others] = range(len(others))
    return local_elements(places[states], [op.rule.sizes[factor] for factor in others], axes)


def hidden_share(collectives: Collectives, overlap: Overlap, kind: str, axes: Sequence[str], size: float) -> float:
    """Share of a collective of `size` bytes over mesh axes that runs beside compute."""
    shares = hiding_shares(collectives.calibration, hiding_figures(collectives, overlap, kind, axes))
    seconds, least = (collectives.time(kind, tuple(axes), what) for what in (size, 0.0))  # type: ignore[arg-type]
    return float(hidden_seconds(shares, seconds, least) / seconds) if seconds else shares[0]


def hiding_figures(collectives: Collectives, overlap: Overlap, kind: str, axes: Sequence[str]) -> tuple[str, ...]:
    """Figures of the calibration that say so (see `Charge.hides`); none where all of it is waited for."""
    if not collectives.can_overlap or overlap is Overlap.NONE:
        return ()
    mesh = collectives.mesh
    kinds = mesh.kinds(axes)
    if overlap is not Overlap.MATMUL and kinds == {"network"}:
        return ("network_overlap",)
    if overlap is Overlap.PARAMETERS:
        return _EARLY[kind]
    found = ("reduction_overlap",) if overlap in (Overlap.GRADIENTS, Overlap.GRADIENTS_AT_MATMUL) else ()
    if overlap in AT_NARROW and kind in ("all-gather", "reduce-scatter") and "network" not in kinds:
        group = math.prod(mesh.axes[axis] for axis in axes)
        if group <= collectives.calibration.pipelined_max_group and _is_looped(mesh, axes):
            found = (*found, PIPELINED)
    return found


def _is_looped(mesh: Mesh, axes: Sequence[str]) -> bool:
    """Whether a TPU compiler walks a group in a loop of permutes: not a pair, and not a square of two by two chips."""
    if not mesh.topology.traits.compiles_ahead:
        return True
    lengths: dict[str, int] = {}
    for segment in itertools.chain.from_iterable(mesh.segments(axis) for axis in axes):
        lengths[segment.axis] = lengths.get(segment.axis, 1) * segment.size
    return math.prod(lengths.values()) > 4 or max(lengths.values(), default=1) > 2


def lanes(
    collectives: Collectives,
    link_of: Mapping[str, str],
    overlap: Overlap,
    kind: str,
    axes: Sequence[str],
    size: float,
    block: int,
) -> dict[Channel, float]:
    """What a collective of `size` bytes competes with: channel -> share of its seconds there.

    An axis of one device has no links.
    """
    hidden = hidden_share(collectives, overlap, kind, axes, size)
    found: dict[Channel, float] = {(block, link_of[axis]): hidden for axis in axes if axis in link_of and hidden}
    if hidden < 1.0:
        found[EXPOSED] = 1.0 - hidden
    return found


def alone_between_loops(graph: OpGraph, structure: Structure, read: Set[int], written: Set[int]) -> frozenset[int]:
    """Ops of blocks that hold loops of matmuls, where matmuls between two such loops have at most one weight.

    Not those behind the last loop, unless there is a matmul among them: they update weights, one beside another.

    `read` and `written` are clusters of weights as they are stored, and as the step leaves them.
    """
    ends = defaultdict(list)
    works = [0] * len(graph.loops)
    for op in graph.ops:
        loop = op.loop if op.flops else -1
        while loop >= 0 and not works[loop]:
            works[loop] = 1
            loop = graph.loops[loop].parent
    for loop, record in enumerate(graph.loops):
        if works[loop] and not record.branches:
            ends[record.parent].append(record.stop)
    for stops in ends.values():
        stops.sort()
    parts: dict[tuple[int, int], list[int]] = defaultdict(list)
    for op in graph.ops:
        if op.loop in ends:
            parts[op.loop, bisect.bisect_right(ends[op.loop], op.id)].append(op.id)
    found: list[int] = []
    for (block, part), ops in parts.items():
        busy = [graph.ops[op] for op in ops if graph.ops[op].flops]
        if not busy and part == len(ends[block]):
            continue  # the updates of all weights, which run beside what the others send
        reads = {structure.cluster_of[t] for op in busy for t in op.operands} & read
        writes = {structure.cluster_of[t] for op in busy for t in op.results} & written
        if len(reads) <= 1 and len(writes) <= 1:
            found += ops
    return frozenset(found)
