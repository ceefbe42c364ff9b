"""Strategies of heavy ops (matmuls, convolutions, gathers, ragged dots), and the states of their results."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import TOP_K, FactorKind, Op, OpGraph, Rule
from autoshard.planning.space.op_models import model_of
from autoshard.planning.xla.axis_assignments import PARTIAL, WHOLE, States, enumerate_states, local_elements, relabel
from autoshard.planning.xla.partitioner_rules import whole_factors
from autoshard.planning.xla.spatial_splits import even_halos, near_shifts


def heavy_strategies(graph: OpGraph, op: Op, axes: Sequence[int], backend: str) -> States:
    """Return the strategies of an op: the factor that each mesh axis splits, [strategies, axes].

    `axes` has the sizes of the mesh axes. An op without a rule has one strategy, in which everything is whole. An op
    that runs on shards has only even splits, in the order of `_in_turn`. Halos must fit into the next shard, and the
    elements that a top-k selects into each shard.
    """
    if op.rule is None:
        return np.full((1, len(axes)), WHOLE, dtype=np.int64)
    even = op.on_shards
    states = enumerate_states(op.rule.sizes, axes, whole_factors(graph, op, backend), even)
    states = states[even_halos(op, states, axes) & near_shifts(graph, op, states, axes)]
    if op.kind == TOP_K:
        states = states[_selects_few(op.rule, states, axes)]
    return states[_in_turn(op.rule, states, axes, model_of(op).apart)] if even else states


def _selects_few(rule: Rule, states: States, axes: Sequence[int]) -> NDArray[np.bool_]:
    """Return a mask of the states in which a shard has as many elements as a top-k selects.

    Shards of fewer elements are cheaper to gather than their results, which have places too.
    """
    (reduced,) = (f for f, kind in enumerate(rule.kinds) if kind is FactorKind.REDUCTION)
    (selected,) = (f for f, kind in enumerate(rule.kinds) if kind is FactorKind.NEED_REPLICATION)
    local = local_elements(np.where(states == reduced, 0, WHOLE), [rule.sizes[reduced]], axes)
    return (states != reduced).all(axis=1) | (local >= rule.sizes[selected])


def _in_turn(rule: Rule, states: States, axes: Sequence[int], apart: bool) -> NDArray[np.bool_]:
    """Return a mask of the states in which axes split the factors of a dim from the major factor on.

    A later factor is split only if the earlier factors have local size 1, and by later axes. With `apart` the earlier
    factors may have any local size, since a device may then own any places of the later factor.
    """
    allowed = np.ones(len(states), dtype=bool)
    for dim in {dim for dims in (*rule.operands, *rule.results) for dim in dims if len(dim) > 1}:
        for before, after in itertools.pairwise(dim):
            sizes = [rule.sizes[before]]
            local = local_elements(np.where(states == before, 0, WHOLE), sizes, axes)
            places = np.arange(len(axes))
            last = np.where(states == before, places, -1).max(axis=1)
            first = np.where(states == after, places, len(axes)).min(axis=1)
            allowed &= ~(states == after).any(axis=1) | (((local == 1) | apart) & (last < first))
    return allowed


def result_states(op: Op, states: States, result: int) -> States:
    """Convert an op's strategies to the states of one result before any reduction: over its dims, with partial sums.

    `result` is the position among the op's results. An axis that splits a reduced factor f has the value `PARTIAL - f`,
    or `PARTIAL` for an op with halos or groups. Everything is whole for an op without a rule.
    """
    if op.rule is None:
        return np.full_like(states, WHOLE)
    # A manual region (`mlir.insert_regions`) does all reductions of an op together.
    label = [PARTIAL if op.halos or op.grouped else PARTIAL - f for f in range(len(op.rule.kinds))]
    mapping = [label[f] if kind is FactorKind.REDUCTION else WHOLE for f, kind in enumerate(op.rule.kinds)]
    for dim, factors in enumerate(op.rule.results[result]):
        for factor in factors:
            mapping[factor] = dim
    return relabel(states, mapping)
