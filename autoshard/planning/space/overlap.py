"""Overlap of communication with compute: the single rule for the hidden and the exposed share of a collective."""

import bisect
import enum
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import LEVEL_BETWEEN, PIPELINED, WHOLLY, Collectives, hidden_seconds, hiding_shares
from autoshard.graph import Op, OpGraph, Structure
from autoshard.planning.space.decision_model import EXPOSED, Channel
from autoshard.planning.xla.axis_assignments import WHOLE, States, local_elements


class Overlap(enum.StrEnum):
    """Reason why a reshard may be hidden."""

    NONE = "none"
    """No overlap: all of the reshard is exposed."""
    PARAMETERS = "parameters"
    """Wait for parameters only, so the reshard may begin early."""
    PARAMETERS_AT_MATMUL = "parameters at a matmul"
    """Wait for parameters only, at a matmul into which the compiler may pipeline the reshard."""
    GRADIENTS = "gradients"
    """Sum of a gradient, which only the update waits for."""
    MATMUL = "matmul"
    """Operand or result of a matmul, into which the reshard may be pipelined."""
    GRADIENTS_AT_MATMUL = "gradients at a matmul"
    """Sum of a gradient that is also a matmul's result."""
    GRADIENTS_IN_STEPS = "gradients in steps"
    """Sum of a gradient in a trip, scattered over some axes and then whole over others: only the scatter is hidden."""
    NETWORK = "the network alone"
    """Hidden only if all of it crosses the network between slices."""
    NETWORK_AT_MATMUL = "the network alone, at a matmul"
    """Hidden as for `NETWORK`, or pipelined into a matmul within a slice."""


AT_NARROW = {
    Overlap.MATMUL: Overlap.NONE,
    Overlap.PARAMETERS_AT_MATMUL: Overlap.PARAMETERS,
    Overlap.GRADIENTS_AT_MATMUL: Overlap.GRADIENTS,
    Overlap.NETWORK_AT_MATMUL: Overlap.NETWORK,
}
"""Overlap that is left if the matmul is too narrow to pipeline the reshard into it."""

ALONE = {
    Overlap.PARAMETERS: Overlap.NETWORK,
    Overlap.PARAMETERS_AT_MATMUL: Overlap.NETWORK,
    Overlap.GRADIENTS: Overlap.NETWORK,
    Overlap.GRADIENTS_AT_MATMUL: Overlap.NETWORK_AT_MATMUL,
}
"""Overlap that is left at an op that stands alone between loops."""

READING = (Overlap.PARAMETERS, Overlap.PARAMETERS_AT_MATMUL)
"""Overlaps of reshards that wait for parameters only."""

SUMS = (Overlap.GRADIENTS, Overlap.GRADIENTS_AT_MATMUL)
"""Overlaps of sums that only updates wait for."""

_EARLY = {
    "all-gather": ("gather_overlap",),
    "collective-permute": (WHOLLY,),
    "all-to-all": ("reduction_overlap",),
    "all-reduce": ("reduction_overlap",),
    "reduce-scatter": ("reduction_overlap",),
}
"""Calibration figure that hides a collective within a slice that waits for parameters only.

Gathers have a figure of their own, permutes are asynchronous everywhere, and other kinds are hidden as sums are.
"""


def macs_per_element(op: Op, side: int, states: States, axes: Sequence[int]) -> NDArray[np.float64]:
    """Return the multiply-adds of a local dot for each element of one of its tensors, [states].

    For an operand this is the number of columns of the other operand; for the result it is the contracted size. XLA
    uses this number to decide if a loop that overlaps a collective of the tensor with the matmul is worthwhile.

    - `side`: position among operands and then results, as in `Op.sides`.
    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    """
    assert op.rule is not None
    sides = [{factor for dim in dims for factor in dim} for _, dims in op.sides]
    others = sorted(set().union(*sides) - sides[side])
    places = np.full(len(op.rule.sizes) + 1, WHOLE)
    places[others] = range(len(others))
    return local_elements(places[states], [op.rule.sizes[factor] for factor in others], axes)


class NarrowMatmuls:
    """Masks of the alternatives of matmuls that are too narrow to pipeline a collective into, each computed once.

    - `axes`: sizes of the mesh axes.
    - `least`: fewest multiply-adds for each element of the tensor with which a collective is pipelined.
    """

    def __init__(self, axes: Sequence[int], least: float) -> None:
        self.axes, self.least = axes, least
        self._masks: dict[tuple[object, ...], NDArray[np.bool_] | None] = {}

    def mask(self, op: Op, side: int, states: States) -> NDArray[np.bool_] | None:
        """Return the mask, [states], for one of a matmul's tensors; None if no alternative is too narrow.

        - `side`, `states`: as for `macs_per_element`.
        """
        key = (id(op.rule), side, states.shape, states.tobytes())
        if key not in self._masks:
            narrow = macs_per_element(op, side, states, self.axes) < self.least
            self._masks[key] = narrow if narrow.any() else None
        return self._masks[key]


def hidden_share(collectives: Collectives, overlap: Overlap, kind: str, axes: Sequence[str], size: float) -> float:
    """Return the share (0 to 1) of a collective's seconds that overlaps with compute.

    - `overlap`: how it may be hidden.
    - `kind`, `axes`: kind of collective and mesh axes of its group.
    - `size`: bytes as `Collectives.time` counts them.
    """
    hides = hiding_figures(collectives, overlap, kind, axes)
    shares = hiding_shares(collectives, hides, kind, tuple(axes))  # type: ignore[arg-type]
    seconds, least = (collectives.time(kind, tuple(axes), what) for what in (size, 0.0))  # type: ignore[arg-type]
    return float(hidden_seconds(shares, seconds, least) / seconds) if seconds else shares[0]


def hiding_figures(collectives: Collectives, overlap: Overlap, kind: str, axes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the calibration figures that hide a collective (`Charge.hides`); none if it is exposed.

    Collectives over the network alone, except those at a plain matmul, have a figure of their own. So has the level
    between slices of a gradient's sum, and of a gathered parameter, over slices and chips of a slice. A gather or
    reduce-scatter at a matmul that is walked in a loop overlaps with that matmul alone.
    """
    if not collectives.can_overlap or overlap is Overlap.NONE:
        return ()
    mesh = collectives.mesh
    kinds = mesh.kinds(axes)
    if overlap is Overlap.GRADIENTS_IN_STEPS and kind == "all-reduce":
        return ()
    if overlap is not Overlap.MATMUL and kinds == {"network"}:
        return ("network_overlap",)
    if overlap in AT_NARROW and kind in ("all-gather", "reduce-scatter") and _is_looped(collectives, axes):
        # A collective matmul: XLA turns the gather or scatter into a loop of permutes and partial matmuls.
        return (PIPELINED,)
    figures: tuple[str, ...] = _EARLY[kind] if overlap in READING else ()
    if overlap in (*SUMS, Overlap.GRADIENTS_IN_STEPS):
        figures = ("reduction_overlap",)
    return (*figures, LEVEL_BETWEEN) if figures and mesh.topology.traits.torus and "network" in kinds else figures


def _is_looped(collectives: Collectives, axes: Sequence[str]) -> bool:
    """Return True if a compiler walks a group at a wide matmul in a loop of permutes.

    Groups of more than `Calibration.pipelined_max_group`, and between slices, are not looped. On TPUs a pair, and a
    square of two by two chips, is not looped either.
    """
    mesh = collectives.mesh
    group = math.prod(mesh.axes[axis] for axis in axes)
    if "network" in mesh.kinds(axes) or group > collectives.calibration.pipelined_max_group:
        return False
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
    exposed: float = 0.0,
) -> dict[Channel, float]:
    """Return the channels that a collective of `size` bytes occupies, with the share of its seconds in each.

    The hidden share goes to each axis's link, the rest to `EXPOSED`; channels with no share are left out. An axis of
    one device has no links.

    - `link_of`: name of the links by mesh axis.
    - `overlap`: how the collective may be hidden.
    - `kind`, `axes`: kind of collective and mesh axes of its group.
    - `block`: the loop in which it runs, -1 for the top level.
    - `exposed`: share that overlaps with nothing (`Reshard.exposed`).
    """
    hidden = (1.0 - exposed) * hidden_share(collectives, overlap, kind, axes, size)
    shares: dict[Channel, float] = {(block, link_of[axis]): hidden for axis in axes if axis in link_of and hidden}
    if hidden < 1.0:
        shares[EXPOSED] = 1.0 - hidden
    return shares


def ends_of_step(graph: OpGraph) -> tuple[range, range]:
    """Return the ops up to the first matmul of a step without loops of matmuls, and those from the last matmul on.

    No work precedes what the first ones gather, and only updates follow what the last ones sum. Both ranges are empty
    for a step with loops: `alone_between_loops` has the ops around them.

    Evidence: docs/compiler_behaviour.md, "Collectives at the ends of a step".
    """
    work = [op for op in graph.ops if op.flops]
    if not work or any(op.loop >= 0 for op in work):
        return range(0), range(0)
    return range(work[0].id + 1), range(work[-1].id, len(graph.ops))


def alone_between_loops(graph: OpGraph, structure: Structure, read: Set[int], written: Set[int]) -> frozenset[int]:
    """Return the ids of ops that stand alone between loops of matmuls, without other weights' work to overlap with.

    Between two such loops of a block, the matmuls read at most one weight and write at most one. Ops after the last
    loop count only if there is a matmul among them: else they update weights, and the updates overlap with each other.

    - `read`: clusters of weights as they are stored.
    - `written`: clusters of weights as the step leaves them.
    """
    ends = defaultdict(list)
    has_work = [0] * len(graph.loops)
    for op in graph.ops:
        loop = op.loop if op.flops else -1
        while loop >= 0 and not has_work[loop]:
            has_work[loop] = 1
            loop = graph.loops[loop].parent
    for loop, record in enumerate(graph.loops):
        if has_work[loop] and not record.branches:
            ends[record.parent].append(record.stop)
    for stops in ends.values():
        stops.sort()
    parts: dict[tuple[int, int], list[int]] = defaultdict(list)
    for op in graph.ops:
        if op.loop in ends:
            parts[op.loop, bisect.bisect_right(ends[op.loop], op.id)].append(op.id)
    alone: list[int] = []
    for (block, part), ops in parts.items():
        matmuls = [graph.ops[op] for op in ops if graph.ops[op].flops]
        if not matmuls and part == len(ends[block]):
            continue  # weight updates, which overlap with the collectives of other weights
        reads = {structure.cluster_of[t] for op in matmuls for t in op.operands} & read
        writes = {structure.cluster_of[t] for op in matmuls for t in op.results} & written
        if len(reads) <= 1 and len(writes) <= 1:
            alone += ops
    return frozenset(alone)
