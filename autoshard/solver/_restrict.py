"""A smaller problem around the best choices: only alternatives that the bound says are cheap, solved exactly.

With every alternative whose bound is below the best cost kept, the answer is the proven optimum of the whole.
"""

import copy
import dataclasses

import numpy as np

from autoshard.solver._clock import Due, never
from autoshard.solver._flat import Flat
from autoshard.solver._graph import Graph, InfeasibleGraph, Ints, OverLimit, table_entries
from autoshard.solver._reduce import reduce, restrict


@dataclasses.dataclass(frozen=True, slots=True)
class Restricted:
    graph: Graph | None
    """None when nothing is left that could be better."""
    size: int
    """Entries of all edge tables."""
    proves: bool
    """No alternative that could lead to a lower cost was left out."""


def clone(graph: Graph) -> Graph:
    """A copy that can be reduced further; its way back goes through the original's."""
    edges: dict[int, dict[int, Ints]] = {node: {} for node in graph.edges}
    for node, near in graph.edges.items():
        for other, table in near.items():
            if node < other:
                edges[node][other] = table.copy()
                edges[other][node] = edges[node][other].T
    return Graph(
        costs={node: cost.copy() for node, cost in graph.costs.items()},
        edges=edges,
        terms={node: dict(terms) for node, terms in graph.terms.items()},
        capacity=graph.capacity.copy(),
        times=graph.times.copy(),
        offset=graph.offset,
        undo=copy.copy(graph.undo),
        size=graph.size,
    )


def restricted(
    graph: Graph,
    names: list[int],
    flat: Flat,
    slack: np.ndarray,
    limit: float,
    gap: float,
    chosen: Ints | None,
    due: Due = never,
) -> Restricted:
    """`graph` with only alternatives whose `slack` is at most `limit`, and those of `chosen`, reduced until `due`."""
    smaller = clone(graph)
    keeps: dict[int, Ints] = {}
    for place, name in enumerate(names):
        low, high = int(flat.node_at[place]), int(flat.node_at[place + 1])
        keep = slack[low:high] <= limit
        if chosen is not None:
            keep[chosen[place]] = True
        if not keep.any():
            keep[np.argmin(slack[low:high])] = True
        if not keep.all():
            keeps[name] = np.flatnonzero(keep)
    proves = limit >= gap
    try:
        restrict(smaller, keeps)
        reduce(smaller, due)
    except (InfeasibleGraph, OverLimit):
        return Restricted(None, 0, proves)
    return Restricted(smaller, table_entries(smaller), proves)
