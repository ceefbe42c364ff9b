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
    gap: float
    """Best cost minus bound; infinite when there are no choices yet."""
    best: Ints | None
    """Flat choices that stay included, and from which the solve starts."""
    cutoff: float | None
    entries: int
    """Target number of table entries."""
    provable: int
    """Table entries up to which all alternatives that could be better are included."""
    prices: np.ndarray
    seconds: float
    proof_seconds: float
    """Time limit of a solve that can prove the optimum of the whole problem."""
    nodes: int | None
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
    exact: bool
    proves: bool
    entries: int
    seconds: float
    stopped: bool = False
    """True if the run continues in the background, so that its process should be terminated."""


class PartSolver:
    """The child process, or its successor; all jobs restrict one graph."""

    def __init__(self, graph: Graph, names: list[int], flat: Flat):
        self._sizer = _Sizer(graph, names, flat)
        self._process = SolverProcess(__name__)

    def start(self, job: PartJob) -> None:
        """Begin a job."""
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
        self.graph, self.names, self._flat = graph, names, flat
        self._seen: list[tuple[float, float]] = [(1.0, 0.01), (1e6, 1e5)]
        """(entries before reductions, entries after) of earlier cuts; the first two are guesses."""

    def raw(self, slack: np.ndarray, limit: float) -> float:
        """Return the entries of the edge tables before reductions, for edges whose ends both have several
        alternatives.
        """
        kept = np.add.reduceat((slack <= limit).astype(np.float64), self._flat.node_at[:-1])
        first = np.repeat(np.arange(len(kept)), np.diff(self._flat.near_at))
        one, two = kept[first], kept[self._flat.near]
        return float((one * two)[(one > 1) & (two > 1)].sum()) / 2

    def find(self, job: PartJob, until: float) -> Restricted:
        """Return a restricted problem of about `job.entries` entries; one that proves the optimum, if small enough."""
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
        """
        under = max((pair for pair in self._seen if pair[1] <= target), default=(1.0, 0.01))
        over = min((pair for pair in self._seen if pair[1] > target and pair[0] > under[0]), default=None)
        if over is None:
            return under[0] * min(10.0, target / under[1])
        share = (math.log(target) - math.log(under[1])) / (math.log(over[1]) - math.log(under[1]))
        share = min(max(share, 0.2), 0.8)
        return math.exp(math.log(under[0]) + share * (math.log(over[0]) - math.log(under[0])))

    def _limit(self, slack: np.ndarray, raw: float, low: float, high: float) -> float:
        """Return the slack limit with about `raw` entries before reductions, strictly between `low` and `high`."""
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
        """Restrict the graph to alternatives with slack up to `limit`, and reduce it."""
        return restricted(self.graph, self.names, self._flat, job.slack, limit, job.gap, job.best)


def _do(sizer: _Sizer, job: PartJob, _: Due) -> Answer:
    """Solve one job: choose the restricted problem, then solve it exactly."""
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
