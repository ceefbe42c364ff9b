"""From priced decisions to the `Problem` that the solver takes: weights applied, seconds to picoseconds."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.plan._model import EXPOSED, Channel, Model
from autoshard.solver import FORBIDDEN, Problem


Weights = Mapping[Channel, float]
"""Weight of every compute and link channel; those of one block are non-negative and sum to one."""

Allowed = Mapping[int, NDArray[np.bool_]]
"""Node -> which of its alternatives may be chosen."""


def build_problem(model: Model, weights: Weights, memory_limit: int | None, allowed: Allowed | None = None) -> Problem:
    """The `Problem` whose objective is exposed communication plus the weighted channels of every block.

    With weights that are non-negative and sum to one in every block the objective bounds the plan's true time
    (`exposed + max over the channels` per block) from below.
    """
    allowed = allowed or {}
    costs, offsets = [], [0]
    for number, node in enumerate(model.nodes):
        seconds = sum((_weight(weights, c) * t for c, t in node.time.items()), np.zeros(len(node.states)))
        cost = _picoseconds(seconds)
        if number in allowed:
            cost = np.where(allowed[number], cost, FORBIDDEN)
        costs.append(cost)
        offsets.append(offsets[-1] + len(cost))
    edge_costs, edge_offsets, edge_nodes = [], [0], []
    for move in model.moves:
        shape = (len(move.path.source), len(move.path.target))
        seconds = sum((_weight(weights, c) * move.trips * t for c, t in move.costs.items()), np.zeros(shape))
        cost = _picoseconds(seconds)
        if move.forbidden is not None:
            cost = np.where(move.forbidden, FORBIDDEN, cost)
        if not cost.any():
            continue
        full = cost[move.rows][:, move.columns].ravel()
        edge_costs.append(full)
        edge_offsets.append(edge_offsets[-1] + len(full))
        edge_nodes.append((move.source, move.target))
    term_nodes, intervals, usages, term_offsets = [], [], [], [0]
    for number, node in enumerate(model.nodes):
        for term in node.memory:
            term_nodes.append(number)
            intervals.append((term.start, term.stop))
            usages.append(term.usage)
            term_offsets.append(term_offsets[-1] + len(term.usage))
    return Problem(
        node_offsets=np.array(offsets, dtype=np.int64),
        node_costs=_flat(costs),
        edge_nodes=np.array(edge_nodes, dtype=np.int64).reshape(-1, 2),
        edge_offsets=np.array(edge_offsets, dtype=np.int64),
        edge_costs=_flat(edge_costs),
        term_nodes=np.array(term_nodes, dtype=np.int64),
        term_intervals=np.array(intervals, dtype=np.int64).reshape(-1, 2),
        term_offsets=np.array(term_offsets, dtype=np.int64),
        term_usages=_flat(usages),
        usage_limit=None if memory_limit is None else max(0, memory_limit - model.fixed_bytes),
    )


def _weight(weights: Weights, channel: Channel) -> float:
    return 1.0 if channel == EXPOSED else weights.get(channel, 0.0)


def _picoseconds(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(np.asarray(seconds) * 1e12).astype(np.int64)


def _flat(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, dtype=np.int64)
