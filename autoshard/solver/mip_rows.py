"""The reduced graph as a mixed integer program, built in arrays; violated memory rows are added lazily.

The program is solved in child processes only (`exact_solves`, `milp_worker`), because a stopped run ends only with its
process (see `mathopt`).

The relaxation is the local polytope (Schlesinger 1976; Werner, PAMI 29, 2007). It has a binary variable for each
alternative. Each edge has a continuous variable for each allowed pair of a row class and a column class. Equal rows
share a class, and so do equal columns.
"""

import dataclasses
import time

import numpy as np

from autoshard.solver.clocks import Clock, Due, never
from autoshard.solver.mathopt import IntegerProgram
from autoshard.solver.problem import FORBIDDEN
from autoshard.solver.residual_graph import Graph, Ints


@dataclasses.dataclass(frozen=True, slots=True)
class MipResult:
    """Result of `solve_mip`."""

    choices: dict[int, int] | None
    """Best choices within the memory limit, node -> alternative; None when none were found."""
    bound: float
    """Lower bound on the cost of the graph's choices, its offset excluded; infinite when proven infeasible."""
    finished: bool
    """True if the gap was closed within the solver's tolerance, or no choices below the cutoff exist."""
    exact: bool = True
    """True if this tolerance is below one unit of cost, so that a finished solve is exact."""
    stopped: bool = False
    """True if the run continues in the background, so that its process should be terminated."""


_EXACT = 1e15
"""Costs beyond which HiGHS, which uses floats, may miss the optimum by many units: 1000 s in picoseconds."""
_LATE_S = 5.0
"""Seconds by which HiGHS may exceed its time limit, which it checks only occasionally."""


class _Model:
    """Variables and equality rows of the program; memory rows are computed on demand."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.nodes = list(graph.costs)
        """Alive nodes in the order of their variables and of their rows, each of which sums to 1."""
        sizes = np.array([len(graph.costs[node]) for node in self.nodes], dtype=np.int64)
        self.first = dict(zip(self.nodes, np.concatenate([[0], np.cumsum(sizes)]).tolist(), strict=False))
        self.binaries = int(sizes.sum())
        costs = [graph.costs[node] for node in self.nodes]
        self.pairs: list[tuple] = []
        """(node, other, its classes, the other's classes, [class, class] -> variable or -1) of every edge.

        Classes are the numbers of equal table lines, one for each alternative.
        """
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
        self.entries = np.concatenate(rows), np.concatenate(columns), np.concatenate(values)
        """(rows, columns, values) of the matrix."""
        self.right = np.zeros(count)
        self.right[: len(self.nodes)] = 1

    def point(self, choices: dict[int, int]) -> np.ndarray:
        """Return the values [variables] for `choices`, which must use no forbidden pair."""
        values = np.zeros(len(self.costs))
        for node, choice in choices.items():
            values[self.first[node] + choice] = 1
        for node, other, group_a, group_b, place in self.pairs:
            values[place[group_a[choices[node]], group_b[choices[other]]]] = 1
        return values

    def memory_row(self, when: int) -> tuple[Ints, np.ndarray]:
        """Return the variables with usage in the memory row of one compressed time, and the bytes of each.

        Some term must be live at that time.
        """
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
    """Return the bytes that the graph's terms use at each time, [compressed times]."""
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
    cutoff: float | None,
    times: list[int],
    nodes: int | None = None,
    start: dict[int, int] | None = None,
    due: Due = never,
) -> MipResult:
    """Solve the MIP of `graph` until proven, until `deadline` (of `clock`), for `nodes` branchings, or until `due`.

    Memory rows of violated times are added, and the MIP solved again, until choices fit. Costs exclude the graph's
    offset. With a branching limit at most three runs are made, each with that limit.

    - `cutoff`: choices of this cost or more are of no use; None for no cutoff. If none are cheaper, the result has no
      choices, is finished, and has an infinite bound (without `exact`, about the cutoff).
    - `times`: compressed times whose memory rows are present from the start.
    - `start`: feasible choices to start from; None without any.
    """
    model = _Model(graph)
    dearest = float(model.costs.max(initial=1.0))
    # The solver's tolerances are absolute, so costs are scaled to at most 1e5.
    scale = max(1.0, dearest / 1e5)
    exact = dearest <= _EXACT
    # Possible error of a closed bound: one part in a million of the largest cost.
    slip = 0.0 if exact else 1e-6 * dearest
    program = IntegerProgram(model.costs / scale, model.binaries)
    program.add(model.right, model.right, *model.entries)
    wall = clock is time.monotonic
    # HiGHS observes a wall-clock limit, and its process stays usable then; so wait a little longer for it.
    late = deadline + _LATE_S if wall else deadline
    used: set[int] = set()
    # All costs of the graph are at least 0.
    bound = 0.0
    pending = list(times)
    runs = 0
    while True:
        runs += 1
        for when in pending:
            used.add(when)
            places, weights = model.memory_row(when)
            unit = float(max(1, graph.capacity[when]))
            limit = np.array([graph.capacity[when] / unit])
            program.add(np.array([-np.inf]), limit, np.zeros(len(places), dtype=np.int64), places, weights / unit)
        left = deadline - clock()
        if left <= 0.02:
            return MipResult(None, bound, False)
        outcome = program.minimise(
            seed=seed,
            seconds=left if wall else np.inf,
            # Costs are integers: half a unit below the cutoff excludes ties.
            cutoff=None if cutoff is None else (cutoff - 0.5 + slip) / scale,
            nodes=nodes,
            start=None if start is None else model.point(start),
            due=lambda: due() or clock() > late,
        )
        if outcome.infeasible:
            if exact or cutoff is None:
                return MipResult(None, float("inf"), True, exact)
            return MipResult(None, max(bound, cutoff - slip), True, False)
        bound = max(bound, outcome.bound * scale - slip)
        if outcome.values is None:
            return MipResult(None, bound, False, stopped=outcome.stopped)
        choices = {
            node: int(np.argmax(outcome.values[model.first[node] : model.first[node] + len(cost)]))
            for node, cost in graph.costs.items()
        }
        over = usage_profile(graph, choices) - graph.capacity
        if (over <= 0).all():
            return MipResult(choices, bound, outcome.finished, exact, outcome.stopped)
        if not outcome.finished or (nodes is not None and runs == 3):
            return MipResult(None, bound, False, stopped=outcome.stopped)
        # Add the worst time, then the worst time of each run of consecutive violated times, at most 20 runs.
        pending = [when for when in np.argsort(-over).tolist() if over[when] > 0 and when not in used][:1]
        broken = np.flatnonzero((over > 0) & ~np.isin(np.arange(len(over)), list(used)))
        for run in np.split(broken, np.flatnonzero(np.diff(broken) > 1) + 1)[:20]:
            if len(run):
                top = int(run[np.argmax(over[run])])
                if top not in pending:
                    pending.append(top)
        if not pending:
            # All violations are within the solver's tolerance: no row can be added.
            return MipResult(None, bound, False)
