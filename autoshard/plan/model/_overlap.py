"""What communication hides behind, and what is left exposed: the one rule of overlap.

A program runs in blocks: the body of every loop, and what is outside of loops. A block takes

    exposed + max(compute, hidden on link 1, hidden on link 2, ..., host memory)

A collective is hidden, wholly or by a share, where the compiler can run it beside the block's compute:

- what waits for parameters only (the gather of a split weight) can be fetched before it is needed, where the compiler
  makes it an asynchronous op: `Calibration.gather_overlap` of it, unless the compiler makes an all-reduce of it;
- what feeds the optimizer only (the sum of a gradient) could wait as well, but TPU compilers schedule it as a
  synchronous op: `Calibration.reduction_overlap` of it;
- either of them between slices or islands is a send and a receive, which run beside compute:
  `Calibration.network_overlap` of it;
- neither of them is hidden within a slice at an op that stands alone between loops (`_between_loops`);
- what stands at a matmul (the gather of its operand, the reduce-scatter of its result) is pipelined into it as a loop
  of permutes beside parts of the matmul, if the group is no larger than `Calibration.pipelined_max_group`, more than a
  pair or a square of chips, stays on ICI, and the matmul is `Calibration.pipelined_columns` wide (`columns_beside`):
  `Calibration.pipelined_overlap` of what its bytes take, for each of the permutes is launched and has its hop to go,
  however small it is;
- everything else is exposed, and on devices that share cores (`cpu:N`) everything is.

A hidden collective counts on every link that its mesh axes use. What the program itself sends to its host's memory
and fetches from there is one more link, hidden whole: XLA issues both as asynchronous copies. Loops are as long as
their trips; blocks do not overlap one another.

How this stays inside a pairwise Problem: for weights that are non-negative and sum to one in a block, the weighted sum
of its compute and links is at most their maximum, and it is a sum over nodes and edges. So the optimum of the weighted
Problem is a lower bound of every plan's true time, for any weights; a few weightings give candidates, the true time of
each is evaluated without weights, the best plan is kept and the highest bound is the certified one (`_search`).
"""

import enum
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import PIPELINED, WHOLLY, Collectives, Mesh, hidden_seconds, hiding_shares
from autoshard.graph import Op
from autoshard.plan.model._model import EXPOSED, Channel
from autoshard.plan.xla._states import WHOLE, States, local_elements


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
