"""The reduced graph as a mixed integer program, built in arrays; memory rows are added where they are broken.

Solved in processes of our own only: see `_exact` and `_worker`.

Local polytope (Schlesinger 1976; Werner, PAMI 29, 2007): binaries per alternative, a continuous variable per allowed
pair of row class and column class of an edge (equal rows and equal columns share one).
"""

import dataclasses

import numpy as np

from ._clock import Clock, Due, never
from ._graph import Graph, Ints
from ._mip_engines import ENGINES, Bounds, End, Mip, mip_engine
from ._problem import FORBIDDEN


@dataclasses.dataclass(frozen=True, slots=True)
class MipResult:
    choices: dict[int, int] | None
    """Best choices that keep memory; None when none were found."""
    bound: float
    """No choices of the graph cost less (its offset excluded); infinite when proven infeasible."""
    finished: bool
    """The bound was closed, within the solver's tolerance."""
    exact: bool = True
    """That tolerance is less than a unit of cost, as far as costs go that plans have."""


_EXACT = 1e15
"""Costs beyond which an engine, which reckons in floats, may miss the optimum by many units: 1000 s in picoseconds."""


class _Model:
    def __init__(self, graph: Graph):
        import scipy.sparse as sp

        self.graph = graph
        self.nodes = list(graph.costs)
        sizes = np.array([len(graph.costs[node]) for node in self.nodes], dtype=np.int64)
        self.first = dict(zip(self.nodes, np.concatenate([[0], np.cumsum(sizes)]).tolist(), strict=False))
        self.binaries = int(sizes.sum())
        costs = [graph.costs[node] for node in self.nodes]
        self.pairs: list[tuple] = []
        """(node, other, its classes, the other's classes, [class, class] -> variable or -1) of every edge."""
        rows, columns, values = [], [], []
        count, width = len(self.nodes), self.binaries
        rows.append(np.repeat(np.arange(count), sizes))
        columns.append(np.arange(self.binaries))
        values.append(np.ones(self.binaries))
        for node in self.nodes:
            for other, table in graph.edges[node].items():
                if node > other:
                    continue
                _, group_a = np.unique(table, axis=0, return_inverse=True)
                _, group_b = np.unique(table, axis=1, return_inverse=True)
                group_a, group_b = group_a.ravel(), group_b.ravel()
                small = np.empty((group_a.max() + 1, group_b.max() + 1), dtype=np.int64)
                small[group_a[:, None], group_b[None, :]] = table
                a, b = np.nonzero(small < FORBIDDEN)
                pair = width + np.arange(len(a))
                place = np.full(small.shape, -1, dtype=np.int64)
                place[a, b] = pair
                self.pairs.append((node, other, group_a, group_b, place))
                width += len(a)
                costs.append(small[a, b])
                rows += [count + a, count + group_a, count + len(small) + b, count + len(small) + group_b]
                one = self.first[node] + np.arange(len(group_a))
                two = self.first[other] + np.arange(len(group_b))
                columns += [pair, one, pair, two]
                ones = np.ones(len(a))
                values += [ones, -np.ones(len(group_a)), ones, -np.ones(len(group_b))]
                count += sum(small.shape)
        self.costs = np.concatenate(costs).astype(np.float64)
        self.matrix = sp.csr_array(
            (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(count, width)
        )
        self.right = np.zeros(count)
        self.right[: len(self.nodes)] = 1

    def point(self, choices: dict[int, int]) -> np.ndarray:
        """The variables' values that `choices` stand for."""
        values = np.zeros(len(self.costs))
        for node, choice in choices.items():
            values[self.first[node] + choice] = 1
        for node, other, group_a, group_b, place in self.pairs:
            values[place[group_a[choices[node]], group_b[choices[other]]]] = 1
        return values

    def memory_row(self, when: int) -> tuple[Ints, np.ndarray]:
        places, weights = [], []
        for node, terms in self.graph.terms.items():
            for (start, stop), usage in terms.items():
                if start <= when < stop:
                    places.append(self.first[node] + np.flatnonzero(usage))
                    weights.append(usage[usage > 0])
        flat, where = np.unique(np.concatenate(places), return_inverse=True)
        total = np.zeros(len(flat))
        np.add.at(total, where, np.concatenate(weights))
        return flat, total


def usage_profile(graph: Graph, choices: dict[int, int]) -> Ints:
    """[compressed times] bytes used by the graph's terms."""
    change = np.zeros(len(graph.capacity) + 1, dtype=np.int64)
    for node, terms in graph.terms.items():
        for (start, stop), usage in terms.items():
            used = usage[choices[node]]
            change[start] += used
            change[stop] -= used
    return np.cumsum(change)[:-1]


def solve_mip(
    graph: Graph,
    *,
    deadline: float,
    clock: Clock,
    seed: int,
    threads: int,
    cutoff: float | None,
    times: list[int],
    nodes: int | None = None,
    start: dict[int, int] | None = None,
    due: Due = never,
    engine: str = ENGINES[0],
) -> MipResult:
    """Minimises over `graph` until proven, `deadline` (by `clock`), `nodes` branchings, or `due`, by one of `ENGINES`.

    `times` are the memory rows to start with; choices that cost `cutoff` or more are of no use, `start` is
    feasible.
    """
    model = _Model(graph)
    dearest = float(model.costs.max(initial=1.0))
    scale = max(1.0, dearest / 1e5)
    exact = dearest <= _EXACT
    # What a closed bound may be off by: some parts in a million of the dearest cost.
    slip = 0.0 if exact else 1e-6 * dearest
    most = None if cutoff is None else (cutoff - 0.5 + slip) / scale
    solver = mip_engine(
        engine,
        Mip(model.costs / scale, model.matrix, model.right, model.binaries),
        Bounds(deadline, clock, due, seed, threads, most, nodes),
        None if start is None else model.point(start),
    )
    used: set[int] = set()
    best: dict[int, int] | None = None
    bound = 0.0
    pending = list(times)
    runs = 0
    while True:
        runs += 1
        for when in pending:
            used.add(when)
            places, weights = model.memory_row(when)
            unit = float(max(1, graph.capacity[when]))
            solver.add_row(places, weights / unit, graph.capacity[when] / unit)
        left = deadline - clock()
        if left <= 0.02:
            return MipResult(best, bound, False)
        ran = solver.run(left)
        if ran.end is End.INFEASIBLE:
            if exact or cutoff is None:
                return MipResult(best, float("inf"), True, exact)
            return MipResult(best, max(bound, cutoff - slip), True, False)
        bound = max(bound, ran.bound * scale - slip)
        if ran.values is None:
            return MipResult(best, bound, False)
        choices = {
            node: int(np.argmax(ran.values[model.first[node] : model.first[node] + len(cost)]))
            for node, cost in graph.costs.items()
        }
        over = usage_profile(graph, choices) - graph.capacity
        finished = ran.end is End.OPTIMAL
        if (over <= 0).all():
            return MipResult(choices, bound, finished, exact)
        if not finished or (nodes is not None and runs == 3):
            return MipResult(best, bound, False)
        # The worst time of each run of broken times, the worst few of those.
        pending = [when for when in np.argsort(-over).tolist() if over[when] > 0 and when not in used][:1]
        broken = np.flatnonzero((over > 0) & ~np.isin(np.arange(len(over)), list(used)))
        for run in np.split(broken, np.flatnonzero(np.diff(broken) > 1) + 1)[:20]:
            if len(run):
                top = int(run[np.argmax(over[run])])
                if top not in pending:
                    pending.append(top)
        if not pending:
            # Broken only within the solver's tolerance: nothing more to add.
            return MipResult(best, bound, False)
