"""Regions that the program splits by hand (`shard_map`): what its ends ask for, and its own collectives."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives, Kind
from autoshard.graph import Op, OpGraph
from autoshard.plan.model._demands import group_axes
from autoshard.plan.xla._handling import Inner
from autoshard.plan.xla._states import WHOLE, States, local_elements


_KINDS: dict[str, Kind] = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "collective_permute": "collective-permute",
    "collective_broadcast": "all-gather",
}


def by_hand(op: Op, states: States, axes: Mapping[str, int]) -> NDArray[np.bool_]:
    """Which strategies of an op leave the axes that the program has split it over where the program has them.

    `axes` are the mesh's, with their sizes; one of size 1 splits nothing.
    """
    kept = np.ones(len(states), dtype=bool)
    where = {axis: factor for factor, axes in op.fixed for axis in axes}
    taken = [factor for factor, _ in op.fixed]
    for number, (name, size) in enumerate(axes.items()):
        if size > 1 and (name in where or name in op.manual):
            kept &= states[:, number] == where.get(name, WHOLE)
        elif taken:
            kept &= ~np.isin(states[:, number], taken)
    return kept


def own_collectives(graph: OpGraph, op: Op, states: States, collectives: Collectives) -> tuple[Inner, ...]:
    """The collective that an op of a region by hand is, on the axes that its groups of devices span."""
    kind = _KINDS.get(op.kind)
    if kind is None or op.rule is None:
        return ()
    mesh = collectives.mesh
    axes = group_axes(op.groups, mesh.sizes)
    if not axes:
        return ()
    tensors, dims = (op.results, op.rule.results) if kind == "all-gather" else (op.operands, op.rule.operands)
    size = np.zeros(len(states))
    for tensor, own in zip(tensors, dims, strict=True):
        record = graph.tensors[tensor]
        itemsize = record.itemsize
        if kind in ("all-reduce", "reduce-scatter") and collectives.widen_dtype(record.dtype) != record.dtype:
            itemsize = 4
        inside = [n if any(f in dim for dim in own) else 1 for f, n in enumerate(op.rule.sizes)]
        masked = np.where(np.isin(states, [f for dim in own for f in dim]), states, WHOLE)
        size = size + local_elements(masked, inside, mesh.sizes) * itemsize
    return (Inner(kind, axes, size),)
