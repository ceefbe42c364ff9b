"""Exact reductions: the graph gets smaller, its best choices stay, and every step can be undone."""

import heapq
import math
import sys

import numpy as np

from autoshard.solver.job_process import Due, never
from autoshard.solver.problem import FORBIDDEN
from autoshard.solver.residual_graph import Graph, InfeasibleGraph, Ints, compress


_DOMINANCE_WORK = 2_000_000
"""Entries that comparing the alternatives of one node may touch; larger nodes are only compared when they shrink."""
_COMPILED_WORK = 1_000_000
"""Entries touched at one node from which on kernels are loaded, as most problems never need."""
_TABLE = 40_000
"""Largest edge table that a reduction may create, unless it is no larger than those it replaces."""


def reduce(graph: Graph, due: Due = never) -> None:
    """Applies every reduction until none applies, or until `due`: what is reduced by then is a problem like any other.

    Dropped: forbidden and dominated alternatives, edges that are sums of one function per end, nodes with one
    alternative. Contracted: nodes that a neighbour decides (each of its alternatives allows exactly one). Eliminated:
    nodes of degree 0, 1 and 2 whose memory cannot matter, or whose cheapest answer to a neighbour also uses least.
    Raises `InfeasibleGraph` when a node has no alternative left, `OverLimit` when memory cannot be kept.
    """
    waiting = _Waiting(graph)
    for node in graph.costs:
        waiting.add(node)
    compress(graph)
    for first, second in [(one, two) for one, near in graph.edges.items() for two in near if one < two]:
        if due():
            break
        _tidy_edge(graph, first, second, waiting)
    while True:
        while not due() and (node := waiting.take()) is not None:
            _reduce_node(graph, node, waiting)
        before = {node: len(terms) for node, terms in graph.terms.items()}
        compress(graph)
        # Memory that no longer matters opens the way to more eliminations.
        freed = [node for node, count in before.items() if len(graph.terms.get(node, ())) < count]
        if not freed or due():
            return
        for node in freed:
            waiting.add(node)


def restrict(graph: Graph, keeps: dict[int, Ints]) -> None:
    """Keeps only the given alternatives of some nodes. Not a reduction: what is dropped is lost."""
    waiting = _Waiting(graph)
    for node, kept in keeps.items():
        _keep(graph, node, kept, waiting)


class _Waiting:
    """The nodes to look at again, fewest neighbours first: a hub is looked at once its leaves are done."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._heap: list[tuple[int, int]] = []
        self._members: set[int] = set()

    def add(self, node: int) -> None:
        if node not in self._members:
            self._members.add(node)
            heapq.heappush(self._heap, (len(self._graph.edges[node]), node))

    def take(self) -> int | None:
        while self._heap:
            degree, node = heapq.heappop(self._heap)
            if node not in self._graph.costs:
                self._members.discard(node)
                continue
            now = len(self._graph.edges[node])
            if now > degree:
                heapq.heappush(self._heap, (now, node))
                continue
            self._members.discard(node)
            return node
        return None


def _reduce_node(graph: Graph, node: int, waiting: _Waiting) -> None:
    _drop_forbidden(graph, node, waiting)
    if len(graph.costs[node]) > 1:
        _drop_dominated(graph, node, waiting)
    cost = graph.costs[node]
    least = int(cost.min())
    if least:
        graph.offset += least
        cost[cost < FORBIDDEN] -= least
    if len(cost) == 1:
        _fix(graph, node, waiting)
    elif _merge_with_decider(graph, node, waiting):
        return
    elif len(graph.edges[node]) == 0:
        if node not in graph.terms:
            graph.undo.append(("fold", node, (), np.array(int(np.argmin(cost)))))
            graph.forget(node)
    elif len(graph.edges[node]) == 1:
        _fold_leaf(graph, node, waiting)
    elif len(graph.edges[node]) == 2 and node not in graph.terms:
        _fold_between(graph, node, waiting)


def _tidy_edge(graph: Graph, first: int, second: int, waiting: _Waiting) -> bool:
    """Moves what an edge says about one end alone into that end; removes it when nothing is left. True if removed."""
    table = graph.edges[first][second]
    for node, axis in ((first, 1), (second, 0)):
        low = table.min(axis=axis)
        if low.any():
            cost = graph.costs[node]
            cost += low
            np.minimum(cost, FORBIDDEN, out=cost)
            # A row without an allowed entry is gone with its alternative; leave it as it is.
            low[low >= FORBIDDEN] = 0
            closed = table >= FORBIDDEN
            table -= low[:, None] if axis == 1 else low[None, :]
            table[closed] = FORBIDDEN
            waiting.add(node)
    if not table.any():
        graph.disconnect(first, second)
        waiting.add(first)
        waiting.add(second)
        return True
    return False


def _tidy_edges(graph: Graph, node: int, waiting: _Waiting) -> None:
    for other in list(graph.edges[node]):
        _tidy_edge(graph, node, other, waiting)


def _keep(graph: Graph, node: int, kept: Ints, waiting: _Waiting, instead: Ints | None = None) -> None:
    """Drops all but the alternatives `kept`; `instead` [alternatives] names one that is kept and no worse, or -1."""
    forward = np.full(len(graph.costs[node]), -1, dtype=np.int64)
    forward[kept] = np.arange(len(kept))
    if instead is not None:
        forward = np.where(instead >= 0, forward[instead], -1)
    graph.undo.append(("keep", node, kept, forward))
    graph.costs[node] = graph.costs[node][kept]
    for other in list(graph.edges[node]):
        table = np.ascontiguousarray(graph.edges[node][other][kept])
        graph.edges[node][other] = table
        graph.edges[other][node] = table.T
        waiting.add(other)
    if node in graph.terms:
        graph.terms[node] = {span: usage[kept] for span, usage in graph.terms[node].items()}
    _tidy_edges(graph, node, waiting)


def _drop_forbidden(graph: Graph, node: int, waiting: _Waiting) -> None:
    while True:
        cost = graph.costs[node]
        allowed = cost < FORBIDDEN
        if node in graph.terms:
            for (start, stop), usage in graph.terms[node].items():
                allowed &= usage <= graph.capacity[start:stop].min()
        if allowed.all():
            return
        kept = np.flatnonzero(allowed)
        if not len(kept):
            raise InfeasibleGraph
        _keep(graph, node, kept, waiting)


def _drop_dominated(graph: Graph, node: int, waiting: _Waiting) -> None:
    cost = graph.costs[node]
    count = len(cost)
    if count * count * sum(len(graph.costs[other]) for other in graph.edges[node]) > _DOMINANCE_WORK:
        _drop_equal(graph, node, waiting)
        cost = graph.costs[node]
        count = len(cost)
        if count * count * sum(len(graph.costs[other]) for other in graph.edges[node]) > 20 * _DOMINANCE_WORK:
            return
    usages, tables = list(graph.terms.get(node, {}).values()), list(graph.edges[node].values())
    if _is_worth_compiling(count * count * (1 + sum(table.shape[1] for table in tables))):
        from autoshard.solver.dominance_kernels import dominators

        better = dominators(cost, usages, tables)
    else:
        better = _dominators_plainly(cost, usages, tables)
    if not better.any():
        return
    alive = np.ones(count, dtype=bool)
    for a in range(count):
        # Of two that dominate each other one must stay; a dominator that is gone has one of its own that is alive.
        alive[a] = not (better[a] & alive).any()
    if not alive.all():
        instead = np.arange(count)
        for a in range(count - 1, -1, -1):
            if not alive[a]:
                # Any dominator that is left; there is one, by the order in which they went.
                instead[a] = _last_dominator(better, alive, a)
        _keep(graph, node, np.flatnonzero(alive), waiting, instead)


def _is_worth_compiling(work: int) -> bool:
    """Whether so many entries are to be touched that kernels should be loaded, or they are there already."""
    return work > _COMPILED_WORK or f"{__package__}.dominance_kernels" in sys.modules


def _dominators_plainly(cost: Ints, usages: list[Ints], tables: list[Ints]) -> np.ndarray:
    """`_compare.dominators`, by numpy."""
    count = len(cost)
    better = np.zeros((count, count), dtype=bool)
    # extra[a, b]: the most that moving from a to b can cost, whatever the neighbours chose.
    extra = cost[None, :] - cost[:, None]
    possible = np.ones((count, count), dtype=bool)
    for usage in usages:
        possible &= usage[None, :] <= usage[:, None]
    np.fill_diagonal(possible, False)
    possible &= extra <= 0
    rows, columns = np.nonzero(possible)
    bound = extra[rows, columns]
    for table in tables:
        if not len(rows):
            break
        change = table[columns] - table[rows]
        # Where a is forbidden nothing is lost by moving; both forbidden gives 0, which is the same.
        change[table[rows] >= FORBIDDEN] = -FORBIDDEN
        worst = change.max(axis=1)
        bound = bound + np.where(worst >= FORBIDDEN // 2, FORBIDDEN, np.maximum(worst, -FORBIDDEN))
        left = bound <= 0
        # Neighbours still to come add at least 0 (each table has a 0 in every row), so nothing comes back below 0.
        rows, columns, bound = rows[left], columns[left], bound[left]
    better[rows, columns] = True
    return better


def _last_dominator(better: np.ndarray, alive: np.ndarray, start: int) -> int:
    """An alternative that is left and no worse than `start`, through any chain of dominators; -1 if none is found."""
    seen, front = {start}, [start]
    while front:
        for other in np.flatnonzero(better[front.pop()]).tolist():
            if alive[other]:
                return other
            if other not in seen:
                seen.add(other)
                front.append(other)
    return -1


def _drop_equal(graph: Graph, node: int, waiting: _Waiting) -> None:
    """Of alternatives with equal rows everywhere and equal memory, keeps the cheapest."""
    columns = list(graph.edges[node].values()) + [usage[:, None] for usage in graph.terms.get(node, {}).values()]
    rows = np.ascontiguousarray(np.concatenate(columns, axis=1))
    keys = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    _, group = np.unique(keys, return_inverse=True)
    best: dict[int, int] = {}
    cost = graph.costs[node]
    for alternative, key in enumerate(group.tolist()):
        if key not in best or cost[alternative] < cost[best[key]]:
            best[key] = alternative
    if len(best) < len(cost):
        instead = np.array([best[key] for key in group.tolist()])
        _keep(graph, node, np.array(sorted(best.values())), waiting, instead)


def _fix(graph: Graph, node: int, waiting: _Waiting) -> None:
    """A node with one alternative becomes cost of its neighbours and memory that is always used."""
    graph.offset += int(graph.costs[node][0])
    for other, table in graph.edges[node].items():
        cost = graph.costs[other]
        cost += table[0]
        np.minimum(cost, FORBIDDEN, out=cost)
        waiting.add(other)
    for (start, stop), usage in graph.terms.get(node, {}).items():
        graph.capacity[start:stop] -= usage[0]
    graph.undo.append(("fold", node, (), np.array(0)))
    graph.forget(node)


def _merge_with_decider(graph: Graph, node: int, waiting: _Waiting) -> bool:
    """Contracts `node` into a neighbour each of whose alternatives allows exactly one of the node's."""
    for other, table in graph.edges[node].items():
        open_ = table < FORBIDDEN
        if not (open_.sum(axis=0) == 1).all():
            continue
        size = len(graph.costs[other])
        rest = [third for third in graph.edges[node] if third != other]
        if size > len(graph.costs[node]):
            if any(size * len(graph.costs[third]) > _TABLE for third in rest):
                continue
        decided = np.argmax(open_, axis=0)
        cost = graph.costs[other]
        cost += graph.costs[node][decided] + table[decided, np.arange(size)]
        np.minimum(cost, FORBIDDEN, out=cost)
        for third in rest:
            graph.connect(other, third, graph.edges[node][third][decided])
        for (start, stop), usage in graph.terms.get(node, {}).items():
            graph.add_term(other, start, stop, usage[decided])
        graph.undo.append(("fold", node, (other,), decided))
        graph.forget(node)
        for third in rest:
            _tidy_edge(graph, other, third, waiting)
            waiting.add(third)
        waiting.add(other)
        return True
    return False


def _fold_leaf(graph: Graph, node: int, waiting: _Waiting) -> None:
    """Eliminates a node of degree 1; with memory only when its cheapest answer never uses more than another."""
    ((other, table),) = graph.edges[node].items()
    total = np.minimum(graph.costs[node][:, None] + table, FORBIDDEN)
    best = np.argmin(total, axis=0)
    columns = np.arange(total.shape[1])
    if node in graph.terms:
        usages = list(graph.terms[node].values())
        load = np.stack(usages).sum(axis=0, dtype=np.float64)
        # Among the cheapest, the one that uses least.
        tied = np.where(total == total[best, columns][None, :], load[:, None], np.inf)
        best = np.argmin(tied, axis=0)
        for usage in usages:
            least = np.where(total < FORBIDDEN, usage[:, None], np.iinfo(np.int64).max).min(axis=0)
            if (usage[best] > least).any():
                return
        for (start, stop), usage in graph.terms[node].items():
            graph.add_term(other, start, stop, usage[best])
    cost = graph.costs[other]
    cost += total[best, columns]
    np.minimum(cost, FORBIDDEN, out=cost)
    graph.undo.append(("fold", node, (other,), best))
    graph.forget(node)
    waiting.add(other)


def _fold_between(graph: Graph, node: int, waiting: _Waiting) -> None:
    """Eliminates a node of degree 2 without memory: its best answer to each pair of neighbours becomes their edge."""
    (left, left_table), (right, right_table) = graph.edges[node].items()
    shape = (left_table.shape[1], right_table.shape[1])
    grown = math.prod(shape)
    if grown > max(_TABLE, left_table.size + right_table.size) or grown * len(graph.costs[node]) > 40_000_000:
        return
    from_left = np.minimum(graph.costs[node][:, None] + left_table, FORBIDDEN)
    if _is_worth_compiling(grown * len(from_left)):
        from autoshard.solver.dominance_kernels import fold_between

        best, answer = fold_between(from_left, np.ascontiguousarray(right_table))
    else:
        best, answer = _fold_between_plainly(from_left, right_table)
    graph.undo.append(("fold", node, (left, right), answer))
    graph.forget(node)
    graph.connect(left, right, np.minimum(best, FORBIDDEN))
    _tidy_edge(graph, left, right, waiting)
    waiting.add(left)
    waiting.add(right)


def _fold_between_plainly(from_left: Ints, right: Ints) -> tuple[Ints, np.ndarray]:
    """`_compare.fold_between`, by numpy."""
    best = from_left[0][:, None] + right[0][None, :]
    answer = np.zeros(best.shape, dtype=np.int16)
    for alternative in range(1, len(from_left)):
        total = from_left[alternative][:, None] + right[alternative][None, :]
        better = total < best
        best[better] = total[better]
        answer[better] = alternative
    return best, answer
