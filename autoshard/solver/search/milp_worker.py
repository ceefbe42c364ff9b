"""Exact solves of restricted problems, one after the other, in a child process that runs parallel to the search."""

import dataclasses
import math

import numpy as np

from autoshard.base.worker import Shared
from autoshard.solver.clocks import Clock, Due
from autoshard.solver.flat_graph import Flat
from autoshard.solver.mip_rows import MipResult, solve_mip
from autoshard.solver.residual_graph import Graph, Ints
from autoshard.solver.search.pruning import Restricted, restricted
from autoshard.solver.solver_process import SolverProcess


@dataclasses.dataclass(frozen=True, slots=True)
class PartJob:
    """Arguments of one restricted solve."""

    slack: np.ndarray
    """[alternatives] lower bound on the cost of each one above the bound."""
    gap: float
    """Best cost minus bound; infinite when there are no choices yet."""
    best: Ints | None
    """Flat choices that stay included, and from which the solve starts."""
    cutoff: float | None
    """Cost of choices of the graph, offset excluded, from which they are of no use; None for no cutoff."""
    entries: int
    """Target number of table entries."""
    provable: int
    """Table entries up to which all alternatives that could be better are included."""
    prices: np.ndarray
    """[times of the graph] memory prices; times with a price have their memory rows from the start, at most 60."""
    seconds: float
    """Time limit of any other solve."""
    proof_seconds: float
    """Time limit of a solve that can prove the optimum of the whole problem."""
    nodes: int | None
    """Most branchings; None for no limit."""
    clock: Clock
    """Clock that counts the seconds of all limits."""
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Result of one restricted solve."""

    chosen: Ints | None
    """Flat choices that are better than the given best; None when none were found."""
    bound: float
    """Lower bound on the cost, the graph's offset excluded; valid for the whole problem if `proves`."""
    finished: bool
    """True if the restricted problem was solved within the solver's tolerance."""
    exact: bool
    """True if that tolerance is below one unit of cost."""
    proves: bool
    """True if the restricted problem includes every alternative that could lead to a lower cost."""
    entries: int
    """Table entries of the restricted problem after reductions."""
    seconds: float
    """Seconds of the job's clock, the search for the restricted problem included."""
    stopped: bool = False
    """True if the run continues in the background, so that its process should be terminated."""


class PartSolver:
    """The child process, or its successor; all jobs restrict one graph."""

    def __init__(self, graph: Graph, names: list[int], flat: Flat):
        """Prepare a child process for the jobs of `graph`.

        - `names`: node of `graph` for each node of `flat`.
        - `flat`: arrays of the same nodes and edges; slacks and flat choices of jobs follow their order.
        """
        self._sizer = _Sizer(graph, names, flat)
        self._process = SolverProcess(__name__)

    def start(self, job: PartJob) -> None:
        """Begin a job; no other may be running."""
        # Each process has its own copy of the sizer, which learns there.
        self._process.start(_do, self._sizer, job, shared=[Shared("sizer", self._sizer, self._sizer)])

    def done(self) -> bool:
        """Return True if the answer has arrived."""
        return self._process.done()

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for the answer."""
        self._process.wait(seconds)

    def answer(self) -> Answer:
        """Wait for the answer and return it; start a new process if a run still occupies this one."""
        answer: Answer = self._process.answer()
        if answer.stopped:
            self.end()
            self._process = SolverProcess(__name__)
        return answer

    def end(self) -> None:
        """Terminate the process."""
        self._process.end()


class _Sizer:
    """Search for the slack limit that leaves a target number of entries after reductions; learns from earlier cuts."""

    def __init__(self, graph: Graph, names: list[int], flat: Flat):
        """Start without cuts of `graph`: two guesses stand for the first ones.

        - `names`: node of `graph` for each node of `flat`.
        - `flat`: arrays of the same nodes and edges; slacks and flat choices of jobs follow their order.
        """
        self.graph, self.names, self._flat = graph, names, flat
        self._seen: list[tuple[float, float]] = [(1.0, 0.01), (1e6, 1e5)]
        """(entries before reductions, entries after) of earlier cuts; the first two are guesses."""

    def raw(self, slack: np.ndarray, limit: float) -> float:
        """Return the entries of the edge tables before reductions, with alternatives of slack up to `limit`.

        Only edges whose ends both have several such alternatives count.
        """
        kept = np.add.reduceat((slack <= limit).astype(np.float64), self._flat.node_at[:-1])
        first = np.repeat(np.arange(len(kept)), np.diff(self._flat.near_at))
        one, two = kept[first], kept[self._flat.near]
        return float((one * two)[(one > 1) & (two > 1)].sum()) / 2

    def find(self, job: PartJob, until: float) -> Restricted:
        """Return a restricted problem of about `job.entries` entries; one that proves the optimum, if small enough.

        At most six slack limits are tried, and none after `until` by the job's clock. The result is the largest with at
        most 1.4 times the target. Without any it has only the alternatives of `job.best` and those without slack.
        """
        if np.isfinite(job.gap):
            whole = self.raw(job.slack, job.gap)
            if 0.1 * whole <= job.provable:
                small = self._cut(job, job.gap)
                if small.size <= max(job.provable, job.entries):
                    return small
        target = float(job.entries)
        best: Restricted | None = None
        low, high = 0.0, math.inf
        for _ in range(6):
            limit = self._limit(job.slack, self._guess(target), low, high)
            small = self._cut(job, limit)
            self._seen.append((max(self.raw(job.slack, limit), 1.0), max(small.size, 0.01)))
            if small.size <= 1.4 * job.entries:
                low = limit
                if best is None or small.size > best.size:
                    best = small
                if small.size >= 0.4 * job.entries:
                    break
            else:
                high = limit
            if job.clock() > until:
                break
        return best if best is not None else self._cut(job, 0.0)

    def _guess(self, target: float) -> float:
        """Return the entries before reductions that should leave `target`, interpolated in logarithms between earlier
        cuts.

        If no earlier cut left more than `target`, extrapolate from the largest one in proportion, at most tenfold.
        At the start two guesses stand for earlier cuts.
        """
        under = max((pair for pair in self._seen if pair[1] <= target), default=(1.0, 0.01))
        over = min((pair for pair in self._seen if pair[1] > target and pair[0] > under[0]), default=None)
        if over is None:
            return under[0] * min(10.0, target / under[1])
        share = (math.log(target) - math.log(under[1])) / (math.log(over[1]) - math.log(under[1]))
        share = min(max(share, 0.2), 0.8)
        return math.exp(math.log(under[0]) + share * (math.log(over[0]) - math.log(under[0])))

    def _limit(self, slack: np.ndarray, raw: float, low: float, high: float) -> float:
        """Return the slack limit with about `raw` entries before reductions, between `low` and `high`.

        Found by bisection; it stays 10 % of the range away from both ends, or above 1.2 `low` if `high` is infinite.
        """
        top = min(high, float(slack[np.isfinite(slack)].max(initial=0.0)))
        bottom = low
        for _ in range(40):
            middle = (bottom + top) / 2
            if self.raw(slack, middle) > raw:
                top = middle
            else:
                bottom = middle
        # Stay away from both ends, which were tried already.
        if math.isfinite(high):
            bottom = min(max(bottom, low + 0.1 * (high - low)), high - 0.1 * (high - low))
        elif low > 0:
            bottom = max(bottom, 1.2 * low)
        return bottom

    def _cut(self, job: PartJob, limit: float) -> Restricted:
        """Return the graph restricted to alternatives with slack up to `limit` and those of `job.best`, and reduced."""
        return restricted(self.graph, self.names, self._flat, job.slack, limit, job.gap, job.best)


def _do(sizer: _Sizer, job: PartJob, _: Due) -> Answer:
    """Solve one job in the child process: choose the restricted problem, then solve it exactly.

    If the restricted problem has no feasible choices, the answer is finished without choices and with an infinite
    bound.
    """
    graph, names = sizer.graph, sizer.names
    tick = job.clock()
    small = sizer.find(job, tick + 0.3 * job.seconds)
    left = small.graph
    spent = job.clock() - tick
    if left is None:
        return Answer(None, math.inf, True, True, small.proves, 0, spent)
    after = len(graph.undo)
    if not left.costs:
        result = MipResult({}, 0.0, True)
    else:
        start = None
        if job.best is not None:
            full = np.zeros(graph.size, dtype=np.int64)
            full[names] = job.best
            start = left.project(full, after)
        times = graph.times[np.flatnonzero(job.prices > 0)]
        rows = np.unique(np.searchsorted(left.times, times).clip(0, max(len(left.times) - 1, 0))).tolist()
        result = solve_mip(
            left,
            deadline=tick + (job.proof_seconds if small.proves else job.seconds),
            clock=job.clock,
            seed=job.seed,
            cutoff=None if job.cutoff is None else job.cutoff + graph.offset - left.offset,
            times=rows[:60] if len(left.times) else [],
            nodes=job.nodes,
            start=start,
        )
    bound = result.bound + left.offset - graph.offset
    chosen = None
    if result.choices is not None:
        full = left.restore(result.choices, after)
        chosen = full[names]
    return Answer(
        chosen,
        bound,
        result.finished,
        result.exact,
        small.proves,
        small.size,
        job.clock() - tick,
        result.stopped,
    )
