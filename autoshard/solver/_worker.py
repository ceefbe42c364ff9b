"""Exact solves of restricted problems in a process of their own: it can be ended at once, and holds nothing up.

Pickled jobs come in on its stdin, pickled answers go out on its stdout.
"""

import dataclasses
import math
import os
import pickle
import sys
import threading

import numpy as np

from ..base.process import start_python
from ._clock import Clock
from ._flat import Flat
from ._graph import Graph, Ints
from ._mip import solve_mip
from ._restrict import Restricted, restricted


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
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
    """What seconds are counted by."""
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    chosen: Ints | None
    """Flat choices, better than the best given; None when none were found."""
    bound: float
    """With `proves`: no choices cost less (offset of the graph excluded)."""
    finished: bool
    exact: bool
    proves: bool
    entries: int
    seconds: float


class Worker:
    """The process, and the thread that waits for its answer."""

    def __init__(self, graph: Graph, names: list[int], flat: Flat):
        self._process = start_python(__name__)
        self._answer: Answer | None = None
        self._thread: threading.Thread | None = None
        self._first: tuple | None = (graph, names, flat)

    def give(self, job: Job) -> None:
        self._answer = None

        def work() -> None:
            pipe = self._process.stdin
            source = self._process.stdout
            assert pipe is not None and source is not None
            try:
                if self._first is not None:
                    pickle.dump(self._first, pipe, protocol=5)
                    self._first = None
                pickle.dump(job, pipe, protocol=5)
                pipe.flush()
                self._answer = pickle.load(source)
            except (OSError, EOFError, pickle.UnpicklingError):
                self._answer = None

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def answer(self) -> Answer | None:
        """The answer, waited for; None when the process died (out of memory, say)."""
        while not self.done():
            assert self._thread is not None
            self._thread.join(0.1)
        return self._answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._thread is not None:
            self._thread.join(1.0)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


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

    def find(self, job: Job, until: float) -> Restricted:
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

    def _cut(self, job: Job, limit: float) -> Restricted:
        return restricted(self._graph, self._names, self._flat, job.slack, limit, job.gap, job.best)


def _do(sizer: _Sizer, graph: Graph, names: list[int], job: Job) -> Answer:
    tick = job.clock()
    small = sizer.find(job, tick + 0.3 * job.seconds)
    left = small.graph
    spent = job.clock() - tick
    if left is None:
        return Answer(None, math.inf, True, True, small.proves, 0, spent)
    after = len(graph.undo)
    if not left.costs:
        choices, bound, finished, exact = {}, 0.0, True, True
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
            threads=1,
            cutoff=None if job.cutoff is None else job.cutoff + graph.offset - left.offset,
            times=rows[:60] if len(left.times) else [],
            nodes=job.nodes,
            start=start,
        )
        choices, finished, exact = result.choices, result.finished, result.exact
        bound = result.bound + left.offset - graph.offset
    chosen = None
    if choices is not None:
        full = left.restore(choices, after)
        chosen = full[names]
    return Answer(chosen, bound, finished, exact, small.proves, small.size, job.clock() - tick)


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    graph, names, flat = pickle.load(source)
    sizer = _Sizer(graph, names, flat)
    while True:
        try:
            job = pickle.load(source)
        except EOFError:
            return
        answer = _do(sizer, graph, names, job)
        try:
            pickle.dump(answer, sink, protocol=5)
            sink.flush()
        except BrokenPipeError:
            # Nobody waits for it any more; stdout is closed for good, so that leaving does not try to flush it.
            os._exit(0)
