"""Search for the choice with the least true time: a few weightings, every baseline, one certified bound."""

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.base.worker import Stopped
from autoshard.base.workers import WorkerCrew
from autoshard.planning.price.device_memory import lower_memory_targets, tight_seconds
from autoshard.planning.price.evaluate import Outcome, evaluate
from autoshard.planning.price.on_chip_memory import on_chip_room
from autoshard.planning.solve.equal_times import FED, with_least_memory
from autoshard.planning.solve.mesh_solve import Solved, Terms, first_bound, first_messages, solve_tied, solve_within
from autoshard.planning.solve.problem_builder import Weights, kept_of, least_bytes
from autoshard.planning.solve.repeats import Repeats, find_repeats
from autoshard.planning.solve.time_weights import Weighing, carried_weights, compute_weights, even_weights, normalise
from autoshard.planning.space.baselines import Baseline
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.user_constraints import Required
from autoshard.solver import Messages, Problem, Solution, processor_seconds
from autoshard.solver import evaluate as evaluate_problem


STALLED = 2
"""Successive weightings, neither with a better choice nor with a tenth of the plan gap closed, that end a search."""
FAR = 1.05
"""Times the seconds that choices must beat, beyond which the best ones after `TRUSTED` weightings end a search."""
TRUSTED = 2
"""Weightings after which the best choices seldom become 5 % faster."""
MAX_ROUNDS = 6
"""Largest number of weightings that one search solves."""
BASELINES_SHARE = 0.5
"""Share of the time limit that the completion of all baselines may use."""
ROOMIER_SHARE = 0.15
"""Share of the time limit for the search below one lower peak, if memory is nearly full."""
SEND_S = 5e-5
"""Processor seconds for each op of a program to send its model to a helper process: serialise and deserialise."""
GOOD_ENOUGH = 1e-3
"""Plan gap below which no further weighting is tried."""
ROUGHLY = 1e-2
"""Plan gap for plans that leave memory free, whose gain is not known more precisely."""
SOLVED_TO = 0.3
"""Share of a plan gap above `GOOD_ENOUGH` to which each weighting is solved. A closer proof would take most of the time
and change no comparison.
"""
ROUGH_ROUNDS = 4
"""Largest number of rounds of one solve towards such a plan gap; later rounds raise the bound more than they find."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """Choice with its true outcome."""

    name: str
    choices: NDArray[np.int64]
    """Chosen alternative of every node of the model."""
    outcome: Outcome
    """Result of `evaluate` for the choices."""
    fits: bool
    """True if the outcome's peak is within the memory limit."""
    tight_s: float = 0.0
    """Seconds that nearly full memory is expected to add, see `tight_seconds`."""
    weights: Weights | None = None
    """Weights under which the candidate was found; None for baselines and given choices."""

    @property
    def expected_s(self) -> float:
        """Step seconds plus the expected cost of nearly full memory."""
        return self.outcome.step_time_s + self.tight_s


@dataclasses.dataclass(frozen=True, slots=True)
class SearchResult:
    """Best choice, its certified bound, and all completed baselines."""

    best: Candidate
    """Candidate with the least expected time that fits and satisfies the user's demands, named `plan`."""
    problem: Problem
    """Problem of the weighting with the certified bound."""
    solution: Solution
    """Solution of the weighting with the certified bound."""
    bound_s: float
    """Lower bound on the true step time of every choice within the memory limit."""
    baselines: dict[str, Candidate]
    """Completed baselines by name, those that do not fit included."""
    rounds: int
    """Number of weightings that were solved."""
    weights: Weights
    """Weights of the certified bound."""
    fitting: tuple[Candidate, ...]
    """Fitting candidates of all weightings, including the best."""
    unconstrained_bound_s: float = 0.0
    """Lower bound on the step time of every choice without a memory limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Results of another search from which a search starts."""

    choices: NDArray[np.int64] | None = None
    """Choices of the same model, which must satisfy the user's demands; None without any. They are left out if they do
    not fit.
    """
    weights: Weights | None = None
    """First weights, which gave a good bound on a similar model; None without any."""


def search(
    model: Model,
    baselines: list[Baseline],
    limits: Limits,
    progress: Callable[[str], None],
    required: Required | None = None,
    start_from: Start | None = None,
    crew: WorkerCrew | None = None,
) -> SearchResult:
    """Search for the best plan within the memory limit that satisfies `required`.

    The result is never worse than the best baseline that fits and satisfies `required`, nor than the choices of
    `start_from`. Baselines are completed without `required`. Raises `Infeasible` if no choice that fits was found.

    - `limits`: memory limit, time and seed.
    - `progress`: receives lines about the search.
    - `start_from`: results of another search; default: none.
    - `crew`: helper processes; default: none.
    """
    required = required or Required({}, {})
    start_from = start_from or Start()
    known, first_weights = start_from.choices, start_from.weights
    crew = crew or WorkerCrew()
    start = crew.processor_seconds()
    weights: Weights = normalise(even_weights(model))
    repeats = find_repeats(model)
    if repeats is not None:
        progress(f"layers repeat: {len(repeats.nodes)} of {len(model.nodes)} decisions are unlike")
    # Every baseline, and then every weighting, starts from the messages for all alternatives.
    messages = first_messages(repeats or model, weights) if baselines else None
    completing = Completing(model, weights, limits.memory_bytes, limits.seed, messages, repeats)
    completed = complete_all(completing, baselines, start + BASELINES_SHARE * limits.seconds, crew)
    fitting = [c for c in completed.values() if c.fits and required.holds(c.choices)]
    if known is not None:
        outcome = evaluate(model, known)
        if outcome.peak_bytes <= limits.memory_bytes:
            fitting.append(evaluated_candidate(model, "known", known, outcome, limits.memory_bytes))
    if not fitting and least_bytes(model, kept_of(model, required.allowed)) > limits.memory_bytes:
        raise Infeasible(None, completed)  # a bound proves it, without a solve
    weighing = Weighing(weights if first_weights is None else carried_weights(model, first_weights))
    if first_weights is not None and first_weights.keys() == weights.keys():
        weighing.weights = first_weights
    for candidate in fitting:
        weighing.add_choice(candidate.outcome)
    best = min(fitting, key=_rank, default=None)
    state = WeightSearch(model, weighing, best, messages, repeats, first_weights is not None)
    left = limits.seconds - (crew.processor_seconds() - start)
    state.run(dataclasses.replace(limits, seconds=left), progress, required)
    if state.best is None or state.certified is None:
        raise Infeasible(state.certified, completed)
    if state.best.tight_s > GOOD_ENOUGH * state.best.outcome.step_time_s:
        progress("memory is nearly full: looking for plans that need less")
        for target in lower_memory_targets(model):
            roomier = dataclasses.replace(limits.share(ROOMIER_SHARE), memory_bytes=target)
            state.search_within(roomier, required, fitting)
    best = dataclasses.replace(_leaner(model, state.best, required, limits.memory_bytes), name="plan")
    return SearchResult(
        best=best,
        problem=state.certified.problem,
        solution=state.certified.solution,
        bound_s=weighing.bound_s,
        baselines=completed,
        rounds=state.rounds,
        weights=weighing.weights,
        fitting=tuple(state.fitting),
        unconstrained_bound_s=state.unconstrained_bound_s,
    )


def _leaner(model: Model, best: Candidate, required: Required, memory_limit: int) -> Candidate:
    """Return a candidate of the same time that holds least, see `with_least_memory`; `best` if none holds less.

    Batch arguments may cost a share `FED` of the step to be split by their rows.
    """
    for fed_s in (FED * best.outcome.step_time_s, 0.0):
        choices = with_least_memory(model, best.choices, required.allowed, fed_s)
        if (choices == best.choices).all() or not required.holds(choices):
            continue
        leaner = evaluated_candidate(model, best.name, choices, evaluate(model, choices), memory_limit)
        near = leaner.fits and leaner.expected_s <= best.expected_s + 2 * fed_s
        if near and leaner.outcome.peak_bytes <= best.outcome.peak_bytes * (1 + FED) or _rank(leaner) <= _rank(best):
            return dataclasses.replace(leaner, weights=best.weights)
    return best


@dataclasses.dataclass(slots=True)
class WeightSearch:
    """State of one search: repeatedly solve with weights, evaluate the choice, choose new weights."""

    model: Model
    weighing: Weighing
    best: "Candidate | None" = None
    """Best fitting candidate so far; None before one is found."""
    messages: Messages | None = None
    """Messages of `repeats` to start the next solve from, None without any."""
    repeats: Repeats | None = None
    has_weights: bool = False
    """True to solve with the weights of `weighing` first, since they come from another search."""
    certified: "Solved | None" = None
    """Solution of the weighting with the highest bound."""
    rounds: int = 0
    """Number of the last weighting of `run`, from 1; 0 before it."""
    fitting: "list[Candidate]" = dataclasses.field(default_factory=list)
    """Fitting candidates of all weightings, in the order found."""
    unconstrained_bound_s: float = 0.0
    """Lower bound on the step time of every choice without a memory limit."""

    def bound_first(self, required: Required, enough_s: float, rounds: int = 1) -> None:
        """Raise the bound of a large model, up to `enough_s`, without a memory limit and without a solve.

        With several `rounds`, small models are bounded too. New weights are then chosen from the choices found without
        a memory limit, as long as the bound rises fast enough to reach `enough_s`. These choices are not stored, since
        within the limit the bound may be higher than they allow. The results are `weighing`, `messages` and
        `unconstrained_bound_s`.
        """
        weights, unlimited = self.weighing.weights, Weighing(self.weighing.weights)
        for left in range(rounds - 1, -1, -1):
            enough, before_s = enough_s * 1e12, self.weighing.bound_s
            first = first_bound(self.model, self.repeats, weights, required.allowed, enough, small=rounds > 1)
            if first is None:
                return
            bound_s = first.picoseconds * 1e-12
            if bound_s > self.weighing.bound_s:
                self.messages = first.messages
            self.unconstrained_bound_s = max(self.unconstrained_bound_s, bound_s)
            unlimited.add_bound(weights, bound_s)
            self.weighing.add_bound(weights, bound_s)
            if bound_s >= enough_s:
                return
            if first.choices is None:
                # Weights of another recipe may fit none of this program's blocks.
                weights = compute_weights(self.model)
                if weights in unlimited.tried:
                    return
                continue
            if before_s > 0 and self.weighing.bound_s + left * (self.weighing.bound_s - before_s) < enough_s:
                return  # the bound rises too slowly
            unlimited.add_choice(evaluate(self.model, first.choices))
            following = unlimited.following(GOOD_ENOUGH * enough_s, enough_s)
            if following is None:
                return
            weights = following

    def search_within(self, limits: Limits, required: Required, known: Sequence[Candidate]) -> None:
        """Replace the best plan by one within tighter limits if that plan is expected to be faster.

        `known` are candidates to start from. The search ends within the plan gap `ROUGHLY`. A plan that is found joins
        `fitting`, faster or not.
        """
        beat_s = math.inf if self.best is None else self.best.expected_s
        weights = self.weighing.weights
        candidate = within_memory(self.model, weights, required, limits, known, beat_s, ROUGHLY, self.repeats)
        if candidate is not None:
            self.fitting.append(candidate)
            if self.best is None or _rank(candidate) < _rank(self.best):
                self.best = candidate

    def run(
        self,
        limits: Limits,
        progress: Callable[[str], None],
        required: Required,
        beat_s: float = math.inf,
        good_enough: float = GOOD_ENOUGH,
        stop: threading.Event | None = None,
    ) -> None:
        """Solve with new weights until the bound is near the best choice, cannot be raised, or reaches `beat_s`.

        The time, `MAX_ROUNDS`, `STALLED` rounds in a row, and a solve without acceptable choices also end the rounds.
        So do choices that are far behind `beat_s` after `TRUSTED` rounds (`FAR`).
        Results are in the fields. Raises `Stopped` after `stop` is set.

        - `limits`: memory limit, time and seed.
        - `progress`: receives a line for each weighting.
        - `required`: the user's demands on the model.
        - `beat_s`: step seconds from which on choices are useless.
        - `good_enough`: plan gap that counts as near.
        """
        start = processor_seconds()
        rough = good_enough > GOOD_ENOUGH
        weighing = self.weighing
        weights = (None if self.has_weights else weighing.following(0.0)) or weighing.weights
        # The solver counts buffers in on-chip memory too.
        most = room = limits.memory_bytes + on_chip_room(self.model.mesh.topology, limits.memory_bytes)
        stalled = 0
        for self.rounds in range(1, MAX_ROUNDS + 1):
            left = limits.seconds - (processor_seconds() - start)
            if self.rounds > 1 and left < 0.1 * limits.seconds:
                return
            if self.rounds > TRUSTED and self.best is not None and self.best.expected_s > FAR * beat_s:
                return
            before, before_s = self.best, weighing.bound_s
            hint = self.best.choices if self.best is not None else None
            share = max(2.0, left / (2 if self.rounds == 1 else 3))
            allowed = required.allowed
            # A program without ops takes no time. A picosecond more than the least integer outweighs rounding.
            enough = math.ceil(beat_s * 1e12) + 1 if 0 < beat_s < math.inf else math.inf
            terms = Terms(room, share, limits.seed, hint, allowed, self.messages, True, stop, enough)
            if rough:
                terms = dataclasses.replace(terms, rounds=ROUGH_ROUNDS, gap=SOLVED_TO * good_enough)
            solved = solve_within(self.model, weights, terms, self.repeats)
            if stop is not None and stop.is_set():
                raise Stopped
            self.messages = solved.messages
            self.unconstrained_bound_s = max(self.unconstrained_bound_s, solved.unconstrained_bound * 1e-12)
            lower_s = solved.solution.lower_bound * 1e-12
            if room == most:  # a bound under less memory does not hold for the limit
                if lower_s > weighing.bound_s or self.certified is None:
                    self.certified = solved
                weighing.add_bound(weights, lower_s)
            candidate = make_candidate(self.model, f"weighting {self.rounds}", solved, limits.memory_bytes)
            if candidate is None or not required.holds(candidate.choices):
                return
            if not candidate.fits and candidate.outcome.solved_bytes <= room:
                room = _less_room(room, candidate.outcome, limits.memory_bytes)
                continue
            if candidate.fits:
                candidate = dataclasses.replace(candidate, weights=weights)
                self.fitting.append(candidate)
                weighing.add_choice(candidate.outcome)
                if self.best is None or _rank(candidate) < _rank(self.best):
                    self.best = candidate
            if self.best is None:
                return
            step = self.best.outcome.step_time_s
            gap = 1.0 - weighing.bound_s / step if step else 0.0  # a program without ops takes no time
            progress(f"weighting {self.rounds}: step {step:.6g} s, plan gap {max(gap, 0):.2%}")
            following = weighing.following(good_enough * step, beat_s)
            # Later rounds have no more room than this one, so its bound holds for what they can find.
            if gap <= good_enough or following is None or max(weighing.bound_s, lower_s) >= beat_s:
                return
            raised = weighing.bound_s - before_s > 0.1 * (step - before_s)
            stalled = 0 if raised or self.best is not before else stalled + 1
            if stalled == STALLED:
                return
            weights = following


def _less_room(room: int, outcome: Outcome, memory_limit: int) -> int:
    """Return a smaller limit for the solver, after the choices that it found within `room` bytes did not fit.

    They lack room for buffers of collectives, which the solver does not count, or fewer buffers stay on the chip than
    its limit allowed for.
    """
    on_chip = max(0, outcome.solved_bytes - outcome.peak_bytes)
    return min(room - (outcome.peak_bytes - memory_limit), memory_limit + on_chip)


def _rank(candidate: Candidate) -> tuple[float, int]:
    """Return a sort key: least expected time first, then least memory; times are rounded to picoseconds."""
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
    """Return the best choice within the limits, named by its memory, such as `memory 50%`; None if none is found.

    The search ends once no choice can take less than `beat_s`, or within `good_enough` of the bound.

    - `weights`: weights to start from.
    - `required`: the user's demands on the model.
    - `known`: candidates to start from; those that do not fit or break demands are left out.
    - `repeats`: shared decisions of repeated layers.
    """
    share = limits.memory_bytes / model.mesh.topology.usable_bytes
    fitting = [c for c in known if c.outcome.peak_bytes <= limits.memory_bytes and required.holds(c.choices)]
    weighing = Weighing(weights)
    for each in fitting:
        weighing.add_choice(each.outcome)
    state = WeightSearch(model, weighing, min(fitting, key=_rank, default=None), repeats=repeats)
    state.run(limits, lambda line: None, required, beat_s, good_enough)
    return None if state.best is None else dataclasses.replace(state.best, name=f"memory {share:.0%}", weights=None)


class Infeasible(Exception):
    """Failure to find a choice within the memory limit, with the last solution and the completed baselines."""

    def __init__(self, solved: Solved | None, baselines: Mapping[str, Candidate]) -> None:
        """Store the solution with the highest bound (None without any) and the completed baselines by name."""
        super().__init__("no choice within the memory limit")
        self.solved, self.baselines = solved, baselines


@dataclasses.dataclass(frozen=True, slots=True)
class Completing:
    """Inputs for the completion of baselines."""

    model: Model
    weights: Weights
    """Weights of the objective, the same for all baselines."""
    memory_limit: int
    """Bytes of one device that a candidate may use."""
    seed: int
    """Seed of the solver's random search."""
    messages: Messages | None
    """Messages of `repeats` to start the first solve from, None without any."""
    repeats: Repeats | None

    def complete(self, baseline: Baseline, time_limit: float) -> Candidate | None:
        """Complete a baseline, within the memory limit if possible: the solver makes all open decisions.

        Repeated layers share their decisions. If no choices that fit are found, the result is that without the limit.
        None if it has no solution. `time_limit` is the processor seconds of each of up to three solves.
        """
        free = self._completed(baseline, None, time_limit)
        fits = free is not None and free.fits
        if fits or least_bytes(self.model, kept_of(self.model, baseline.allowed)) > self.memory_limit:
            return free
        room = self.memory_limit + on_chip_room(self.model.mesh.topology, self.memory_limit)
        limited = self._completed(baseline, room, time_limit)
        if limited is not None and not limited.fits and limited.outcome.solved_bytes <= room:
            limited = self._completed(baseline, _less_room(room, limited.outcome, self.memory_limit), time_limit)
        # A baseline that does not fit is still shown, with the memory that it needs.
        return limited if limited is not None and limited.fits else free

    def _completed(self, baseline: Baseline, limit: int | None, time_limit: float) -> Candidate | None:
        """Complete a baseline under the memory limit `limit` of one device, None for no limit; None if unsolved.

        Without repeats, or if these cannot share the baseline's masks, the whole model is solved.
        """
        terms = Terms(limit, time_limit, self.seed, None, baseline.allowed, self.messages, False, nearest=False)
        solved = None if self.repeats is None else solve_tied(self.repeats, self.weights, terms)
        if solved is None:
            alone = terms if self.repeats is None else dataclasses.replace(terms, messages=None)
            solved = solve_within(self.model, self.weights, alone)
        return make_candidate(self.model, baseline.name, solved, self.memory_limit)


def complete_all(
    completing: Completing, baselines: Sequence[Baseline], until: float, crew: WorkerCrew
) -> dict[str, Candidate]:
    """Complete all baselines; return those with a solution by name, in the order of `baselines`.

    After `until` (on the crew's clock) each baseline has one second. Helper processes join if the first baseline shows
    that the rest takes longer than sending them the model.
    """

    def arguments(each: Baseline) -> tuple[Baseline, float]:
        """Return the arguments of `Completing.complete`: the baseline, and the seconds until `until`, at least 1."""
        return each, max(1.0, until - crew.processor_seconds())

    began = crew.processor_seconds()
    completed = [completing.complete(*arguments(each)) for each in baselines[:1]]
    left = (len(baselines) - 1) * (crew.processor_seconds() - began)
    if left > 2 * SEND_S * len(completing.model.graph.ops):
        crew.share("completing", completing)
        completed += crew.map(completing.complete, baselines[1:], arguments)
    else:
        completed += [completing.complete(*arguments(each)) for each in baselines[1:]]
    return {each.name: candidate for each, candidate in zip(baselines, completed, strict=True) if candidate is not None}


def make_candidate(model: Model, name: str, solved: Solved, memory_limit: int) -> Candidate | None:
    """Evaluate a solution as a candidate, fitting or not; None if it has no choices or a forbidden pair.

    `memory_limit` is the bytes of one device that decide if it fits. Raises `RuntimeError` if the memory by liveness
    differs from that of the Problem: the model would be inconsistent.
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
    return evaluated_candidate(model, name, choices, outcome, memory_limit)


def evaluated_candidate(
    model: Model, name: str, choices: NDArray[np.int64], outcome: Outcome, memory_limit: int
) -> Candidate:
    """Return a choice with its true outcome as a candidate, without weights; it fits if its peak is within the limit.

    - `outcome`: evaluation of the choices.
    - `memory_limit`: bytes of one device.
    """
    tight = tight_seconds(model, outcome.peak_bytes, outcome.compute_s, outcome.hidden_s)
    return Candidate(name, choices, outcome, outcome.peak_bytes <= memory_limit, tight)
