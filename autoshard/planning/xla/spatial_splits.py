"""Ops split in space: which strategies there are, the halos that shards exchange, and what copying them costs."""

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
    """One collective inside an op, for every state of the op at once."""

    kind: Kind
    axes: tuple[int, ...]
    size: Seconds
    """Bytes as `Collectives.time` counts them; 0 in states that do not need it."""
    senders: float = 1.0
    """Share of the devices that send: the last shard of a row has nobody to send its halo to."""
    count: int = 1
    """How often it runs in one execution of the op."""
    hidden: Seconds | None = None
    """Share of it that runs beside the op's own compute; None: all of it is waited for."""
    as_kind: Kind | None = None
    """The kind that takes as long, where shards do not go to their neighbours."""

    def times(self, collectives: Collectives, state: int | None = None) -> tuple[Seconds, Seconds]:
        """Seconds in one execution of the op, and those of them that are waited for: in every state, or in one."""
        at = slice(None) if state is None else slice(state, state + 1)
        names, size = tuple(collectives.mesh.names[a] for a in self.axes), self.size[at]
        each = np.where(size > 0, collectives.time(self.as_kind or self.kind, names, size), 0.0) * self.count
        return each, each if self.hidden is None else each * (1.0 - self.hidden[at])


def even_halos(op: Op, states: States, axes: Sequence[int]) -> NDArray[np.bool_]:
    """States outside of regions, and those in which all is split evenly and no halo reaches past the next shard."""
    assert op.rule is not None
    uneven = np.zeros(len(states), dtype=bool)
    for factor, size in enumerate(op.rule.sizes):
        uneven |= size % _shards(states, factor, axes) > 0
    bad: NDArray[np.bool_] = uneven & in_region(op, states)
    for halo in op.halos:
        bad |= [n > 1 and not halo.dim.fits(int(n)) for n in _shards(states, halo.factor, axes)]
    return ~bad


def in_region(op: Op, states: States) -> NDArray[np.bool_]:
    """Return the states in which the op runs in a region of the plan's own: split in space, or some kinds split at all.

    Left to XLA's partitioner, the kernel's gradient of a grouped convolution comes out a multiple of what it is
    where its batch or space is split and another mesh axis is idle, and some splits abort the compiler. An fft is
    gathered on CPUs and GPUs, whatever is split.
    """
    split: NDArray[np.bool_] = np.any(states >= 0, axis=1)
    return split if op.grouped or op.kind == "fft" else split_in_space(op, states)


def split_in_space(op: Op, states: States) -> NDArray[np.bool_]:
    """States in which an axis splits a windowed dim."""
    found: NDArray[np.bool_] = np.zeros(len(states), dtype=bool)
    for halo in op.halos:
        found |= np.any(states == halo.factor, axis=1)
    return found


def extended_elements(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> NDArray[np.float64]:
    """Elements of the first operand's shard with its halos, where it has any; 0 where it is computed as it is."""
    size, found = _extended(graph, op, states, axes)
    return np.where(found, size, 0.0)


def _extended(
    graph: OpGraph, op: Op, states: States, axes: Sequence[int], dims: int | None = None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Elements with the halos of the first `dims` windowed dims, and whether there are any."""
    assert op.rule is not None
    size = local_elements(states, _sizes(graph, op), axes)
    found = np.zeros(len(states), dtype=bool)
    for halo in op.halos[:dims]:
        shards = _shards(states, halo.factor, axes)
        own, reach = halo.dim.length / shards, halo.dim.before + halo.dim.after
        split = (shards > 1) & (reach > 0)
        size = np.where(split, size * (own + reach) / own, size)
        found |= split
    return size, found


def _sizes(graph: OpGraph, op: Op) -> list[int]:
    """The first operand's dims by factor of the op; 1 for factors that it lacks."""
    assert op.rule is not None
    sizes = [1] * len(op.rule.sizes)
    for size, dim in zip(graph.tensors[op.operands[0]].shape, op.rule.operands[0], strict=True):
        for factor in dim:
            sizes[factor] = size if len(dim) == 1 else op.rule.sizes[factor]
    return sizes


def _shards(states: States, factor: int, axes: Sequence[int]) -> NDArray[np.float64]:
    return np.prod(np.where(states == factor, np.asarray(axes, dtype=np.float64), 1.0), axis=1)


def halo_exchanges(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> list[Inner]:
    """The permutes of an op split in space: rows before and after a shard, for each windowed dim in turn.

    Later dims are exchanged with the halos of earlier ones, so that corners come along. What windows scatter into
    halos goes back to where it belongs by as many permutes.
    """
    found: list[Inner] = []
    if op.rule is None or not op.halos:
        return found
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
                    found += [step] * times
    return found


def near_shifts(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> NDArray[np.bool_]:
    """States in which no shard of a slice's or pad's result reaches past the next shards of its operand."""
    near = np.ones(len(states), dtype=bool)
    for factor, places in op.offsets:
        before, after = _lengths(graph, op, factor)
        parts = _shards(states, factor, axes).astype(np.int64)
        reach = {int(p): max(_reaches(before, after, places, int(p))) <= -(-before // int(p)) for p in set(parts)}
        near &= np.array([reach[int(p)] for p in parts], dtype=bool)
    return near


def shifts(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> list[Inner]:
    """The permutes of a slice or pad of dims that are split: what lies past the edges of the shards, for each dim."""
    found: list[Inner] = []
    if not op.offsets:
        return found
    record = graph.tensors[op.operands[0]]
    size = local_elements(states, _sizes(graph, op), axes) * record.itemsize
    for factor, places in op.offsets:
        before, after = _lengths(graph, op, factor)
        on_factor = states == factor
        rows = size / np.ceil(before / _shards(states, factor, axes))
        for used in np.unique(on_factor, axis=0):
            group = tuple(np.flatnonzero(used).tolist())
            parts = math.prod(axes[a] for a in group)
            for reach in _reaches(before, after, places, parts):
                if reach:
                    crossing = np.where((on_factor == used).all(axis=1), rows * reach, 0.0)
                    found.append(Inner("collective-permute", group, crossing, (parts - 1) / parts))
    return found


def _reaches(before: int, after: int, places: int, parts: int) -> tuple[int, int]:
    """Elements that a shard wants of the shards before it and after it, at most.

    Of `before` elements, those from number `places` on (before the first if negative) become `after`, both in `parts`
    shards of equal length, the last ones shorter. XLA exchanges as many with every shard.
    """
    own, new = -(-before // parts), -(-after // parts)
    left = max((k * (own - new) - places for k in range(1, parts)), default=0)
    right = max((k * (new - own) + places for k in range(1, parts)), default=0)
    return max(0, left), max(0, right)


def _lengths(graph: OpGraph, op: Op, factor: int) -> tuple[int, int]:
    """Elements of a factor's dim in the first operand and in the result."""
    assert op.rule is not None
    sides = (op.operands[0], op.rule.operands[0]), (op.results[0], op.rule.results[0])
    before, after = (graph.tensors[tensor].shape[dims.index((factor,))] for tensor, dims in sides)
    return before, after
