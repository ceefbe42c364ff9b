"""`solve`: reduce, bound, prove or search; check the answer with separate code."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import OutOfRangeError, UserError
from autoshard.solver.elimination import Elimination
from autoshard.solver.exact_solves import Exact, solve_apart
from autoshard.solver.job_process import Clock
from autoshard.solver.judge import evaluate
from autoshard.solver.mip_rows import usage_profile
from autoshard.solver.problem import FORBIDDEN, Problem
from autoshard.solver.problem_check import validate
from autoshard.solver.reductions import reduce
from autoshard.solver.residual_graph import (
    EXACT,
    Graph,
    InfeasibleGraph,
    Ints,
    OverLimit,
    build,
    most_usage,
    spread,
    table_entries,
)
from autoshard.solver.solution import Solution, Status


_SMALL = 60_000
"""Table entries up to which HiGHS alone is tried before the search."""
_REDUCING = 0.5
"""Share of the time limit that reducing may take: on a machine with much else to do the rest is for the search."""


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a solve."""

    elapsed: float
    """Seconds since `solve` was called."""
    incumbent: int | None
    """Cost of the best feasible choices so far."""
    bound: int
    """The best lower bound of the cost so far."""


def solve(
    problem: Problem,
    *,
    time_limit: float = 60.0,
    seed: int = 0,
    hint: NDArray[np.int64] | None = None,
    threads: int = 2,
    iterations: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
    clock: Clock = time.monotonic,
    enough: float = math.inf,
) -> Solution:
    """Chooses one alternative per node at the least cost that keeps memory within the limit at all times.

    `hint` ([N] choices, feasible or not) is a start. `iterations` bounds the search by rounds of work too; then the
    same `seed` gives the same answer unless the time is up first (with a `time_limit` of `math.inf` it never is).
    `progress` is called whenever the incumbent or the bound improves; setting `stop` ends the search early.
    The time limit counts seconds of `clock`: by default those on the wall, with `processor_seconds` those of work
    (it is handed to the second process, so it must be a function of a module).
    A bound of `enough` ends it too: choices that cost as much are of no use, and then none may be returned ([0]).
    `threads` is 1 or 2 (one searches while a second process solves restricted problems exactly); more are not used.
    Returns the best choices, their exact cost (recomputed by `evaluate` from the whole problem) and a lower bound.
    Raises `UserError` for a problem that is not well formed or a limit that is not positive, and `OutOfRangeError` for
    one whose sums cannot be told from what is forbidden, or are more than 64 bits hold.
    """
    if not time_limit > 0:
        raise UserError(f"the time limit is {time_limit:g} s; it must be more than 0")
    if threads < 1:
        raise UserError(f"{threads} threads were asked for; at least 1 is needed")
    validate(problem)
    return _Solve(problem, time_limit, clock, seed, threads, iterations, progress, stop, enough).run(hint)


class _Solve:
    def __init__(
        self,
        problem: Problem,
        time_limit: float,
        clock: Clock,
        seed: int,
        threads: int,
        iterations: int | None,
        progress: Callable[[Progress], None] | None,
        stop: threading.Event | None,
        enough: float = math.inf,
    ):
        self.problem = problem
        self.began = time.monotonic()
        self.clock = clock
        self.time_limit = time_limit
        self.deadline = clock() + time_limit
        self.seed = seed
        self.threads = threads
        self.iterations = iterations
        self.progress = progress
        self.told = (lambda: False) if stop is None else stop.is_set
        self.enough = enough
        self.best: Ints | None = None
        self.cost: int | None = None
        self.bound = self.least = _trivial_bound(problem)
        self.stats: dict = {}
        self.nearest: Ints | None = None
        """Choices that the search ended with when none were feasible."""

    def run(self, hint: NDArray[np.int64] | None) -> Solution:
        if hint is not None:
            self.offer(np.asarray(hint))
        graph = build(self.problem)
        try:
            self.reduce(graph)
        except (InfeasibleGraph, OverLimit):
            return self.infeasible(proven=True)
        self.stats |= {
            "reduced_nodes": len(graph.costs),
            "reduced_edges": sum(map(len, graph.edges.values())) // 2,
            "reduced_times": len(graph.capacity),
            "reduce_s": time.monotonic() - self.began,
        }
        self.raise_bound(graph.offset)
        done = self.search(graph)
        if self.best is None and not done and self.bound >= self.enough:
            return self.of_no_use()
        if self.best is None or self.cost is None:
            return self.infeasible(proven=done)
        done = done or self.bound >= self.cost
        if self.cost - self.least >= FORBIDDEN:
            # A hint dearer than what the search tells from forbidden: others like it were not looked at.
            self.bound, done = self.least, False
        return self.finish(Status.OPTIMAL if done else Status.FEASIBLE)

    def stopped(self) -> bool:
        """Told to, or since all that is left is of no use."""
        return self.told() or self.bound >= self.enough

    def due(self) -> bool:
        return self.stopped() or self.clock() >= self.deadline

    def reduce(self, graph: Graph) -> None:
        # Where work is counted by iterations, the same work is always done, unless the time is up altogether.
        until = self.deadline - (0.0 if self.iterations is not None else (1 - _REDUCING) * self.time_limit)
        reduce(graph, lambda: self.stopped() or self.clock() >= until)

    def search(self, graph: Graph) -> bool:
        """True when the best choices so far are proven best (or, with none, that there are none)."""
        if not graph.costs:
            self.offer(graph.restore({}))
            return True
        plan = Elimination.plan(graph)
        times: list[int] = []
        start = {node: int(np.argmin(cost)) for node, cost in graph.costs.items()}
        found = None if plan is None else plan.solve(graph.costs, self.due)
        if found is not None:
            value, start = found
            if value >= FORBIDDEN:
                return True
            self.raise_bound(graph.offset + value)
            over = usage_profile(graph, start) - graph.capacity
            if (over <= 0).all():
                self.offer(graph.restore(start))
                return True
            times = [int(np.argmax(over))]
        if self.bound >= self.enough:
            return False
        if table_entries(graph) <= _SMALL:
            cap = (0.3 if self.iterations is None else 1.0) * (self.deadline - self.clock())
            most = math.inf if self.cost is None else self.cost
            useless = self.enough < most
            cutoff = None if math.isinf(min(most, self.enough)) else min(most, self.enough) - graph.offset
            job = Exact(
                graph,
                deadline=self.clock() + cap,
                clock=self.clock,
                seed=self.seed,
                cutoff=cutoff,
                times=times,
                nodes=None if self.iterations is None else 5000,
            )
            result = solve_apart(job, self.due)
            if result is None:
                return False
            if result.choices is not None:
                self.offer(graph.restore(result.choices))
            if result.finished and result.exact:
                if useless and result.choices is None:
                    self.raise_bound(math.ceil(self.enough))
                    return False
                return True
            self.raise_mip_bound(graph, result.bound)
            if result.finished or self.due():
                # Better by less than floats tell apart is all that a search could be.
                return False
        # Imported here: the kernels bring numba, which most problems never need.
        from autoshard.solver.search.engine import Engine

        engine = Engine(
            graph,
            deadline=self.deadline,
            clock=self.clock,
            seed=self.seed,
            threads=self.threads,
            iterations=self.iterations,
            found=lambda choices: self.offer(graph.restore(choices)),
            bounded=lambda bound: self.raise_bound(graph.offset + math.ceil(bound)),
            stopped=self.stopped,
        )
        done = engine.run(None if self.best is None else graph.project(self.best))
        if self.best is None:
            self.nearest = graph.restore(engine.choices())
        self.stats |= {"rounds": engine.rounds, "moves": engine.climber.moves, "restricted_solves": engine.solves}
        return done

    def raise_mip_bound(self, graph: Graph, bound: float) -> None:
        if np.isfinite(bound):
            # The bound is a float of HiGHS: take off what rounding may have added.
            self.raise_bound(graph.offset + math.floor(bound - 1e-7 * abs(bound)))

    def offer(self, choices: Ints) -> None:
        """Takes `choices` of the whole problem if they are feasible and better."""
        judged = evaluate(self.problem, choices)
        if judged.feasible and (self.cost is None or judged.cost < self.cost):
            self.best, self.cost = np.array(choices, dtype=np.int64), judged.cost
            self.tell()

    def raise_bound(self, bound: int) -> None:
        if bound > self.bound:
            self.bound = bound
            self.tell()

    def tell(self) -> None:
        if self.progress is not None:
            self.progress(Progress(time.monotonic() - self.began, self.cost, self.bound))

    def finish(self, status: Status) -> Solution:
        assert self.best is not None and self.cost is not None
        judged = evaluate(self.problem, self.best)
        if judged.cost != self.cost or not judged.feasible:
            raise RuntimeError(f"the solver reckoned a cost of {self.cost}, the problem says {judged.cost}")
        bound = self.cost if status is Status.OPTIMAL else min(self.bound, self.cost)
        self.stats |= {"peak_usage": judged.peak_usage, "peak_time": judged.peak_time}
        self.stats["solve_s"] = time.monotonic() - self.began
        return Solution(self.best, self.cost, bound, status, self.stats)

    def infeasible(self, proven: bool) -> Solution:
        """No choices found: looks for those with the smallest excess by bisection on the limit, costs set aside."""
        apart = spread(self.problem)
        dearest = max(apart, apart + self.least)
        # Of costs that are not negative, whatever lies so far above the least is itself forbidden.
        blind = self.least < 0 and apart >= FORBIDDEN
        if self.best is not None:
            if not blind:
                raise RuntimeError("the problem was found infeasible although the hint is feasible")
            self.bound = self.least
            return self.finish(Status.FEASIBLE)
        said = f"lie up to {apart} apart" if blind else f"add up to as much as {dearest}"
        if proven and (blind or (dearest >= FORBIDDEN and self.only_dear())):
            raise OutOfRangeError(
                f"the costs of the problem {said}, and no choices were found whose cost is less than {FORBIDDEN}"
                f"{' above the least that may be' if blind else ''}: such sums cannot be told from forbidden ones; "
                f"divide all costs by {dearest // FORBIDDEN + 1}"
            )
        if self.nearest is not None:
            return self.without(self.nearest, proven)
        choices = np.zeros(self.problem.num_nodes, dtype=np.int64)
        allowed = _without_costs(self.problem, None)
        limit = self.problem.usage_limit
        deadline = self.clock() + 0.3 if self.stopped() else max(self.deadline, self.clock() + 1.0)
        found = _any(allowed, deadline, self.clock, self.seed, self.threads)
        if found is not None:
            choices = found
        if found is not None and limit is not None:
            low, high = limit, evaluate(self.problem, choices).peak_usage
            while high - low > max(1, (high - limit) // 1000) and self.clock() < deadline:
                middle = (low + high) // 2
                tried = _without_costs(self.problem, middle)
                if most_usage(tried) >= EXACT:
                    break
                found = _any(tried, deadline, self.clock, self.seed, self.threads)
                if found is None:
                    low = middle
                else:
                    choices, high = found, evaluate(self.problem, found).peak_usage
        if not proven:
            # The time was up before any were found, and costs aside some are.
            self.offer(choices)
            if self.best is not None:
                return self.finish(Status.FEASIBLE)
        return self.without(choices, proven)

    def of_no_use(self) -> Solution:
        """The answer when no choices cost less than what is enough."""
        self.stats["solve_s"] = time.monotonic() - self.began
        return Solution(np.zeros(0, dtype=np.int64), FORBIDDEN, self.bound, Status.UNKNOWN, self.stats)

    def only_dear(self) -> bool:
        """Whether choices keep the limit and avoid what is forbidden, and only their sum reaches `FORBIDDEN`."""
        allowed = _without_costs(self.problem, self.problem.usage_limit)
        return _any(allowed, max(self.deadline, self.clock() + 1.0), self.clock, self.seed, self.threads) is not None

    def without(self, choices: Ints, proven: bool) -> Solution:
        """The answer when there are no feasible choices: those nearest to it."""
        judged = evaluate(self.problem, choices)
        self.stats |= {"excess": judged.excess, "excess_time": judged.peak_time, "peak_usage": judged.peak_usage}
        self.stats["solve_s"] = time.monotonic() - self.began
        status = Status.INFEASIBLE if proven else Status.UNKNOWN
        return Solution(choices, judged.cost, FORBIDDEN if proven else self.bound, status, self.stats)


def _any(problem: Problem, deadline: float, clock: Clock, seed: int, threads: int) -> Ints | None:
    """Any feasible choices of a problem without costs."""
    left = max(0.3, deadline - clock())
    inner = _Solve(problem, left, clock, seed, threads, None, None, None)
    graph = build(problem)
    try:
        inner.reduce(graph)
    except (InfeasibleGraph, OverLimit):
        return None
    inner.search(graph)
    return inner.best


def _without_costs(problem: Problem, limit: int | None) -> Problem:
    return dataclasses.replace(
        problem,
        node_costs=np.where(problem.node_costs >= FORBIDDEN, FORBIDDEN, 0),
        edge_costs=np.where(problem.edge_costs >= FORBIDDEN, FORBIDDEN, 0),
        usage_limit=limit,
    )


def _trivial_bound(problem: Problem) -> int:
    nodes = np.minimum.reduceat(problem.node_costs, problem.node_offsets[:-1])
    edges = np.minimum.reduceat(problem.edge_costs, problem.edge_offsets[:-1]) if problem.num_edges else nodes[:0]
    return sum(nodes.tolist()) + sum(edges.tolist())
