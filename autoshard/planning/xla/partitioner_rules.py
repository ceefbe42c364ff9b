"""What XLA's partitioner really does with an op whose factor a mesh axis splits.

Shardy's rules say which factors may be split, not what that costs. By default a parallel factor is computed in place,
a reduction leaves sums to be done, and a factor that needs replication or is a permutation is gathered first. `TABLE`
lists where the partitioner does otherwise; every row was read from the op compiled alone for eight CPU devices
(`tests/plan/xla/test_handling.py` compiles them again).
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.graph import FactorKind, Op, OpGraph
from autoshard.planning.xla.axis_assignments import States, local_elements
from autoshard.planning.xla.spatial_splits import Inner, halo_exchanges, shifts


class Handling(enum.StrEnum):
    """What becomes of a factor that mesh axes split."""

    LOCAL = "local"
    """Every device computes on its shard; nothing moves."""
    SUM = "sum"
    """Every device has a part of a sum; the parts are added afterwards."""
    COLLECT = "collect"
    """Every device has a partial result; all of them are gathered and combined (reductions of several values)."""
    HALO = "halo"
    """Shards borrow what their windows reach into from their neighbours; done by a manual region, not by XLA."""
    SHIFT = "shift"
    """A slice or pad moves the elements at the edges of shards to the next one: XLA's own exchange of halos."""
    SWAP = "swap"
    """Shards change places in one collective-permute."""
    WHOLE = "whole"
    """Gathered, or moved to another dim, before the op: no strategy splits it."""


DEFAULT = {
    FactorKind.PARALLEL: Handling.LOCAL,
    FactorKind.REDUCTION: Handling.SUM,
    FactorKind.NEED_REPLICATION: Handling.WHOLE,
    FactorKind.PERMUTATION: Handling.WHOLE,
}

Condition = Callable[[OpGraph, Op, int], bool]
"""Whether a row holds for a factor (by number) of an op."""


def _always(graph: OpGraph, op: Op, factor: int) -> bool:
    return True


def _writes_a_part(graph: OpGraph, op: Op, factor: int) -> bool:
    """True if an update of more than one element is put somewhere along the factor."""
    if op.rule is None:
        return False
    whole, part = op.rule.operands[:2]
    shape = graph.tensors[op.operands[1]].shape
    return any(factor in a and factor not in b and size > 1 for a, b, size in zip(whole, part, shape, strict=True))


def _of_several(graph: OpGraph, op: Op, factor: int) -> bool:
    return len(op.results) > 1


def _on_compound_dim(graph: OpGraph, op: Op, factor: int) -> bool:
    """True for a factor that shares a dim with others: its split is left to the reshapes around the op.

    Not in a call that is run on shards: the last factor says how large a block must stay whole, and `heavy_strategies`
    splits those between only where those before them are split to single elements.
    """
    if op.rule is None or (op.opaque is not None and op.opaque.on_shards):
        return False
    return any(factor in dim and len(dim) > 1 for dims in (*op.rule.operands, *op.rule.results) for dim in dims)


def _region_by_hand(graph: OpGraph, op: Op, factor: int) -> bool:
    """Return True for an op that needs a region, in one that the program itself has split: no region fits in there."""
    return bool(op.manual) and (op.grouped or op.kind == "fft")


def _called_by_hand(graph: OpGraph, op: Op, factor: int) -> bool:
    """True for an opaque call inside a region that the program itself has split: it gets shards as they are."""
    return bool(op.manual) and op.opaque is not None and op.opaque.on_shards


def _reshards_by_little(graph: OpGraph, op: Op, factor: int) -> bool:
    return factor in dict(op.offsets)


@dataclasses.dataclass(frozen=True, slots=True)
class HandlingRow:
    """One exception; the first row that fits a factor decides."""

    op: str
    """The op's kind, or `*` for every op."""
    factor: FactorKind | None
    """Kind of the factor; None for any."""
    handling: Handling
    when: Condition = _always
    backend: str | None = None
    """The backend that does so; None for all of them."""


_ROWS = (
    HandlingRow("*", None, Handling.WHOLE, _on_compound_dim),
    HandlingRow("*", None, Handling.WHOLE, _called_by_hand),
    HandlingRow("*", None, Handling.WHOLE, _region_by_hand),
    HandlingRow("dynamic_update_slice", FactorKind.PARALLEL, Handling.WHOLE, _writes_a_part),
    HandlingRow("pad", FactorKind.PERMUTATION, Handling.SHIFT, _reshards_by_little),
    HandlingRow("reduce", FactorKind.REDUCTION, Handling.COLLECT, _of_several),
    HandlingRow("reverse", FactorKind.PERMUTATION, Handling.SWAP),
    HandlingRow("rotate", FactorKind.PERMUTATION, Handling.SWAP),
    HandlingRow("slice", FactorKind.PERMUTATION, Handling.SHIFT, _reshards_by_little),
    HandlingRow("top_k", None, Handling.WHOLE, backend="cpu"),
)

TABLE: dict[str, tuple[HandlingRow, ...]] = {
    kind: tuple(row for row in _ROWS if row.op == kind) for kind in sorted({row.op for row in _ROWS})
}
"""Exceptions by op kind."""


def handling(graph: OpGraph, op: Op, factor: int, backend: str) -> Handling:
    """What becomes of one factor of an op with a rule on a backend (`cpu`, `tpu`, `gpu`)."""
    if op.rule is None:
        return Handling.WHOLE
    kind = op.rule.kinds[factor]
    if any(halo.factor == factor for halo in op.halos):
        return Handling.HALO
    for row in (*TABLE.get("*", ()), *TABLE.get(op.kind, ())):
        if row.factor in (None, kind) and row.backend in (None, backend) and row.when(graph, op, factor):
            return row.handling
    return DEFAULT[kind]


def whole_factors(graph: OpGraph, op: Op, backend: str) -> frozenset[int]:
    """Factors that no strategy splits."""
    count = len(op.rule.sizes) if op.rule else 0
    return frozenset(f for f in range(count) if handling(graph, op, f, backend) is Handling.WHOLE)


def inner_collectives(graph: OpGraph, op: Op, states: States, axes: Sequence[int], backend: str) -> list[Inner]:
    """Collectives that run as part of an op: neither moves of its operands nor of its results."""
    if op.rule is None:
        return []
    found: list[Inner] = []
    for factor in range(len(op.rule.sizes)):
        if handling(graph, op, factor, backend) is Handling.SWAP:
            found += _swaps(graph, op, factor, states, axes)
    return found + halo_exchanges(graph, op, states, axes) + shifts(graph, op, states, axes)


def _swaps(graph: OpGraph, op: Op, factor: int, states: States, axes: Sequence[int]) -> list[Inner]:
    """One permute of the operand's shard over all axes of the factor."""
    record = graph.tensors[op.operands[0]]
    assert op.rule is not None
    present = [f for dim in op.rule.operands[0] for f in dim]
    sizes = [size if f in present else 1 for f, size in enumerate(op.rule.sizes)]
    local = local_elements(states, sizes, axes) * record.itemsize
    on_factor = states == factor
    found = []
    for row in np.unique(on_factor, axis=0):
        if row.any():
            same = (on_factor == row).all(axis=1)
            split = tuple(np.flatnonzero(row).tolist())
            size = np.where(same, local, 0.0)
            if op.kind == "rotate":
                size = size * _crossing(op, op.rule.sizes[factor], math.prod(axes[a] for a in split))
            found.append(Inner("collective-permute", split, size))
    return found


def _crossing(op: Op, size: int, parts: int) -> float:
    """The share of a shard that a roll of a dim of `size` in so many parts hands to another device.

    The same holds of a roll's gradient, a sum of two padded slices, whose two permutes have no device in common; with
    several rows in a shard XLA was seen to add an all-reduce of what crosses (4 parts of 8 on a mesh of 4x2).
    """
    rows = -(-size // parts)
    return min(op.shift, size - op.shift, rows) / rows
