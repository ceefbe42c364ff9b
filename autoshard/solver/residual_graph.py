"""A problem under reduction: nodes, merged edges, memory terms on compressed time, and the steps to undo."""

import dataclasses
import itertools as it

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import OutOfRangeError
from autoshard.solver.problem import FORBIDDEN, Problem


Ints = NDArray[np.int64]
EXACT = 2**62
"""Bytes below which sums, and differences of sums, fit in 64 bits."""
Terms = dict[tuple[int, int], Ints]
"""Memory of a node: maps a half-open interval in compressed time to bytes for each alternative."""


class InfeasibleGraph(Exception):
    """Error: a node has no alternative left, so that no choices avoid every forbidden combination."""


class OverLimit(Exception):
    """Error: at some time even the least usage of all nodes exceeds the limit."""

    def __init__(self, time: int, excess: int):
        super().__init__(time, excess)
        self.time = time
        self.excess = excess


@dataclasses.dataclass(slots=True)
class Graph:
    """Undecided part of a problem. Costs saturate at `FORBIDDEN`: a sum that reaches it is not allowed."""

    costs: dict[int, Ints]
    """Maps each alive node to its costs [alternatives], whose minimum is 0 after tidying."""
    edges: dict[int, dict[int, Ints]]
    """Maps node and neighbour to their cost table [alternatives of node, alternatives of neighbour]; both directions
    share memory.
    """
    terms: dict[int, Terms]
    """Maps alive nodes to their memory terms; nodes without relevant terms are absent."""
    capacity: Ints
    """[compressed times] bytes that the terms together may use."""
    times: Ints
    """[compressed times] the problem's time that each compressed time represents."""
    offset: int
    """Total cost of the decided part."""
    undo: list[tuple]
    """Steps to undo, newest last, in two forms.

    `("keep", node, kept, forward)` dropped alternatives: `kept` has the old number of each new one. `forward` has for
    each old one the new one that is no worse, or -1. `("fold", node, scope, table)` removed a node: `table`, over the
    choices of `scope`, has its choice.
    """
    size: int
    """Number of nodes of the whole problem."""

    def restore(self, choices: dict[int, int], after: int = 0) -> Ints:
        """Return choices [problem nodes] from choices for the alive nodes.

        Only the steps from number `after` on are undone; nodes removed before have choice 0.
        """
        chosen = np.zeros(self.size, dtype=np.int64)
        for node, value in choices.items():
            chosen[node] = value
        for step in reversed(self.undo[after:]):
            if step[0] == "keep":
                _, node, kept, _ = step
                chosen[node] = kept[chosen[node]]
            else:
                _, node, scope, table = step
                chosen[node] = table[tuple(chosen[other] for other in scope)]
        return chosen

    def project(self, choices: Ints, after: int = 0) -> dict[int, int] | None:
        """Return choices for the alive nodes that cost no more than `choices`, which are [problem nodes] as of step
        `after`.

        Nodes folded since are left out. Returns None when a dropped alternative has no replacement: it cannot be part
        of any feasible choices, or a restriction dropped it.
        """
        chosen = choices.copy()
        for step in self.undo[after:]:
            if step[0] == "keep":
                _, node, _, forward = step
                chosen[node] = forward[chosen[node]]
                if chosen[node] < 0:
                    return None
        return {node: int(chosen[node]) for node in self.costs}

    def connect(self, first: int, second: int, table: Ints) -> None:
        """Add `table` [alternatives of first, of second] to the edge between two nodes, or make that edge.

        Sums are clipped to `FORBIDDEN`. A new edge may share memory with `table`.
        """
        known = self.edges[first].get(second)
        if known is None:
            table = np.ascontiguousarray(table)
            self.edges[first][second] = table
            self.edges[second][first] = table.T
        else:
            known += table
            np.minimum(known, FORBIDDEN, out=known)

    def add_term(self, node: int, start: int, stop: int, usage: Ints) -> None:
        """Add usage [alternatives], in bytes, to a node's memory in the compressed times [start, stop)."""
        mine = self.terms.setdefault(node, {})
        known = mine.get((start, stop))
        mine[start, stop] = usage if known is None else known + usage

    def disconnect(self, first: int, second: int) -> None:
        """Remove the edge between two nodes, which must exist."""
        del self.edges[first][second]
        del self.edges[second][first]

    def forget(self, node: int) -> None:
        """Remove a node whose cost, edges and terms were moved elsewhere."""
        for other in self.edges.pop(node):
            del self.edges[other][node]
        del self.costs[node]
        self.terms.pop(node, None)


def build(problem: Problem) -> Graph:
    """Build the graph of a whole problem: parallel edges merged, self edges folded in, costs made non-negative.

    The least cost of each node and edge moves to the offset. Memory terms are left out if the limit cannot be exceeded.
    Raises `OutOfRangeError` if usages are too large for exact sums.
    """
    offset = 0
    costs: dict[int, Ints] = {}
    bounds = problem.node_offsets.tolist()
    flat = problem.node_costs
    for node in range(problem.num_nodes):
        costs[node], least = _above_least(flat[bounds[node] : bounds[node + 1]])
        offset += least
    edges: dict[int, dict[int, Ints]] = {node: {} for node in costs}
    graph = Graph(costs, edges, {}, np.zeros(0, np.int64), np.zeros(0, np.int64), 0, [], problem.num_nodes)
    shapes = np.diff(problem.node_offsets).tolist()
    bounds = problem.edge_offsets.tolist()
    flat = problem.edge_costs
    for edge, (first, second) in enumerate(problem.edge_nodes.tolist()):
        table, least = _above_least(flat[bounds[edge] : bounds[edge + 1]])
        offset += least
        table = table.reshape(shapes[first], shapes[second])
        if first == second:
            costs[first] = np.minimum(costs[first] + np.diagonal(table), FORBIDDEN)
        else:
            graph.connect(first, second, table)
    graph.offset = offset
    _add_terms(graph, problem)
    return graph


def _above_least(costs: Ints) -> tuple[Ints, int]:
    """Return the costs minus their least, clipped to `FORBIDDEN`, and this least; no difference overflows 64 bits.

    If all are forbidden, they become `FORBIDDEN`, and the least 0.
    """
    least = int(costs.min())
    if least == 0:
        return np.minimum(costs, FORBIDDEN), 0
    if least >= FORBIDDEN:
        return np.full(len(costs), FORBIDDEN), 0
    # Costs from `top` up are forbidden, or too far above the least to be distinguished from forbidden.
    top = FORBIDDEN + min(least, 0)
    return np.where(costs >= top, FORBIDDEN, np.minimum(costs, top) - least), least


def spread(problem: Problem) -> int:
    """Return the sum over nodes and edges of their largest allowed minus their least cost.

    It is an upper bound on the cost range of choices without forbidden parts. Nodes and edges without an allowed cost
    count 0.
    """
    total = 0
    for costs, offsets in ((problem.node_costs, problem.node_offsets), (problem.edge_costs, problem.edge_offsets)):
        if len(costs):
            low = np.minimum.reduceat(costs, offsets[:-1])
            high = np.maximum.reduceat(np.where(costs >= FORBIDDEN, np.iinfo(np.int64).min, costs), offsets[:-1])
            allowed = low < FORBIDDEN
            total += sum(high[allowed].tolist()) - sum(low[allowed].tolist())
    return total


def most_usage(problem: Problem) -> int:
    """Return an upper bound on the bytes at the worst time: every term has its largest usage.

    If the sum of all terms is below `EXACT`, that sum is returned, live at the same time or not. A single usage above
    the limit counts as limit plus one byte, since it is equally infeasible. Without a limit or terms the result is 0.
    """
    limit = problem.usage_limit
    if limit is None or not len(problem.term_nodes):
        return 0
    most = np.maximum.reduceat(problem.term_usages, problem.term_offsets[:-1])
    most = [min(value, limit + 1) for value in most.tolist()]
    if sum(most) < EXACT:
        return sum(most)
    change: dict[int, int] = {}
    for value, (start, stop) in zip(most, problem.term_intervals.tolist(), strict=True):
        if start < stop:
            change[start] = change.get(start, 0) + value
            change[stop] = change.get(stop, 0) - value
    return max(it.accumulate(change[when] for when in sorted(change)), default=0)


def _add_terms(graph: Graph, problem: Problem) -> None:
    """Add the memory terms to the graph, unless there is no limit or it can never be exceeded.

    Compressed times are 0 and the starts of terms, since usage rises at no other time. Empty terms are left out.

    Raises `OutOfRangeError` if the usages are too large for exact sums.
    """
    if problem.usage_limit is None or (most := most_usage(problem)) <= problem.usage_limit:
        return
    if most >= EXACT:
        raise OutOfRangeError(
            f"the usages of the problem add up to {most} at some time; up to {EXACT - 1} they are reckoned exactly: "
            "give them and the limit in larger units"
        )
    bounds = problem.term_offsets.tolist()
    points = {0}
    raw: list[tuple[int, int, int, Ints]] = []
    for term, node in enumerate(problem.term_nodes.tolist()):
        start, stop = problem.term_intervals[term].tolist()
        usage = problem.term_usages[bounds[term] : bounds[term + 1]]
        if start < stop and usage.any():
            points.add(start)
            # Any single usage above the limit is infeasible; clipping it to limit + 1 prevents overflow of sums.
            raw.append((node, start, stop, np.minimum(usage, problem.usage_limit + 1)))
    graph.times = np.array(sorted(points), dtype=np.int64)
    graph.capacity = np.full(len(graph.times), problem.usage_limit, dtype=np.int64)
    places = np.searchsorted(graph.times, np.array([term[1:3] for term in raw]).reshape(-1, 2)).tolist()
    for (start, stop), (node, _, _, usage) in zip(places, raw, strict=True):
        graph.add_term(node, start, stop, usage)


def compress(graph: Graph) -> None:
    """Drop memory that cannot matter: constant parts of usages, times that cannot exceed capacity, and implied times.

    Constant parts are subtracted from the capacity. The graph is changed in place.

    Raises `OverLimit`, with the worst time, when the least usage at some time exceeds the limit.
    """
    if not graph.terms:
        graph.capacity, graph.times = np.zeros(0, np.int64), np.zeros(0, np.int64)
        return
    count = len(graph.capacity)
    high = np.zeros(count + 1)
    fixed = np.zeros(count + 1, dtype=np.int64)
    for node, node_terms in graph.terms.items():
        rests: Terms = {}
        for (start, stop), usage in node_terms.items():
            least = int(usage.min())
            fixed[start] += least
            fixed[stop] -= least
            rest = usage - least
            most = int(rest.max())
            if most:
                rests[start, stop] = rest
                high[start] += most
                high[stop] -= most
        graph.terms[node] = rests
    graph.capacity = graph.capacity - np.cumsum(fixed)[:-1]
    worst = int(np.argmin(graph.capacity))
    if graph.capacity[worst] < 0:
        raise OverLimit(int(graph.times[worst]), -int(graph.capacity[worst]))
    # float64 sums may round, so a time is dropped only with a margin.
    binding = np.cumsum(high)[:-1] * (1 + 1e-9) + 1 > graph.capacity
    kept = np.flatnonzero(binding)
    rename = np.concatenate([[0], np.cumsum(binding)])
    _rename_times(graph, rename.tolist())
    graph.capacity, graph.times = graph.capacity[kept], graph.times[kept]
    _merge_times(graph)


def _merge_times(graph: Graph) -> None:
    """Drop each time that a neighbouring one implies: its live terms are a subset, and its capacity is no smaller."""
    count = len(graph.capacity)
    starts, stops = [False] * (count + 1), [False] * (count + 1)
    for node_terms in graph.terms.values():
        for start, stop in node_terms:
            starts[start] = stops[stop] = True
    capacity = graph.capacity.tolist()
    kept: list[tuple[int, bool, bool]] = []
    began = ended = False
    for time in range(count):
        began, ended = began or starts[time], ended or stops[time]
        while kept and not ended and capacity[time] <= capacity[kept[-1][0]]:
            _, earlier_began, earlier_ended = kept.pop()
            began, ended = began or earlier_began, ended or earlier_ended
        if kept and not began and capacity[kept[-1][0]] <= capacity[time]:
            continue
        kept.append((time, began, ended))
        began = ended = False
    places = np.array([time for time, _, _ in kept], dtype=np.int64)
    rename = np.searchsorted(places, np.arange(count + 1)).tolist()
    _rename_times(graph, rename)
    graph.capacity, graph.times = graph.capacity[places], graph.times[places]


def _rename_times(graph: Graph, rename: list[int]) -> None:
    """Change the time numbers of all terms to those in `rename` [old times + 1]; empty intervals disappear.

    Terms of a node with equal new intervals are added up.
    """
    old, graph.terms = graph.terms, {}
    for node, node_terms in old.items():
        for (start, stop), usage in node_terms.items():
            if rename[start] < rename[stop]:
                graph.add_term(node, rename[start], rename[stop], usage)


def table_entries(graph: Graph) -> int:
    """Return the number of entries of all edge tables; each edge counts once."""
    return sum(table.size for near in graph.edges.values() for table in near.values()) // 2
