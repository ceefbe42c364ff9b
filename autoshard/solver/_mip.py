"""The reduced graph as a mixed integer program for HiGHS, built in arrays; memory rows are added where they are broken.

Solved in processes of our own only: see `_exact` and `_worker`.

Local polytope (Schlesinger 1976; Werner, PAMI 29, 2007): binaries per alternative, a continuous variable per allowed
pair of row class and column class of an edge (equal rows and equal columns share one).
"""

import dataclasses
import math
import time

import numpy as np

from ._clock import Clock, Due, never
from ._graph import Graph, Ints
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
"""Costs beyond which HiGHS, which reckons in floats, may miss the optimum by many units: 1000 s in picoseconds."""


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
) -> MipResult:
    """Minimises over `graph` until proven, `deadline` (by `clock`), `nodes` branchings, or `due`.

    `times` are the memory rows to start with; choices that cost `cutoff` or more are of no use, `start` is
    feasible.
    """
    import highspy

    model = _Model(graph)
    dearest = float(model.costs.max(initial=1.0))
    scale = max(1.0, dearest / 1e5)
    exact = dearest <= _EXACT
    # What a closed bound may be off by: some parts in a million of the dearest cost.
    slip = 0.0 if exact else 1e-6 * dearest
    solver = highspy.Highs()
    for key, value in (
        ("output_flag", False),
        ("random_seed", seed % 2**31),
        ("threads", threads),
        ("mip_rel_gap", 0.0),
        ("mip_abs_gap", 1e-7),
        ("mip_feasibility_tolerance", 1e-7),
        ("primal_feasibility_tolerance", 1e-8),
    ):
        solver.setOptionValue(key, value)
    if cutoff is not None:
        solver.setOptionValue("objective_bound", (cutoff - 0.5 + slip) / scale)
    if nodes is not None:
        solver.setOptionValue("mip_max_nodes", nodes)
    if clock is not time.monotonic and math.isfinite(deadline):
        # HiGHS itself knows no other clock.
        solver.cbMipInterrupt += lambda event: event.interrupt(due() or clock() > deadline)
    elif due is not never:
        solver.cbMipInterrupt += lambda event: event.interrupt(due())
    lp = highspy.HighsLp()
    rows, columns = len(model.right), len(model.costs)
    lp.num_row_, lp.num_col_ = rows, columns
    lp.col_cost_ = model.costs / scale
    lp.col_lower_ = np.zeros(columns)
    lp.col_upper_ = np.ones(columns)
    lp.row_lower_ = lp.row_upper_ = model.right
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = model.matrix.indptr.astype(np.int32)
    lp.a_matrix_.index_ = model.matrix.indices.astype(np.int32)
    lp.a_matrix_.value_ = np.asarray(model.matrix.data, dtype=np.float64)
    lp.integrality_ = [highspy.HighsVarType.kInteger] * model.binaries + [highspy.HighsVarType.kContinuous] * (
        columns - model.binaries
    )
    solver.passModel(lp)
    if start is not None:
        solution = highspy.HighsSolution()
        solution.col_value = model.point(start).tolist()
        solver.setSolution(solution)
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
            solver.addRow(
                -highspy.kHighsInf, graph.capacity[when] / unit, len(places), places.astype(np.int32), weights / unit
            )
        left = deadline - clock()
        if left <= 0.02:
            return MipResult(best, bound, False)
        if clock is time.monotonic:
            # The limit counts from the first run.
            solver.setOptionValue("time_limit", solver.getRunTime() + left)
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            if exact or cutoff is None:
                return MipResult(best, float("inf"), True, exact)
            return MipResult(best, max(bound, cutoff - slip), True, False)
        info = solver.getInfo()
        bound = max(bound, info.mip_dual_bound * scale - slip)
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return MipResult(best, bound, False)
        values = np.asarray(solver.getSolution().col_value)
        choices = {
            node: int(np.argmax(values[model.first[node] : model.first[node] + len(cost)]))
            for node, cost in graph.costs.items()
        }
        over = usage_profile(graph, choices) - graph.capacity
        finished = status == highspy.HighsModelStatus.kOptimal
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
