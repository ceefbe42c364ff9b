"""Ops split in space: their strategies, the halos that shards exchange, and the cost of copying the halos."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives, Kind
from autoshard.graph import Op, OpGraph
from autoshard.planning.xla.axis_assignments import Seconds, States, local_elements


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    """Collective inside an op, for every state of the op at once."""

    kind: Kind
    axes: tuple[int, ...]
    """Mesh axes of the group, by number."""
    size: Seconds
    """Bytes as `Collectives.time` counts them, [states]; 0 in states that do not need the collective."""
    senders: float = 1.0
    """Share of the devices that send; the last shard of a row has no neighbour to send its halo to."""
    count: int = 1
    """Number of executions in one execution of the op."""
    hidden: Seconds | None = None
    """Share that overlaps with the op's own compute, [states]; None if all of it is exposed."""
    as_kind: Kind | None = None
    """Kind of collective with the same duration, if shards are not sent to neighbours."""

    def times(self, collectives: Collectives, state: int | None = None) -> tuple[Seconds, Seconds]:
        """Return the seconds in one execution of the op, and the exposed part of them, each [states].

        All `count` executions of the collective count. With `state` the arrays have one entry, that of the state.
        """
        at = slice(None) if state is None else slice(state, state + 1)
        names, size = tuple(collectives.mesh.names[a] for a in self.axes), self.size[at]
        each = np.where(size > 0, collectives.time(self.as_kind or self.kind, names, size), 0.0) * self.count
        return each, each if self.hidden is None else each * (1.0 - self.hidden[at])


def even_halos(op: Op, states: States, axes: Sequence[int]) -> NDArray[np.bool_]:
    """Return a mask of the allowed states, [states].

    A state in a manual region (`in_region`) is allowed if all splits are even. No halo may reach past the next shard in
    any state.
    """
    assert op.rule is not None
    uneven = np.zeros(len(states), dtype=bool)
    for factor, size in enumerate(op.rule.sizes):
        uneven |= size % _shards(states, factor, axes) > 0
    bad: NDArray[np.bool_] = uneven & in_region(op, states)
    for halo in op.halos:
        bad |= [n > 1 and not halo.dim.fits(int(n)) for n in _shards(states, halo.factor, axes)]
    return ~bad


def in_region(op: Op, states: States) -> NDArray[np.bool_]:
    """Return a mask of the states in which the op runs in a manual region of the plan.

    This is any split of a grouped op or fft, and a split in space of other ops. XLA's partitioner gives wrong results,
    or aborts, for some splits of the kernel's gradient of a grouped convolution. It gathers an fft on CPUs and GPUs for
    any split.

    Evidence: docs/compiler_behaviour.md, "Gradient of a grouped convolution".
    """
    split: NDArray[np.bool_] = np.any(states >= 0, axis=1)
    return split if op.grouped or op.kind == "fft" else split_in_space(op, states)


def split_in_space(op: Op, states: States) -> NDArray[np.bool_]:
    """Return a mask of the states in which an axis splits a windowed dim, one that has a halo, [states]."""
    split: NDArray[np.bool_] = np.zeros(len(states), dtype=bool)
    for halo in op.halos:
        split |= np.any(states == halo.factor, axis=1)
    return split


def extended_elements(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> NDArray[np.float64]:
    """Return the elements of the first operand's shard with its halos, [states]; 0 in states without halos."""
    size, has_halo = _extended(graph, op, states, axes)
    return np.where(has_halo, size, 0.0)


def _extended(
    graph: OpGraph, op: Op, states: States, axes: Sequence[int], dims: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the elements of the first operand's shard with halos, and a mask of the states with halos, each [states].

    Only the halos of the first `dims` windowed dims count; None for all.
    """
    assert op.rule is not None
    size = local_elements(states, _sizes(graph, op), axes)
    has_halo = np.zeros(len(states), dtype=bool)
    for halo in op.halos[:dims]:
        shards = _shards(states, halo.factor, axes)
        local_length, reach = halo.dim.length / shards, halo.dim.before + halo.dim.after
        split = (shards > 1) & (reach > 0)
        size = np.where(split, size * (local_length + reach) / local_length, size)
        has_halo |= split
    return size, has_halo


def _sizes(graph: OpGraph, op: Op) -> list[int]:
    """Return the first operand's dims by factor of the op; 1 for factors that the operand lacks."""
    assert op.rule is not None
    sizes = [1] * len(op.rule.sizes)
    for size, dim in zip(graph.tensors[op.operands[0]].shape, op.rule.operands[0], strict=True):
        for factor in dim:
            sizes[factor] = size if len(dim) == 1 else op.rule.sizes[factor]
    return sizes


def _shards(states: States, factor: int, axes: Sequence[int]) -> NDArray[np.float64]:
    """Return the number of shards along a factor, [states]."""
    return np.prod(np.where(states == factor, np.asarray(axes, dtype=np.float64), 1.0), axis=1)


def halo_exchanges(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> list[Inner]:
    """Return the permutes of an op split in space: rows before and after a shard, for each windowed dim in turn.

    Later dims are exchanged together with the halos of earlier dims, so that corners are included. Elements that
    windows scatter into halos return to their shard by as many permutes.

    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    """
    permutes: list[Inner] = []
    if op.rule is None or not op.halos:
        return permutes
    record = graph.tensors[op.operands[0]]
    item = record.itemsize
    times = {"reduce_window": len(op.results), "select_and_scatter": 2}.get(op.kind, 1)
    for number, halo in enumerate(op.halos):
        size, _ = _extended(graph, op, states, axes, number)
        on_factor = states == halo.factor
        rows = size * _shards(states, halo.factor, axes) / halo.dim.length * item
        for used in np.unique(on_factor, axis=0):
            if not used.any():
                continue
            same = (on_factor == used).all(axis=1)
            group = tuple(np.flatnonzero(used).tolist())
            shards = math.prod(axes[a] for a in group)
            for reach in (halo.dim.before, halo.dim.after):
                if reach:
                    step = Inner("collective-permute", group, np.where(same, rows * reach, 0.0), (shards - 1) / shards)
                    permutes += [step] * times
    return permutes


def near_shifts(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> NDArray[np.bool_]:
    """Return a mask of the states in which a slice's or pad's result shards need only neighbouring operand shards.

    All states of other ops satisfy it. Shards of fewer elements than there are devices would be sent to all of them.
    """
    near = np.ones(len(states), dtype=bool)
    for factor, places in op.offsets:
        before, after = _lengths(graph, op, factor)
        parts = _shards(states, factor, axes).astype(np.int64)
        reach = {int(p): max(_reaches(before, after, places, int(p))) <= -(-before // int(p)) for p in set(parts)}
        near &= np.array([p == 1 or (reach[int(p)] and p <= after) for p in parts], dtype=bool)
    return near


def shifts(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> list[Inner]:
    """Return the permutes of a slice or pad along split dims: the elements past the edges of the shards, for each dim.

    Other ops have none. In each direction as many elements pass as any shard needs.

    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    """
    permutes: list[Inner] = []
    if not op.offsets:
        return permutes
    record = graph.tensors[op.operands[0]]
    size = local_elements(states, _sizes(graph, op), axes) * record.itemsize
    for factor, places in op.offsets:
        before, after = _lengths(graph, op, factor)
        if not before:  # an empty cache, say
            continue
        on_factor = states == factor
        rows = size / np.ceil(before / _shards(states, factor, axes))
        for used in np.unique(on_factor, axis=0):
            group = tuple(np.flatnonzero(used).tolist())
            parts = math.prod(axes[a] for a in group)
            for reach in _reaches(before, after, places, parts):
                if reach:
                    crossing = np.where((on_factor == used).all(axis=1), rows * reach, 0.0)
                    permutes.append(Inner("collective-permute", group, crossing, (parts - 1) / parts))
    return permutes


def _reaches(before: int, after: int, places: int, parts: int) -> tuple[int, int]:
    """Return the largest number of elements that a shard needs from the shards before it and after it.

    XLA exchanges as many with every shard. Shards have equal lengths except for shorter last ones.

    - `before`, `after`: elements of the dim in the operand and in the result.
    - `places`: first operand element in the result; negative if the result begins before the operand.
    - `parts`: number of shards of each.
    """
    operand_shard, result_shard = -(-before // parts), -(-after // parts)
    left = max((k * (operand_shard - result_shard) - places for k in range(1, parts)), default=0)
    right = max((k * (result_shard - operand_shard) + places for k in range(1, parts)), default=0)
    return max(0, left), max(0, right)


def _lengths(graph: OpGraph, op: Op, factor: int) -> tuple[int, int]:
    """Return the sizes of a factor's dim in the first operand and in the first result; it must be a dim alone."""
    assert op.rule is not None
    sides = (op.operands[0], op.rule.operands[0]), (op.results[0], op.rule.results[0])
    before, after = (graph.tensors[tensor].shape[dims.index((factor,))] for tensor, dims in sides)
    return before, after
