"""Search on the reduced graph: a lower bound, a local search and restricted exact solves run in parallel."""

from collections.abc import Callable

import numpy as np

from autoshard.base.on_thread import OnThread
from autoshard.solver.clocks import Clock
from autoshard.solver.flat_graph import flatten
from autoshard.solver.residual_graph import Graph, Ints
from autoshard.solver.search.local_search import LocalSearch, Stage, make_stage
from autoshard.solver.search.message_passing import Dual
from autoshard.solver.search.milp_worker import Answer, PartJob, PartSolver


_ENTRIES = 40_000
"""Table entries of the first restricted solve; later solves grow while they finish early."""
_TURN_S = 0.5
"""Seconds of one turn of local search, or of one ascent of the bound, without an iteration limit."""
_TURNS = 4
"""Turns of local search during one restricted solve, with an iteration limit; more of them seldom find better choices
than the solve does.
"""
_PROVABLE = 150_000
"""Table entries up to which a restricted solve that can prove the optimum is tried without further pruning."""


class Engine:
    """One search on `graph`, until `deadline` by `clock`.

    - `seed`: seed of all random choices.
    - `threads`: 1 to alternate between climbing and other work, 2 or more to do both at the same time.
    - `iterations`: rounds after which the search ends, with work counted instead of timed; None for no such limit.
    - `found`: called with better choices of `graph` that fit in memory, node -> alternative.
    - `bounded`: called with a lower bound, offset excluded, which need not be better than earlier ones.
    - `stopped`: returns True when the search must end.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        deadline: float,
        clock: Clock,
        seed: int,
        threads: int,
        iterations: int | None,
        found: Callable[[dict[int, int]], None],
        bounded: Callable[[float], None],
        stopped: Callable[[], bool],
    ):
        self.graph = graph
        self.names, self.flat = flatten(graph)
        self.clock = clock
        self.began, self.deadline = clock(), deadline
        self.seed, self.threads, self.iterations = seed, threads, iterations
        self.found, self.bounded, self.stopped = found, bounded, stopped
        self.random = np.random.default_rng(seed)
        self.dual = Dual(self.flat)
        self.climber = LocalSearch(self.flat, seed)
        self.cost = np.inf
        """Cost of `best`, offset excluded."""
        self.best: Ints | None = None
        """Best flat choices reported so far."""
        self.entries = _ENTRIES if iterations is None else 4_000
        """Table entries of the next restricted solve."""
        self.rounds = 0
        """Rounds so far: turns of the bound, and restricted solves."""
        self.sweep_s = 0.0
        """Seconds of one round of the bound."""
        self.unproven_s = 0.0
        """Seconds of the last solve that could have proven the optimum but did not end."""
        self.stage: Stage | None = None
        """The present stage; None to climb on the whole graph."""
        self.stages = 0
        self.stage_end = 0.0
        """Clock, or number of turns with an iteration limit, at which the next stage begins."""
        self.turns = 0
        self.solves: list[tuple] = []
        """(entries, seconds, finished, could prove the optimum) of each restricted solve."""

    def run(self, start: dict[int, int] | None) -> bool:
        """Search until proven (return True), or until stopped or out of time or rounds (return False).

        The search starts from the choices `start`, node -> alternative, if given. First the bound rises during a climb,
        then restricted exact solves run during climbs.
        """
        if start is not None:
            self.climber.start(np.array([start[name] for name in self.names], dtype=np.int64))
            self._take()
        self._bound_phase()
        worker = PartSolver(self.graph, self.names, self.flat)
        try:
            while not self._over():
                if self._exact_round(worker):
                    return True
        finally:
            worker.end()
        return False

    def choices(self) -> dict[int, int]:
        """Return the current choices, feasible or not."""
        return dict(zip(self.names, self.climber.chosen.tolist(), strict=True))

    def _over(self) -> bool:
        """Return True if time or rounds are used up."""
        return self._late() or (self.iterations is not None and self.rounds >= self.iterations)

    def _late(self) -> bool:
        """Return True if the search was stopped or its time is up."""
        return self.stopped() or self.clock() >= self.deadline

    def _take(self) -> None:
        """Report the climber's best choices if they are better than `best`, and the bound if it is finite."""
        if self.climber.cost < self.cost:
            self.cost, self.best = self.climber.cost, self.climber.best.copy()
            self.found(dict(zip(self.names, self.best.tolist(), strict=True)))
        if np.isfinite(self.dual.bound):
            self.bounded(self.dual.bound)

    def _bound_phase(self) -> None:
        """Raise the bound on one thread while the other climbs from choices decoded by the bound's sweeps.

        The phase ends after half of the iterations. Without an iteration limit it ends after 30 % of the time, or once
        the prices' steps are small.
        """
        span = self.deadline - self.began
        sweeps = 4
        latest = self.dual.ascend(2, np.inf, 0.0)
        origin = -np.inf
        while not self._over():
            if self.iterations is not None:
                if self.rounds >= max(1, self.iterations // 2):
                    break
            elif self.clock() - self.began > 0.3 * span or self.dual.pace < 0.02:
                break
            self.rounds += 1
            if self.dual.bound - origin > 0.03 * abs(self.dual.bound):
                # A much better bound decodes to much better choices: restart from these.
                origin = self.dual.bound
                self._restart(latest)
            target = self.cost if np.isfinite(self.cost) else self.climber.merit
            task = OnThread(lambda t=target, n=sweeps: self.dual.ascend(n, t, self.climber.penalty))
            if self.threads == 1:
                task.result()
            prices = self.dual.prices.copy()
            self._climb(self.climber, prices)
            latest = task.result()
            self.sweep_s = task.seconds / sweeps
            self._take()
            if self.iterations is None:
                turn = min(_TURN_S, max(self.deadline - self.clock(), 0.0))
                sweeps = int(np.clip(turn / max(self.sweep_s, 1e-4), 1, 4 * sweeps))

    def _restart(self, chosen: Ints) -> None:
        """Restart the climber from `chosen`, with a penalty of at least three times the highest memory price."""
        self.climber.penalty = max(self.climber.penalty, 3 * float(self.dual.prices.max(initial=0.0)))
        self.climber.start(chosen)

    def _climb(self, climber: LocalSearch, prices: np.ndarray, slack: float = 0.0) -> None:
        """Run one turn of local search: one chunk with an iteration limit, else `_TURN_S` seconds.

        `prices` are memory prices [times of the climber's graph], `slack` is that of `LocalSearch.run`.
        """
        if self.iterations is not None:
            climber.run(prices, 1, slack)
            return
        until = self.clock() + _TURN_S
        climber.run_until(lambda: self.clock() >= until or self._over(), prices, slack)

    def _turn(self) -> None:
        """Climb for one turn on the current stage; start the next stage when its time has passed.

        Improvements on a stage restart the climber on the whole graph. Better choices are reported.
        """
        now = self.turns if self.iterations is not None else self.clock()
        if now >= self.stage_end:
            self._begin_stage()
            length = 5.0 if self.iterations is not None else max(3.0, 0.07 * (self.deadline - self.began))
            self.stage_end = (self.turns if self.iterations is not None else self.clock()) + length
        self.turns += 1
        if self.stage is None:
            loose = 2e-4 * abs(self.cost) if self.turns % 4 == 3 and np.isfinite(self.cost) else 0.0
            self._climb(self.climber, self.dual.prices, loose)
            self._take()
            return
        climber = self.stage.climber
        before = climber.cost
        self._climb(climber, self.stage.prices)
        if climber.cost < before and climber.cost + self.stage.offset < self.cost:
            self.climber.start(self.stage.whole(climber.best))
        self._take()

    def _begin_stage(self) -> None:
        """Begin a new stage: another start, and alternatives restricted to a share of the cheapest by slack.

        The shares rotate through 60 %, 75 %, 45 % and all alternatives. It starts from the best choices. Without any,
        and in every other of the first stages, it starts from choices that the bound decodes.
        """
        share = (0.6, 0.75, 0.45, 1.0)[self.stages % 4]
        early = self.stages < 6
        start = self.best
        if start is None or (early and self.stages % 2 == 1):
            left = 1e9 if self.iterations is not None else self.deadline - self.clock()
            rounds = int(np.clip(left / max(self.sweep_s, 1e-4), 1, 6))
            start = self.dual.ascend(rounds, self.cost, self.climber.penalty)
        self.stages += 1
        self.stage = None
        if share < 1.0:
            slack = self.dual.slack()
            limit = float(np.quantile(slack, share))
            seed = int(self.random.integers(2**31))
            self.stage = make_stage(
                self.graph, self.names, self.flat, slack, limit, start, self.dual.prices, seed, self._late
            )
        if self.stage is None:
            self.climber.start(start)
        else:
            self.stage.climber.penalty = self.climber.penalty

    def _exact_round(self, worker: PartSolver) -> bool:
        """Run a restricted exact solve in another process during a climb; return True if it proves the optimum.

        Its choices and bound are reported. False too if time is up before the answer.
        """
        self.rounds += 1
        slack = self.dual.slack()
        if len(self.solves) % 3 == 2:
            # Diversify every third solve: noise on the slack includes other expensive alternatives.
            slack = slack * np.exp(self.random.normal(0.0, 1.0, len(slack)))
        left = self.deadline - self.clock()
        # Retry an interrupted proof only with more time than its last run used, and then with all remaining time.
        proving = len(self.solves) % 3 != 2 and (self.iterations is not None or left > self.unproven_s)
        job = PartJob(
            slack=slack,
            gap=self.cost - self.dual.bound,
            best=None if self.best is None else self.best.copy(),
            cutoff=None if self.best is None else self.cost,
            entries=self.entries,
            provable=0 if not proving else _PROVABLE if self.iterations is None else 2_000,
            prices=self.dual.prices,
            seconds=left if self.iterations is not None else min(left, max(10.0, 0.35 * left)),
            proof_seconds=left if self.iterations is not None or self.unproven_s else min(left, max(10.0, 0.6 * left)),
            nodes=None if self.iterations is None else 10,
            clock=self.clock,
            seed=self.seed,
        )
        if self.threads == 1:
            # With one thread climb first, then solve; the turns may use up the remaining time.
            for _ in range(10 if self.iterations is None else _TURNS):
                if self._over():
                    return False
                self._turn()
        worker.start(job)
        turns = 0
        while not worker.done() if self.iterations is None else turns < _TURNS:
            if self.iterations is None and self._over():
                return False
            if self.threads == 1:
                worker.wait(0.1)
            else:
                self._turn()
            turns += 1
        answer: Answer = worker.answer()
        self.solves.append((answer.entries, round(answer.seconds, 1), answer.finished, answer.proves))
        if answer.chosen is not None:
            self.climber.start(answer.chosen)
            self._take()
        if answer.proves and np.isfinite(job.gap):
            if answer.finished and answer.exact:
                return True
            self.unproven_s = answer.seconds
            self.bounded(min(answer.bound, self.cost))
        self._adapt(answer)
        return False

    def _adapt(self, answer: Answer) -> None:
        """Change the size of the next restricted solve according to the time of the last one.

        It halves after an unfinished solve, doubles after one in below 10 % of the time left, and grows by 30 % below
        25 %.
        """
        left = max(self.deadline - self.clock(), 1.0)
        if not answer.finished:
            self.entries = max(2_000, int(min(self.entries, max(answer.entries, 4_000)) * 0.5))
        elif self.iterations is not None or answer.seconds < 0.1 * left:
            self.entries = int(self.entries * 2)
        elif answer.seconds < 0.25 * left:
            self.entries = int(self.entries * 1.3)
