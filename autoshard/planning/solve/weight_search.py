"""Finding the choice with the least true time: a few weightings, every baseline, one certified bound."""

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.base.worker_process import Stopped
from autoshard.base.workers import Crew
from autoshard.planning.price.device_memory import roomy_bytes, tight_seconds
from autoshard.planning.price.evaluate import Outcome, evaluate
from autoshard.planning.solve.mesh_solve import Solved, Terms, first_bound, first_messages, solve_tied, solve_within
from autoshard.planning.solve.problem_builder import Weights, kept_of, least_bytes
from autoshard.planning.solve.repeats import Repeats, find_repeats
from autoshard.planning.solve.time_weights import Weighing, even_weights, normalise
from autoshard.planning.space.baselines import Baseline
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.user_constraints import Required
from autoshard.solver import Messages, Problem, Solution, processor_seconds
from autoshard.solver import evaluate as evaluate_problem


MAX_ROUNDS = 6
BASELINES_SHARE = 0.5
"""Part of the time limit that completing all baselines may take."""
ROOMIER_SHARE = 0.15
"""Part of the time limit that looking for plans below one peak may take, where memory is nearly full."""
TELLING_S = 5e-5
"""Seconds of processor for each op of a program that telling a helper of its model takes: writing and reading it."""
GOOD_ENOUGH = 1e-3
"""Plan gap below which no further weighting is tried."""
ROUGHLY = 1e-2
"""The same for plans that leave memory free: what they save is not known better."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One choice with its true outcome."""

    name: str
    choices: NDArray[np.int64]
    outcome: Outcome
    fits: bool
    tight_s: float = 0.0
    """Seconds that nearly full memory is expected to add, see `tight_seconds`."""
    weights: Weights | None = None
    """The weights under which the candidate was found."""

    @property
    def expected_s(self) -> float:
        return self.outcome.step_time_s + self.tight_s


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The best choice, what bounds it, and every baseline's."""

    best: Candidate
    problem: Problem
    solution: Solution
    """The answer for the weighting whose bound is the certified one."""
    bound_s: float
    """No choice within the memory limit has a shorter true step time."""
    baselines: dict[str, Candidate]
    rounds: int
    weights: Weights
    """The weights that give the certified bound."""
    seen: tuple[Candidate, ...]
    """What every weighting found that fits, the best included."""
    free_s: float = 0.0
    """No choice takes less, whatever fits into memory."""


def search(
    model: Model,
    baselines: list[Baseline],
    limits: Limits,
    progress: Callable[[str], None],
    required: Required | None = None,
    known: NDArray[np.int64] | None = None,
    crew: Crew | None = None,
) -> Found:
    """The best plan within the memory limit that keeps what is `required`.

    Never worse than the best baseline that fits and keeps it too, nor than the choices that are `known`. Baselines
    themselves are completed without it.
    """
    required = required or Required({}, {})
    crew = crew or Crew()
    start = crew.processor_seconds()
    weights: Weights = normalise(even_weights(model))
    repeats = find_repeats(model)
    if repeats is not None:
        progress(f"layers repeat: {len(repeats.nodes)} of {len(model.nodes)} decisions are unlike")
    # Every baseline, and then every weighting, begins with what is found for all alternatives.
    messages = first_messages(repeats or model, weights) if baselines else None
    completing = Completing(model, weights, limits.memory_bytes, limits.seed, messages, repeats)
    named = complete_all(completing, baselines, start + BASELINES_SHARE * limits.seconds, crew)
    fitting = [c for c in named.values() if c.fits and required.holds(c.choices)]
    if known is not None:
        outcome = evaluate(model, known)
        if outcome.peak_bytes <= limits.memory_bytes:
            fitting.append(judged(model, "known", known, outcome, limits.memory_bytes))
    weighing = Weighing(weights)
    for candidate in fitting:
        weighing.add_choice(candidate.outcome)
    climb = Climb(model, weighing, min(fitting, key=_rank, default=None), messages, repeats)
    left = limits.seconds - (crew.processor_seconds() - start)
    climb.run(dataclasses.replace(limits, seconds=left), progress, required)
    if climb.best is None or climb.certified is None:
        raise Infeasible(climb.certified, named)
    if climb.best.tight_s > GOOD_ENOUGH * climb.best.outcome.step_time_s:
        progress("memory is nearly full: looking for plans that need less")
        for target in roomy_bytes(model.mesh.topology):
            roomier = dataclasses.replace(limits.share(ROOMIER_SHARE), memory_bytes=target)
            climb.roomier(roomier, required, fitting)
    best = dataclasses.replace(climb.best, name="plan")
    return Found(
        best=best,
        problem=climb.certified.problem,
        solution=climb.certified.solution,
        bound_s=weighing.bound_s,
        baselines=named,
        rounds=climb.rounds,
        weights=weighing.weights,
        seen=tuple(climb.seen),
        free_s=climb.free_s,
    )


@dataclasses.dataclass(slots=True)
class Climb:
    """The rounds of one search: solve with weights, judge, weigh anew."""

    model: Model
    weighing: Weighing
    best: "Candidate | None" = None
    messages: Messages | None = None
    """Messages of `repeats` to begin the next solve with, if there are any."""
    repeats: Repeats | None = None
    certified: "Solved | None" = None
    """The answer for the weighting with the highest bound."""
    rounds: int = 0
    seen: "list[Candidate]" = dataclasses.field(default_factory=list)
    """What every weighting found that fits."""
    free_s: float = 0.0
    """No choice takes less, whatever fits into memory."""

    def bound_first(self, required: Required, enough_s: float, rounds: int = 1) -> None:
        """Raises the bound of a large model, up to `enough_s`, by what holds whatever fits in memory.

        With more `rounds` that of a small one too, and weights are chosen anew by what choices without a memory limit
        take, as long as the bound rises fast enough to get there. These choices are not kept: within the limit the
        bound may be higher than they allow.
        """
        weights, tried = self.weighing.weights, Weighing(self.weighing.weights)
        for left in range(rounds - 1, -1, -1):
            enough, before_s = enough_s * 1e12, self.weighing.bound_s
            found = first_bound(self.model, self.repeats, weights, required.allowed, enough, small=rounds > 1)
            if found is None:
                return
            bound_s = found.picoseconds * 1e-12
            if bound_s > self.weighing.bound_s:
                self.messages = found.messages
            self.free_s = max(self.free_s, bound_s)
            tried.add_bound(weights, bound_s)
            self.weighing.add_bound(weights, bound_s)
            if bound_s >= enough_s or found.choices is None:
                return
            if before_s > 0 and self.weighing.bound_s + left * (self.weighing.bound_s - before_s) < enough_s:
                return  # it rises too slowly
            tried.add_choice(evaluate(self.model, found.choices))
            following = tried.following(GOOD_ENOUGH * enough_s, enough_s)
            if following is None:
                return
            weights = following

    def roomier(self, limits: Limits, required: Required, known: Sequence[Candidate]) -> None:
        """Takes the best plan within the limits, which leave more room than must be, if it is expected to be faster."""
        beat_s = math.inf if self.best is None else self.best.expected_s
        weights = self.weighing.weights
        found = within_memory(self.model, weights, required, limits, known, beat_s, ROUGHLY, self.repeats)
        if found is not None:
            self.seen.append(found)
            if self.best is None or _rank(found) < _rank(self.best):
                self.best = found

    def run(
        self,
        limits: Limits,
        progress: Callable[[str], None],
        required: Required,
        beat_s: float = math.inf,
        good_enough: float = GOOD_ENOUGH,
        stop: threading.Event | None = None,
    ) -> None:
        """Until the bound meets the best choice within `good_enough`, cannot be raised, or says that none takes less
        than `beat_s`. Raises `Stopped` after `stop` is set."""
        start = processor_seconds()
        weighing = self.weighing
        weights = weighing.following(0.0) or weighing.weights
        room = limits.memory_bytes
        for self.rounds in range(1, MAX_ROUNDS + 1):
            left = limits.seconds - (processor_seconds() - start)
            if self.rounds > 1 and left < 0.1 * limits.seconds:
                return
            hint = self.best.choices if self.best is not None else None
            share = max(2.0, left / (2 if self.rounds == 1 else 3))
            allowed = required.allowed
            enough = beat_s * 1e12 if beat_s > 0 else math.inf  # a program without ops takes no time
            terms = Terms(room, share, limits.seed, hint, allowed, self.messages, True, stop, enough)
            solved = solve_within(self.model, weights, terms, self.repeats)
            if stop is not None and stop.is_set():
                raise Stopped
            self.messages = solved.messages
            self.free_s = max(self.free_s, solved.free * 1e-12)
            lower = solved.solution.lower_bound * 1e-12
            if room == limits.memory_bytes:  # with less room nothing is said of what fits the limit
                if lower > weighing.bound_s or self.certified is None:
                    self.certified = solved
                weighing.add_bound(weights, lower)
            candidate = make_candidate(self.model, f"weighting {self.rounds}", solved, limits.memory_bytes)
            if candidate is None or not required.holds(candidate.choices):
                return
            if not candidate.fits and candidate.outcome.solved_bytes <= room:
                room -= candidate.outcome.peak_bytes - limits.memory_bytes  # for what collectives hold beside it
                continue
            if candidate.fits:
                candidate = dataclasses.replace(candidate, weights=weights)
                self.seen.append(candidate)
                weighing.add_choice(candidate.outcome)
                if self.best is None or _rank(candidate) < _rank(self.best):
                    self.best = candidate
            if self.best is None:
                return
            step = self.best.outcome.step_time_s
            gap = 1.0 - weighing.bound_s / step if step else 0.0  # a program without ops takes no time
            progress(f"weighting {self.rounds}: step {step:.6g} s, plan gap {max(gap, 0):.2%}")
            following = weighing.following(good_enough * step, beat_s)
            if gap <= good_enough or following is None or weighing.bound_s >= beat_s:
                return
            weights = following


def _rank(candidate: Candidate) -> tuple[float, int]:
    """Less expected time is better, and of equal times less memory; differences below a picosecond are rounding."""
    return round(candidate.expected_s, 12), candidate.outcome.peak_bytes


def within_memory(
    model: Model,
    weights: Weights,
    required: Required,
    limits: Limits,
    known: Iterable[Candidate],
    beat_s: float = math.inf,
    good_enough: float = GOOD_ENOUGH,
    repeats: Repeats | None = None,
) -> Candidate | None:
    """The best choice within the limits, from those that are `known`; None if none is found.

    It is looked for until none can take less than `beat_s`, or within `good_enough` of its bound.
    """
    share = limits.memory_bytes / model.mesh.topology.usable_bytes
    kept = [c for c in known if c.outcome.peak_bytes <= limits.memory_bytes and required.holds(c.choices)]
    weighing = Weighing(weights)
    for each in kept:
        weighing.add_choice(each.outcome)
    climb = Climb(model, weighing, min(kept, key=_rank, default=None), repeats=repeats)
    climb.run(limits, lambda line: None, required, beat_s, good_enough)
    return None if climb.best is None else dataclasses.replace(climb.best, name=f"memory {share:.0%}", weights=None)


class Infeasible(Exception):
    """No choice within the memory limit was found; carries the solver's last answer and the completed baselines."""

    def __init__(self, solved: Solved | None, baselines: Mapping[str, Candidate]) -> None:
        super().__init__("no choice within the memory limit")
        self.solved, self.baselines = solved, baselines


@dataclasses.dataclass(frozen=True, slots=True)
class Completing:
    """What it takes to complete baselines."""

    model: Model
    weights: Weights
    memory_limit: int
    seed: int
    messages: Messages | None
    """Messages of `repeats` to begin the first solve with, if there are any."""
    repeats: Repeats | None

    def complete(self, baseline: Baseline, time_limit: float) -> Candidate | None:
        """A baseline with everything it leaves open chosen by the solver, alike in what repeats; within the limit if
        that is possible."""
        free = self._completed(baseline, None, time_limit)
        fits = free is not None and free.fits
        if fits or least_bytes(self.model, kept_of(self.model, baseline.allowed)) > self.memory_limit:
            return free
        limited = self._completed(baseline, self.memory_limit, time_limit)
        if limited is not None and not limited.fits and limited.outcome.solved_bytes <= self.memory_limit:
            room = 2 * self.memory_limit - limited.outcome.peak_bytes  # for what collectives hold beside it
            limited = self._completed(baseline, room, time_limit)
        # A baseline that cannot fit is shown all the same, with what it would take.
        return limited if limited is not None and limited.fits else free

    def _completed(self, baseline: Baseline, limit: int | None, time_limit: float) -> Candidate | None:
        terms = Terms(limit, time_limit, self.seed, None, baseline.allowed, self.messages, free_first=False)
        solved = None if self.repeats is None else solve_tied(self.repeats, self.weights, terms)
        if solved is None:
            alone = terms if self.repeats is None else dataclasses.replace(terms, messages=None)
            solved = solve_within(self.model, self.weights, alone)
        return make_candidate(self.model, baseline.name, solved, self.memory_limit)


def complete_all(
    completing: Completing, baselines: Sequence[Baseline], until: float, crew: Crew
) -> dict[str, Candidate]:
    """Every baseline that can be completed, by its name; with little time each after `until` (of the crew's clock).

    Helpers take part once the first one has shown that the rest takes longer than telling them of the model.
    """

    def arguments(each: Baseline) -> tuple[Baseline, float]:
        return each, max(1.0, until - crew.processor_seconds())

    began = crew.processor_seconds()
    found = [completing.complete(*arguments(each)) for each in baselines[:1]]
    left = (len(baselines) - 1) * (crew.processor_seconds() - began)
    if left > 2 * TELLING_S * len(completing.model.graph.ops):
        crew.share("completing", completing)
        found += crew.map(completing.complete, baselines[1:], arguments)
    else:
        found += [completing.complete(*arguments(each)) for each in baselines[1:]]
    return {each.name: done for each, done in zip(baselines, found, strict=True) if done is not None}


def make_candidate(model: Model, name: str, solved: Solved, memory_limit: int) -> Candidate | None:
    """A solution with its true outcome; None if it is not a choice at all.

    Checks the model against itself: memory by liveness must equal the Problem's, or a `RuntimeError` says so.
    """
    choices = solved.choices
    if len(choices) != len(model.nodes):
        return None
    checked = evaluate_problem(solved.problem, solved.solution.choices)
    try:
        outcome = evaluate(model, choices)
    except ValueError:
        return None
    if checked.peak_usage + model.fixed_bytes != outcome.solved_bytes:
        raise RuntimeError(
            f"memory from specs is {outcome.solved_bytes} bytes but the solved problem says "
            f"{checked.peak_usage + model.fixed_bytes}: the plan cannot be trusted"
        )
    return judged(model, name, choices, outcome, memory_limit)


def judged(model: Model, name: str, choices: NDArray[np.int64], outcome: Outcome, memory_limit: int) -> Candidate:
    """A choice with its true outcome as a candidate."""
    tight = tight_seconds(model.mesh.topology, outcome.peak_bytes, outcome.compute_s, outcome.hidden_s)
    return Candidate(name, choices, outcome, outcome.peak_bytes <= memory_limit, tight)
