"""Exact reductions: each makes the graph smaller, preserves its best choices, and can be undone."""

import heapq
import math
import sys

import numpy as np

from autoshard.solver.clocks import Due, never
from autoshard.solver.problem import FORBIDDEN
from autoshard.solver.residual_graph import Graph, InfeasibleGraph, Ints, compress


_DOMINANCE_WORK = 2_000_000
"""Entries that comparing the alternatives of one node may touch; larger nodes are compared only once they shrink."""
_COMPILED_WORK = 1_000_000
"""Entries touched at one node from which compiled kernels are loaded; most problems never need them."""
_TABLE = 40_000
"""Largest edge table that a reduction may create, unless it is no larger than the tables that it replaces."""


def reduce(graph: Graph, due: Due = never) -> None:
    """Apply every reduction until none applies, or until `due`; a partly reduced graph is a valid problem too.

    - Dropped: forbidden and dominated alternatives, and edges that are a sum of one function for each end.
    - Contracted: nodes that a neighbour decides (each of its alternatives allows exactly one).
    - Eliminated: nodes with one alternative, and nodes of degree 0, 1 and 2 without relevant memory.

    A leaf with memory is eliminated if its cheapest answer to each alternative of the neighbour also uses least memory.

    Raises `InfeasibleGraph` when a node has no alternative left, `OverLimit` when the memory limit cannot be satisfied.
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
        # Memory terms that became irrelevant allow more eliminations.
        freed = [node for node, count in before.items() if len(graph.terms.get(node, ())) < count]
        if not freed or due():
            return
        for node in freed:
            waiting.add(node)


def restrict(graph: Graph, keeps: dict[int, Ints]) -> None:
    """Restrict some nodes in place to the given alternatives, ascending numbers; the dropped ones are lost.

    This is no exact reduction, but it is recorded in `undo` like one. Edges of these nodes are simplified.
    """
    waiting = _Waiting(graph)
    for node, kept in keeps.items():
        _keep(graph, node, kept, waiting)


class _Waiting:
    """Queue of nodes to reduce again, fewest neighbours first, so that leaves precede their hub."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._heap: list[tuple[int, int]] = []
        self._members: set[int] = set()

    def add(self, node: int) -> None:
        """Queue a node, by its present number of neighbours, unless it is queued already."""
        if node not in self._members:
            self._members.add(node)
            heapq.heappush(self._heap, (len(self._graph.edges[node]), node))

    def take(self) -> int | None:
        """Remove and return the living node with the fewest neighbours; None if the queue is empty.

        Equals are ordered by number. A node that gained neighbours goes back; one that lost some has its old place.
        """
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
    """Apply to one node every reduction that fits; queue the neighbours that it changes.

    Its least cost moves to the graph's offset. At most one of fixing, merging and folding removes it.
    """
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
    """Move the parts of an edge's costs that depend on one end alone into that node, and queue nodes that changed.

    Afterwards every row and column that allows anything has a 0. The edge is removed if no costs remain; return True
    in this case.
    """
    table = graph.edges[first][second]
    for node, axis in ((first, 1), (second, 0)):
        low = table.min(axis=axis)
        if low.any():
            cost = graph.costs[node]
            cost += low
            np.minimum(cost, FORBIDDEN, out=cost)
            # A row without an allowed entry disappears with its alternative; leave it unchanged.
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
    """Apply `_tidy_edge` to all edges of a node."""
    for other in list(graph.edges[node]):
        _tidy_edge(graph, node, other, waiting)


def _keep(graph: Graph, node: int, kept: Ints, waiting: _Waiting, instead: Ints | None = None) -> None:
    """Drop all alternatives of a node except `kept`, ascending; simplify its edges, and queue its neighbours.

    `instead` [alternatives] names for each alternative one in `kept` that is no worse, or -1; None stands for -1 at
    every dropped one. It serves `Graph.project`.
    """
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
    """Drop alternatives that are forbidden, or one of whose terms alone exceeds the capacity at some time.

    Repeat, since simplified edges may forbid more of them.

    Raises `InfeasibleGraph` if none is left.
    """
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
    """Drop dominated alternatives of a node: for any choices of the neighbours another one has no more cost or bytes.

    If the work exceeds `_DOMINANCE_WORK`, `_drop_equal` goes first. If it then still exceeds twenty times that, no
    other alternatives are compared.
    """
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
        # One of two alternatives that dominate each other must stay. A dropped dominator has a living dominator of its
        # own.
        alive[a] = not (better[a] & alive).any()
    if not alive.all():
        instead = np.arange(count)
        for a in range(count - 1, -1, -1):
            if not alive[a]:
                # Any remaining dominator; the order of dropping ensures that one exists.
                instead[a] = _last_dominator(better, alive, a)
        _keep(graph, node, np.flatnonzero(alive), waiting, instead)


def _is_worth_compiling(work: int) -> bool:
    """Return True if the number of entries justifies loading the compiled kernels, or if they are loaded already."""
    return work > _COMPILED_WORK or f"{__package__}.dominance_kernels" in sys.modules


def _dominators_plainly(cost: Ints, usages: list[Ints], tables: list[Ints]) -> np.ndarray:
    """Return the mask [a, b] of `dominance_kernels.dominators`, computed with numpy."""
    count = len(cost)
    better = np.zeros((count, count), dtype=bool)
    # extra[a, b]: largest extra cost of moving from a to b, for any choices of the neighbours.
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
        # If a is forbidden, moving loses nothing; if both are forbidden the difference is 0, which is equivalent.
        change[table[rows] >= FORBIDDEN] = -FORBIDDEN
        worst = change.max(axis=1)
        bound = bound + np.where(worst >= FORBIDDEN // 2, FORBIDDEN, np.maximum(worst, -FORBIDDEN))
        left = bound <= 0
        # The remaining neighbours add at least 0 (each table has a 0 in every row), so a positive bound stays positive.
        rows, columns, bound = rows[left], columns[left], bound[left]
    better[rows, columns] = True
    return better


def _last_dominator(better: np.ndarray, alive: np.ndarray, start: int) -> int:
    """Return a living alternative that is no worse than `start`, by any chain of dominators; -1 if there is none.

    `better` is the mask of `dominators`, `alive` the mask of alternatives that remain.
    """
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
    """Drop all but the cheapest of alternatives with equal table rows and equal memory; the first of equally cheap."""
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
    """Remove a node with one alternative, and queue its neighbours.

    Its cost moves to the offset, its edges' costs to the neighbours; its memory reduces the capacity.
    """
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
    """Merge `node` into the first neighbour each of whose alternatives allows exactly one of the node's.

    Costs, edges and memory terms move to that neighbour. A neighbour with more alternatives than the node is skipped if
    a new edge table would exceed `_TABLE` entries. Return False if nothing was merged.
    """
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
    """Eliminate a node of degree 1 into its neighbour; a node with memory only if its cheapest answers also use least.

    This must be so in each memory term separately; else the graph stays unchanged. Equally cheap answers prefer the
    least total memory.
    """
    ((other, table),) = graph.edges[node].items()
    total = np.minimum(graph.costs[node][:, None] + table, FORBIDDEN)
    best = np.argmin(total, axis=0)
    columns = np.arange(total.shape[1])
    if node in graph.terms:
        usages = list(graph.terms[node].values())
        load = np.stack(usages).sum(axis=0, dtype=np.float64)
        # Break ties between equally cheap answers by the least memory.
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
    """Eliminate a node of degree 2 without memory.

    Its best answer to each pair of the neighbours' choices becomes an edge between them, or adds to it. The node stays
    if the new table would have more entries than `_TABLE` and than both old ones together. It stays too if the work is
    too large.
    """
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
    """Return minimum and alternative of `dominance_kernels.fold_between`, computed with numpy."""
    best = from_left[0][:, None] + right[0][None, :]
    answer = np.zeros(best.shape, dtype=np.int16 if len(from_left) <= 2**15 else np.int32)
    for alternative in range(1, len(from_left)):
        total = from_left[alternative][:, None] + right[alternative][None, :]
        better = total < best
        best[better] = total[better]
        answer[better] = alternative
    return best, answer
