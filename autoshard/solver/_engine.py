"""Searching what is left after the reductions: a bound, a local search and restricted exact solves side by side."""

import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from ._climb import Climber
from ._dual import Dual
from ._flat import flatten
from ._graph import Graph, Ints
from ._worker import Answer, Job, Worker


_ENTRIES = 40_000
"""Table entries of the first restricted solve; later ones grow while they finish early."""
_PROVABLE = 150_000
"""Table entries up to which a restricted solve that can prove the optimum is tried as it is."""


class Engine:
    """One search. `found` is called with choices of `graph`, `bounded` with a lower bound (offset excluded)."""

    def __init__(
        self,
        graph: Graph,
        *,
        deadline: float,
        seed: int,
        iterations: int | None,
        found: Callable[[dict[int, int]], None],
        bounded: Callable[[float], None],
        stopped: Callable[[], bool],
    ):
        self.graph = graph
        self.names, self.flat = flatten(graph)
        self.began, self.deadline = time.monotonic(), deadline
        self.seed, self.iterations = seed, iterations
        self.found, self.bounded, self.stopped = found, bounded, stopped
        self.random = np.random.default_rng(seed)
        self.dual = Dual(self.flat)
        self.climber = Climber(self.flat, seed)
        self.cost = np.inf
        self.best: Ints | None = None
        self.entries = _ENTRIES
        self.rounds = 0
        self.solves: list[tuple] = []

    def run(self, start: Ints | None) -> bool:
        """Searches until proven (True), or out of time or rounds, or stopped (False), from flat choices if given."""
        if start is not None:
            self.climber.start(start)
            self._take()
        self._bound_phase()
        worker = Worker(self.graph, self.names, self.flat)
        try:
            while not self._over():
                if self._exact_round(worker):
                    return True
        finally:
            worker.end()
        return False

    def _over(self) -> bool:
        if self.stopped():
            return True
        if self.iterations is not None:
            return self.rounds >= self.iterations
        return time.monotonic() > self.deadline - 0.05

    def _take(self) -> None:
        """Reports the climber's best and the bound."""
        if self.climber.cost < self.cost:
            self.cost, self.best = self.climber.cost, self.climber.best.copy()
            self.found(dict(zip(self.names, self.best.tolist(), strict=True)))
        if np.isfinite(self.dual.bound):
            self.bounded(self.dual.bound)

    def _bound_phase(self) -> None:
        """Raises the bound on one thread while the other climbs from what the bound's sweeps decode."""
        span = self.deadline - self.began
        sweeps, chunks = 4, 2
        epoch = 0
        latest = self.dual.ascend(2, 1.0, 0.0)
        while not self._over():
            if self.iterations is not None:
                if self.rounds >= max(1, self.iterations // 2):
                    break
            elif time.monotonic() - self.began > 0.3 * span or self.dual.pace < 0.02:
                break
            self.rounds += 1
            if epoch == 0:
                self.climber.penalty = max(self.climber.penalty, 3 * float(self.dual.prices.max(initial=0.0)))
                self.climber.start(latest)
            epoch = (epoch + 1) % 6
            target = self.cost if np.isfinite(self.cost) else self.climber.merit
            task = _Task(lambda t=target, n=sweeps: self.dual.ascend(n, t, self.climber.penalty))
            tick = time.monotonic()
            self.climber.run(self.dual.prices.copy(), chunks)
            climbed = time.monotonic() - tick
            latest = task.result()
            swept = task.seconds
            self._take()
            if self.iterations is None:
                sweeps = int(np.clip(sweeps * 0.5 / max(swept, 1e-3), 1, 4 * sweeps))
                chunks = int(np.clip(chunks * 0.5 / max(climbed, 1e-3), 1, 4 * chunks))
        self.chunks = chunks
        if self.best is not None:
            self.climber.start(self.best)

    def _exact_round(self, worker: Worker) -> bool:
        """A restricted exact solve in another process while this one climbs; True when that proves the optimum."""
        self.rounds += 1
        slack = self.dual.slack()
        if len(self.solves) % 3 == 2:
            # Something else now and then: which of the dearer alternatives come along is left to chance.
            slack = slack * np.exp(self.random.normal(0.0, 1.0, len(slack)))
        left = self.deadline - time.monotonic()
        job = Job(
            slack=slack,
            gap=self.cost - self.dual.bound,
            best=None if self.best is None else self.best.copy(),
            cutoff=None if self.best is None else self.cost,
            entries=self.entries,
            provable=_PROVABLE if len(self.solves) % 3 != 2 else 0,
            prices=self.dual.prices,
            seconds=1e9 if self.iterations is not None else min(left, max(10.0, 0.35 * left)),
            nodes=None if self.iterations is None else 200,
            seed=self.seed,
        )
        worker.give(job)
        turns = 0
        while not worker.done() if self.iterations is None else turns < 10:
            if self.iterations is None and self._over():
                return False
            if turns % 16 == 0 and self.best is not None:
                self.climber.start(self.best)
            slack_share = (0.0, 0.0, 1e-4, 5e-4)[turns // 4 % 4]
            self.climber.run(
                self.dual.prices, self.chunks, slack=slack_share * abs(self.cost) if np.isfinite(self.cost) else 0.0
            )
            turns += 1
            self._take()
        answer = worker.answer()
        if answer is None:
            raise RuntimeError("the process for exact solves ended unexpectedly")
        self.solves.append((answer.entries, round(answer.seconds, 1), answer.finished, answer.proves))
        if answer.chosen is not None:
            self.climber.start(answer.chosen)
            self._take()
        if answer.proves and np.isfinite(job.gap):
            if answer.finished:
                return True
            self.bounded(min(answer.bound, self.cost))
        self._adapt(answer)
        return False

    def _adapt(self, answer: Answer) -> None:
        left = max(self.deadline - time.monotonic(), 1.0)
        if not answer.finished:
            self.entries = max(2_000, int(min(self.entries, max(answer.entries, 4_000)) * 0.5))
        elif self.iterations is not None or answer.seconds < 0.1 * left:
            self.entries = int(self.entries * 2)
        elif answer.seconds < 0.25 * left:
            self.entries = int(self.entries * 1.3)


class _Task:
    """A call on a thread of its own, which never keeps the process alive."""

    def __init__(self, call: Callable[[], object]):
        self._answer: queue.Queue = queue.Queue()
        self._outcome: tuple | None = None
        self.seconds = 0.0

        def work() -> None:
            tick = time.monotonic()
            try:
                value = (call(), None)
            except BaseException as error:  # handed to whoever asks for the result
                value = (None, error)
            self.seconds = time.monotonic() - tick
            self._answer.put(value)

        threading.Thread(target=work, daemon=True).start()

    def done(self) -> bool:
        return self._outcome is not None or not self._answer.empty()

    def result(self):
        while self._outcome is None:
            try:
                # Short waits, so that signals are handled.
                self._outcome = self._answer.get(timeout=0.2)
            except queue.Empty:
                continue
        value, error = self._outcome
        if error is not None:
            raise error
        return value
