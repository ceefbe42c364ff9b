"""First feasible choices: local descent on cost plus a price on memory past the limit."""

import time

import numpy as np

from ._graph import Graph, Ints
from ._problem import FORBIDDEN


def descend(graph: Graph, start: dict[int, int], deadline: float, rounds: int = 40) -> dict[int, int] | None:
    """Moves single nodes while that lowers cost plus price times bytes past the limit; the price rises each round.

    Returns the cheapest choices met that keep every limit, None when none were met. Deterministic unless `deadline`
    (time.monotonic) ends it.
    """
    chosen = dict(start)
    profile = _profile(graph, chosen)
    spread = [int(cost[cost < FORBIDDEN].max()) for cost in graph.costs.values()]
    bytes_ = [int(usage.max()) for terms in graph.terms.values() for usage in terms.values()]
    price = (1 + float(np.median(spread))) / (1 + float(np.median(bytes_))) if bytes_ else 0.0
    best: dict[int, int] | None = None
    best_cost = np.inf
    for _ in range(rounds):
        for _ in range(20):
            moved = False
            for node in graph.costs:
                if time.monotonic() > deadline:
                    return best
                moved |= _move(graph, node, chosen, profile, price)
            if not moved:
                break
        cost = _cost(graph, chosen)
        if (profile <= graph.capacity).all() and cost < min(best_cost, FORBIDDEN):
            best, best_cost = dict(chosen), cost
            break
        price *= 4
    return best


def _profile(graph: Graph, chosen: dict[int, int]) -> Ints:
    change = np.zeros(len(graph.capacity) + 1, dtype=np.int64)
    for node, terms in graph.terms.items():
        for (start, stop), usage in terms.items():
            change[start] += usage[chosen[node]]
            change[stop] -= usage[chosen[node]]
    return np.cumsum(change)[:-1]


def _cost(graph: Graph, chosen: dict[int, int]) -> int:
    total = 0
    for node, cost in graph.costs.items():
        total += int(cost[chosen[node]])
        for other, table in graph.edges[node].items():
            if node < other:
                total += int(table[chosen[node], chosen[other]])
    return total


def _move(graph: Graph, node: int, chosen: dict[int, int], profile: Ints, price: float) -> bool:
    now = chosen[node]
    value = graph.costs[node].astype(np.float64)
    for other, table in graph.edges[node].items():
        value += table[:, chosen[other]]
    terms = graph.terms.get(node, {})
    for (start, stop), usage in terms.items():
        profile[start:stop] -= usage[now]
    for (start, stop), usage in terms.items():
        room = graph.capacity[start:stop] - profile[start:stop]
        levels, which = np.unique(usage, return_inverse=True)
        over = np.array([float(np.maximum(level - room, 0).sum()) for level in levels.tolist()])
        value += price * over[which]
    best = int(np.argmin(value))
    if value[best] >= value[now]:
        best = now
    for (start, stop), usage in terms.items():
        profile[start:stop] += usage[best]
    chosen[node] = best
    return best != now
