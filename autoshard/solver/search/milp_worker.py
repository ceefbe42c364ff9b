"""Exact solves of restricted problems, one after the other, in a process beside the search."""

import dataclasses
import math

import numpy as np

from autoshard.solver.flat_graph import Flat
from autoshard.solver.job_process import Apart, Clock, Due, serve
from autoshard.solver.mip_rows import MipResult, solve_mip
from autoshard.solver.residual_graph import Graph, Ints
from autoshard.solver.search.pruning import Restricted, restricted


@dataclasses.dataclass(frozen=True, slots=True)
class PartJob:
    slack: np.ndarray
    gap: float
    """Best cost above the bound; infinite when there is none."""
    best: Ints | None
    """Flat choices to keep in, and to start from."""
    cutoff: float | None
    entries: int
    """Table entries to aim at."""
    provable: int
    """Table entries up to which everything that could be better is kept."""
    prices: np.ndarray
    seconds: float
    proof_seconds: float
    """What it may take where it proves the optimum of the whole."""
    nodes: int | None
    clock: Clock
    """The clock that counts the seconds of all limits."""
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    chosen: Ints | None
    """Flat choices, better than the best given; None when none were found."""
    bound: float
    """A bound where `proves` says so: no choices cost less, the offset of the graph excluded."""
    finished: bool
    exact: bool
    proves: bool
    entries: int
    seconds: float
    stopped: bool = False
    """The process goes on with it: it should be ended."""


class Worker:
    """The process, or the one after it; its jobs are about parts of one graph."""

    def __init__(self, graph: Graph, names: list[int], flat: Flat):
        self._told = graph, names, flat
        self._begin()

    def start(self, job: PartJob) -> None:
        self._apart.give([*self._first, job])
        self._first = []

    def done(self) -> bool:
        return self._apart.done()

    def wait(self, seconds: float) -> None:
        self._apart.wait(seconds)

    def answer(self) -> Answer:
        """The answer, waited for."""
        answer: Answer = self._apart.answer()
        if answer.stopped:
            self.end()
            self._begin()
        return answer

    def end(self) -> None:
        self._apart.end()

    def _begin(self) -> None:
        self._apart = Apart(__name__)
        self._first: list[object] = [self._told]


class _Sizer:
    """Finds the slack limit that leaves about so many entries after reducing; learns from what it has seen."""

    def __init__(self, graph: Graph, names: list[int], flat: Flat):
        self._graph, self._names, self._flat = graph, names, flat
        self._seen: list[tuple[float, float]] = [(1.0, 0.01), (1e6, 1e5)]
        """(entries before reducing, after) of earlier cuts, with a guess to begin with."""

    def raw(self, slack: np.ndarray, limit: float) -> float:
        """Entries of the edge tables before reducing, of edges whose ends both have a choice."""
        kept = np.add.reduceat((slack <= limit).astype(np.float64), self._flat.node_at[:-1])
        first = np.repeat(np.arange(len(kept)), np.diff(self._flat.near_at))
        one, two = kept[first], kept[self._flat.near]
        return float((one * two)[(one > 1) & (two > 1)].sum()) / 2

    def find(self, job: PartJob, until: float) -> Restricted:
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
        """Entries before reducing that should leave `target`: between the nearest of what was seen, in logarithms."""
        under = max((pair for pair in self._seen if pair[1] <= target), default=(1.0, 0.01))
        over = min((pair for pair in self._seen if pair[1] > target and pair[0] > under[0]), default=None)
        if over is None:
            return under[0] * min(10.0, target / under[1])
        share = (math.log(target) - math.log(under[1])) / (math.log(over[1]) - math.log(under[1]))
        share = min(max(share, 0.2), 0.8)
        return math.exp(math.log(under[0]) + share * (math.log(over[0]) - math.log(under[0])))

    def _limit(self, slack: np.ndarray, raw: float, low: float, high: float) -> float:
        top = min(high, float(slack[np.isfinite(slack)].max(initial=0.0)))
        bottom = low
        for _ in range(40):
            middle = (bottom + top) / 2
            if self.raw(slack, middle) > raw:
                top = middle
            else:
                bottom = middle
        # Away from both ends that were seen already.
        if math.isfinite(high):
            bottom = min(max(bottom, low + 0.1 * (high - low)), high - 0.1 * (high - low))
        elif low > 0:
            bottom = max(bottom, 1.2 * low)
        return bottom

    def _cut(self, job: PartJob, limit: float) -> Restricted:
        return restricted(self._graph, self._names, self._flat, job.slack, limit, job.gap, job.best)


def _do(sizer: _Sizer, graph: Graph, names: list[int], job: PartJob) -> Answer:
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


class _Server:
    def begin(self, first: tuple[Graph, list[int], Flat]) -> None:
        self.graph, self.names, flat = first
        self.sizer = _Sizer(self.graph, self.names, flat)

    def do(self, job: PartJob, _: Due) -> Answer:
        return _do(self.sizer, self.graph, self.names, job)


def main() -> None:
    """The process."""
    server = _Server()
    serve(server.do, server.begin)
