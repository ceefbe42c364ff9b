"""Treatment of an op by XLA's partitioner when a mesh axis splits one of the op's factors.

Shardy's rules state which factors may be split, but not the cost. By default a parallel factor is computed locally and
a reduction leaves partial sums. A factor that needs replication, or is a permutation, is gathered first. `TABLE` lists
the exceptions. Every row was read from the op compiled alone for eight CPU devices, which
`tests/plan/xla/test_handling.py` repeats.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import BACKENDS
from autoshard.graph import FactorKind, Op, OpGraph
from autoshard.planning.xla.axis_assignments import WHOLE, States, local_elements
from autoshard.planning.xla.spatial_splits import Inner, halo_exchanges, shifts


class Handling(enum.StrEnum):
    """Treatment of a factor that mesh axes split."""

    LOCAL = "local"
    """Every device computes on its shard, without communication."""
    SUM = "sum"
    """Every device computes a partial sum; the partial sums are reduced afterwards."""
    COLLECT = "collect"
    """Every device computes a partial result; all are gathered and combined."""
    HALO = "halo"
    """Shards fetch the elements that their windows reach into from their neighbours, in a manual region of the plan."""
    SHIFT = "shift"
    """Elements at the edges of shards move to the next shard, by XLA's own halo exchange for slices and pads."""
    SWAP = "swap"
    """Shards change places in one collective-permute."""
    WHOLE = "whole"
    """Factor that no strategy splits: it is gathered, or its axes move to another dim, before the op."""


DEFAULT = {
    FactorKind.PARALLEL: Handling.LOCAL,
    FactorKind.REDUCTION: Handling.SUM,
    FactorKind.NEED_REPLICATION: Handling.WHOLE,
    FactorKind.PERMUTATION: Handling.WHOLE,
}
"""Treatment of each kind of factor for ops without an exception."""

Condition = Callable[[OpGraph, Op, int], bool]
"""Test if a row applies to a factor (by number) of an op."""


def _always(graph: OpGraph, op: Op, factor: int) -> bool:
    """Return True: the condition of a row that always applies."""
    return True


def _writes_a_part(graph: OpGraph, op: Op, factor: int) -> bool:
    """Return True if the op writes an update of several elements at an offset along the factor."""
    if op.rule is None:
        return False
    whole, part = op.rule.operands[:2]
    shape = graph.tensors[op.operands[1]].shape
    return any(factor in a and factor not in b and size > 1 for a, b, size in zip(whole, part, shape, strict=True))


def _of_several(graph: OpGraph, op: Op, factor: int) -> bool:
    """Return True if the op has several results."""
    return len(op.results) > 1


def _on_compound_dim(graph: OpGraph, op: Op, factor: int) -> bool:
    """Return True for a factor that shares a dim with other factors; the reshapes around the op decide its split.

    The result is False for calls that run on shards. Their last factor is the block that must stay whole, and
    `heavy_strategies` splits it only if the factors before it have local size 1.
    """
    if op.rule is None or op.on_shards:
        return False
    return any(factor in dim and len(dim) > 1 for dims in (*op.rule.operands, *op.rule.results) for dim in dims)


def _region_by_hand(graph: OpGraph, op: Op, factor: int) -> bool:
    """Return True for an op that needs a manual region but is inside a region of the program, where no other fits."""
    return bool(op.manual) and (op.grouped or op.kind == "fft")


def _called_by_hand(graph: OpGraph, op: Op, factor: int) -> bool:
    """Return True for an op on shards inside a manual region of the program, whose operands are shards already."""
    return bool(op.manual) and op.on_shards


def _reshards_by_little(graph: OpGraph, op: Op, factor: int) -> bool:
    """Return True if the op shifts elements along the factor by a known offset."""
    return factor in dict(op.offsets)


@dataclasses.dataclass(frozen=True, slots=True)
class HandlingRow:
    """Exception from the defaults; the first row that applies to a factor decides."""

    op: str
    """Kind of the op, or `*` for every op."""
    factor: FactorKind | None
    """Kind of the factor; None for any kind."""
    handling: Handling
    """Treatment that the row gives the factor."""
    when: Condition = _always
    """Further condition on the factor."""
    backend: str | None = None
    """Backend that the row applies to; None for all backends."""


# Exceptions, in the order in which they are tried for an op.
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
    HandlingRow("top_k", FactorKind.REDUCTION, Handling.COLLECT),
)

TABLE: dict[str, tuple[HandlingRow, ...]] = {
    kind: tuple(row for row in _ROWS if row.op == kind) for kind in sorted({row.op for row in _ROWS})
}
"""Exceptions by op kind."""


def handling(graph: OpGraph, op: Op, factor: int, backend: str) -> Handling:
    """Return the treatment of one factor (number) of an op on a backend (`cpu`, `tpu`, `gpu`).

    An op without a rule is whole, and a factor with a halo is `HALO`. Then rows for every op, rows for the op's kind,
    and the defaults decide, in this order.
    """
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
    """Return the factors, by number, that no strategy splits; empty for an op without a rule."""
    count = len(op.rule.sizes) if op.rule else 0
    return frozenset(f for f in range(count) if handling(graph, op, f, backend) is Handling.WHOLE)


def collected_factors(graph: OpGraph, op: Op, backend: str) -> frozenset[int]:
    """Return the factors, by number, whose partial results are gathered and combined; none for an op without a rule."""
    count = len(op.rule.sizes) if op.rule else 0
    return frozenset(f for f in range(count) if handling(graph, op, f, backend) is Handling.COLLECT)


def called_on_shards(op: Op, states: States, axes: Sequence[int], backend: str) -> NDArray[np.bool_]:
    """Return a mask of the states in which an op's splits need a call on shards, [states].

    The partitioner itself splits a top-k along its rows on some backends, if no device repeats the work of another.
    Evidence: docs/compiler_behaviour.md, "Splits of a top-k".

    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    - `backend`: `cpu`, `tpu` or `gpu`.
    """
    split = np.any(states >= 0, axis=1)
    if not op.on_shards or op.rule is None:
        return np.zeros_like(split)
    if op.opaque is not None or not BACKENDS[backend].selects_in_rows:
        return split
    parallel = [f for f, kind in enumerate(op.rule.kinds) if kind is FactorKind.PARALLEL]
    alone = (np.isin(states, parallel) | (np.array(axes) == 1)).all(axis=1)
    return split & ~alone


def inner_collectives(graph: OpGraph, op: Op, states: States, axes: Sequence[int], backend: str) -> list[Inner]:
    """Return the collectives that run as part of an op, as opposed to reshards of its operands and results.

    They are swaps, then halo exchanges, then shifts; an op without a rule has none.

    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    - `backend`: `cpu`, `tpu` or `gpu`.
    """
    if op.rule is None:
        return []
    collectives: list[Inner] = []
    for factor in range(len(op.rule.sizes)):
        if handling(graph, op, factor, backend) is Handling.SWAP:
            collectives += _swaps(graph, op, factor, states, axes)
    return collectives + halo_exchanges(graph, op, states, axes) + shifts(graph, op, states, axes)


def _swaps(graph: OpGraph, op: Op, factor: int, states: States, axes: Sequence[int]) -> list[Inner]:
    """Return one permute of the first operand's shard over all axes of the factor, for each set of axes.

    A roll sends only the share that crosses to another device.
    """
    record = graph.tensors[op.operands[0]]
    assert op.rule is not None
    present = [f for dim in op.rule.operands[0] for f in dim]
    sizes = [size if f in present else 1 for f, size in enumerate(op.rule.sizes)]
    local = local_elements(states, sizes, axes) * record.itemsize
    on_factor = states == factor
    permutes = []
    for row in np.unique(on_factor, axis=0):
        if row.any():
            same = (on_factor == row).all(axis=1)
            split = tuple(np.flatnonzero(row).tolist())
            size = np.where(same, local, 0.0)
            if op.kind == "rotate":
                size = size * _crossing(op, op.rule.sizes[factor], math.prod(axes[a] for a in split))
            permutes.append(Inner("collective-permute", split, size))
    return permutes


def _crossing(op: Op, size: int, parts: int) -> float:
    """Return the share of a shard that a roll along a dim of `size` in `parts` shards sends to another device.

    The roll's gradient, a sum of two padded slices, sends as much: its two permutes have no device in common.

    Evidence: docs/compiler_behaviour.md, "Gradient of a roll".
    """
    rows = -(-size // parts)
    # A roll by `shift` is one by `size - shift` in the other direction, and a shard sends at most all of its rows.
    return min(op.shift, size - op.shift, rows) / rows


def sliced_by_itself(graph: OpGraph, op: int, source: States, target: States) -> NDArray[np.bool_] | None:
    """Return a mask of pairs in which a scatter's whole result is sliced, [source states, target states], or None.

    The partitioner gives a scatter the sharding of its result, and splits the rows or columns of the table itself. The
    state that splits them has the same indices and updates. Pairs are in the mask only if the op has that state. Seen
    on v5e in gradients of embedding tables whose plan had them whole.

    - `op`: id of the op that the value leaves; None is returned for ops of other kinds.
    - `source`, `target`: states of the result before and after, [states, axes].
    """
    if graph.ops[op].kind != "scatter":
        return None
    # States are compared as numbers, one digit for each axis: arrays [pairs, states] would take gigabytes on four axes.
    lowest = min(source.min(initial=WHOLE), target.min(initial=WHOLE))
    digits = (max(source.max(initial=WHOLE), target.max(initial=WHOLE)) - lowest + 1) ** np.arange(source.shape[1])
    pairs = np.zeros((len(source), len(target)), dtype=np.bool_)
    split = np.zeros(pairs.shape, dtype=np.int64)
    for axis, digit in enumerate(digits):
        before, after = source[:, None, axis], target[None, :, axis]
        sliced = (before == WHOLE) & (after >= 0)
        pairs |= sliced
        split += (np.where(sliced, after, before) - lowest) * digit
    pairs &= np.isin(split, (source - lowest) @ digits)
    return pairs if pairs.any() else None


def united(*masks: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    """Return the pairs that any of the masks has; None if all masks are None."""
    given = [mask for mask in masks if mask is not None]
    return np.logical_or.reduce(given) if given else None
