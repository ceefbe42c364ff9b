"""The entry point `solve`: reduce, bound, then prove or search; independent code checks the answer."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import OutOfRangeError, UserError
from autoshard.solver.clocks import Clock
from autoshard.solver.elimination import Elimination
from autoshard.solver.exact_solves import Exact, solve_in_process
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
"""Share of the time limit that the reductions may use; on a busy machine this leaves time for the search."""


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """State of a solve at one moment."""

    elapsed: float
    """Wall-clock seconds since `solve` was called."""
    incumbent: int | None
    """Cost of the best feasible choices so far; None before any were found."""
    bound: int
    """Best lower bound of the cost so far; at first the sum of all least costs."""


class Useful(NamedTuple):
    """Answers that the caller can use; the search for others is left out."""

    enough: float = math.inf
    """Lower bound at which the search ends, since choices of this cost are of no use. The result may then have no
    choices ([0]).
    """
    nearest: bool = True
    """True to return the choices with the least excess of memory for a problem that is proven infeasible. False returns
    no choices ([0]) then.
    """
    gap: float = 0.0
    """Share of the cost by which the bound may be lower when the search ends."""


_ANY = Useful()
"""Answers of a caller that can use all."""


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
    useful: Useful = _ANY,
) -> Solution:
    """Choose one alternative for each node at the least total cost, within the memory limit at every time.

    Returns the best choices, their exact cost (recomputed by `evaluate` from the whole problem) and a lower bound.

    - `time_limit`: seconds of `clock`.
    - `seed`: seed of the search. With `iterations`, the same seed gives the same answer unless the time limit ends the
      search first.
    - `hint`: start of the search, [N] choices, feasible or not; the answer is never worse than a feasible hint.
    - `threads`: 1 or 2; larger numbers act as 2. With 2 one thread searches while a second process solves restricted
      problems exactly.
    - `iterations`: rounds of work after which the search ends; None for no such limit.
    - `progress`: called whenever the incumbent or the bound improves.
    - `stop`: event that ends the search early.
    - `clock`: wall clock by default; with `processor_seconds` the limit counts processor time. A second process
      receives the clock, so it must be a module-level function.
    - `useful`: answers that the caller can use.

    Raises `UserError` for a malformed problem, a time limit that is not positive, or fewer than one thread. Raises
    `OutOfRangeError` if cost sums cannot be distinguished from forbidden ones, or if sums exceed 64 bits.
    """
    if not time_limit > 0:
        raise UserError(f"the time limit is {time_limit:g} s; it must be more than 0")
    if threads < 1:
        raise UserError(f"{threads} threads were asked for; at least 1 is needed")
    validate(problem)
    return _Solve(problem, time_limit, clock, seed, threads, iterations, progress, stop, useful).run(hint)


class _Solve:
    """State of one call of `solve`: incumbent, bound and limits."""

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
        useful: Useful = _ANY,
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
        self.stop_requested = (lambda: False) if stop is None else stop.is_set
        self.enough, self.wants_nearest, self.gap = useful
        self.best: Ints | None = None
        """Best feasible choices so far, the incumbent."""
        self.cost: int | None = None
        """Cost of `best`."""
        self.bound = self.least = _trivial_bound(problem)
        """Best lower bound so far, and the one known from the start."""
        self.stats: dict = {}
        self.nearest: Ints | None = None
        """Choices at the end of a search that found no feasible ones."""

    def run(self, hint: NDArray[np.int64] | None) -> Solution:
        """Solve the problem, from the choices `hint` if given.

        The status is OPTIMAL if the search proved it or the bound reaches the cost, INFEASIBLE only if proven.
        """
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
            # The hint costs more than the search can distinguish from forbidden, so the search skipped choices like it.
            self.bound, done = self.least, False
        return self.finish(Status.OPTIMAL if done else Status.FEASIBLE)

    def stopped(self) -> bool:
        """Return True if the caller stopped the solve, or if by the bound no remaining choices are of use."""
        return self.stop_requested() or self.bound >= self.enough or self.is_near()

    def is_near(self) -> bool:
        """Return True if the incumbent is within the gap that the caller accepts; False where only a proof ends."""
        return self.gap > 0 and self.cost is not None and self.cost - self.bound <= self.gap * abs(self.cost)

    def due(self) -> bool:
        """Return True if the solve was stopped or its time is up."""
        return self.stopped() or self.clock() >= self.deadline

    def reduce(self, graph: Graph) -> None:
        """Apply the exact reductions to the graph, for at most the share `_REDUCING` of the time limit.

        Raises `InfeasibleGraph` or `OverLimit` if no choices are feasible.
        """
        # With an iteration limit the answer must be reproducible, so only the full deadline cuts the reductions short.
        until = self.deadline - (0.0 if self.iterations is not None else (1 - _REDUCING) * self.time_limit)
        reduce(graph, lambda: self.stopped() or self.clock() >= until)

    def search(self, graph: Graph) -> bool:
        """Solve the reduced graph; return True if the incumbent is proven best, or if none exists and that is
        proven.

        In order: elimination without memory, HiGHS on a small graph, then the search in parallel with restricted
        solves. Incumbent and bound are raised on the way. False is returned too if the bound reaches `enough`.
        """
        if not graph.costs:
            self.offer(graph.restore({}))
            return True
        plan = Elimination.plan(graph)
        times: list[int] = []
        start = {node: int(np.argmin(cost)) for node, cost in graph.costs.items()}
        unlimited = None if plan is None else plan.solve(graph.costs, self.due)
        if unlimited is not None:
            value, start = unlimited
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
            result = solve_in_process(job, self.due)
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
                # A search could improve the answer only by less than the solver's floating-point tolerance.
                return False
        # Imported here because the kernels load numba, which most problems never need.
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
        """Raise the bound to the lower bound of a MIP solve, offset added; an infinite one changes nothing."""
        if np.isfinite(bound):
            # The bound is a float of HiGHS: subtract its possible rounding error.
            self.raise_bound(graph.offset + math.floor(bound - 1e-7 * abs(bound)))

    def offer(self, choices: Ints) -> None:
        """Accept `choices` of the whole problem as incumbent if they are feasible and better."""
        judged = evaluate(self.problem, choices)
        if judged.feasible and (self.cost is None or judged.cost < self.cost):
            self.best, self.cost = np.array(choices, dtype=np.int64), judged.cost
            self.report_progress()

    def raise_bound(self, bound: int) -> None:
        """Raise the lower bound if `bound` is higher."""
        if bound > self.bound:
            self.bound = bound
            self.report_progress()

    def report_progress(self) -> None:
        """Call `progress`, if given, with incumbent and bound."""
        if self.progress is not None:
            self.progress(Progress(time.monotonic() - self.began, self.cost, self.bound))

    def finish(self, status: Status) -> Solution:
        """Return the incumbent as the solution, after a check by independent code; if OPTIMAL, its cost is the bound.

        Raises `RuntimeError` if the check finds another cost, or choices that are not feasible.
        """
        assert self.best is not None and self.cost is not None
        judged = evaluate(self.problem, self.best)
        if judged.cost != self.cost or not judged.feasible:
            raise RuntimeError(f"the solver reckoned a cost of {self.cost}, the problem says {judged.cost}")
        bound = self.cost if status is Status.OPTIMAL else min(self.bound, self.cost)
        self.stats |= {"peak_usage": judged.peak_usage, "peak_time": judged.peak_time}
        self.stats["solve_s"] = time.monotonic() - self.began
        return Solution(self.best, self.cost, bound, status, self.stats)

    def infeasible(self, proven: bool) -> Solution:
        """Return the answer of a solve without feasible choices.

        Choices at the end of the search are returned, if there are any. Else, ignoring costs, a bisection on the memory
        limit looks for choices with the smallest excess. If it finds feasible ones, these are the solution, unless
        `proven`. Raises `OutOfRangeError` if choices exist, but their costs cannot be distinguished from forbidden
        ones.
        """
        cost_spread = spread(self.problem)
        dearest = max(cost_spread, cost_spread + self.least)
        # If no cost is negative, a sum that lies so far above the least is itself forbidden.
        blind = self.least < 0 and cost_spread >= FORBIDDEN
        if self.best is not None:
            if not blind:
                raise RuntimeError("the problem was found infeasible although the hint is feasible")
            self.bound = self.least
            return self.finish(Status.FEASIBLE)
        costs_text = f"lie up to {cost_spread} apart" if blind else f"add up to as much as {dearest}"
        if proven and (blind or (dearest >= FORBIDDEN and self.only_dear())):
            raise OutOfRangeError(
                f"the costs of the problem {costs_text}, and no choices were found whose cost is less than {FORBIDDEN}"
                f"{' above the least that may be' if blind else ''}: such sums look like forbidden ones; "
                f"divide all costs by {dearest // FORBIDDEN + 1}"
            )
        if self.nearest is not None:
            return self.without(self.nearest, proven)
        if proven and not self.wants_nearest:
            self.stats["solve_s"] = time.monotonic() - self.began
            return Solution(np.zeros(0, dtype=np.int64), FORBIDDEN, FORBIDDEN, Status.INFEASIBLE, self.stats)
        choices = np.zeros(self.problem.num_nodes, dtype=np.int64)
        allowed = _without_costs(self.problem, None)
        limit = self.problem.usage_limit
        deadline = self.clock() + 0.3 if self.stopped() else max(self.deadline, self.clock() + 1.0)
        within_limit = _any(allowed, deadline, self.clock, self.seed, self.threads)
        if within_limit is not None:
            choices = within_limit
        if within_limit is not None and limit is not None:
            low, high = limit, evaluate(self.problem, choices).peak_usage
            while high - low > max(1, (high - limit) // 1000) and self.clock() < deadline:
                middle = (low + high) // 2
                relaxed = _without_costs(self.problem, middle)
                if most_usage(relaxed) >= EXACT:
                    break
                within_limit = _any(relaxed, deadline, self.clock, self.seed, self.threads)
                if within_limit is None:
                    low = middle
                else:
                    choices, high = within_limit, evaluate(self.problem, within_limit).peak_usage
        if not proven:
            # The time was up before the search found any, but the bisection without costs did.
            self.offer(choices)
            if self.best is not None:
                return self.finish(Status.FEASIBLE)
        return self.without(choices, proven)

    def of_no_use(self) -> Solution:
        """Return the answer when no choices cost less than `enough`: no choices, cost `FORBIDDEN`, status UNKNOWN."""
        self.stats["solve_s"] = time.monotonic() - self.began
        return Solution(np.zeros(0, dtype=np.int64), FORBIDDEN, self.bound, Status.UNKNOWN, self.stats)

    def only_dear(self) -> bool:
        """Return True if some choices satisfy all limits and only their cost sum reaches `FORBIDDEN`."""
        allowed = _without_costs(self.problem, self.problem.usage_limit)
        return _any(allowed, max(self.deadline, self.clock() + 1.0), self.clock, self.seed, self.threads) is not None

    def without(self, choices: Ints, proven: bool) -> Solution:
        """Return the answer without feasible choices: the given choices, which come nearest to feasibility.

        `proven` gives the status INFEASIBLE and the bound `FORBIDDEN`, else it is UNKNOWN with the best bound.
        """
        judged = evaluate(self.problem, choices)
        self.stats |= {"excess": judged.excess, "excess_time": judged.peak_time, "peak_usage": judged.peak_usage}
        self.stats["solve_s"] = time.monotonic() - self.began
        status = Status.INFEASIBLE if proven else Status.UNKNOWN
        return Solution(choices, judged.cost, FORBIDDEN if proven else self.bound, status, self.stats)


def _any(problem: Problem, deadline: float, clock: Clock, seed: int, threads: int) -> Ints | None:
    """Return any feasible choices of a problem without costs; None if none exist or were found by the deadline.

    The search has at least 0.3 seconds.
    """
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
    """Return the problem with all allowed costs zero, under another memory limit in bytes (None: no limit)."""
    return dataclasses.replace(
        problem,
        node_costs=np.where(problem.node_costs >= FORBIDDEN, FORBIDDEN, 0),
        edge_costs=np.where(problem.edge_costs >= FORBIDDEN, FORBIDDEN, 0),
        usage_limit=limit,
    )


def _trivial_bound(problem: Problem) -> int:
    """Return the sum of the smallest cost of every node and edge, a lower bound on any choices' cost."""
    nodes = np.minimum.reduceat(problem.node_costs, problem.node_offsets[:-1])
    edges = np.minimum.reduceat(problem.edge_costs, problem.edge_offsets[:-1]) if problem.num_edges else nodes[:0]
    return sum(nodes.tolist()) + sum(edges.tolist())
