"""Finding the choice with the least true time: a few weightings, every baseline, one certified bound."""

import dataclasses
import time as clock
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.plan._asked import Required
from autoshard.plan._baselines import Baseline
from autoshard.plan._build import Allowed, Weights, build_problem
from autoshard.plan._model import EXPOSED, Channel, Model
from autoshard.plan._predict import Outcome, evaluate
from autoshard.solver import Problem, Solution, solve
from autoshard.solver import evaluate as evaluate_problem


MAX_ROUNDS = 6
BASELINES_SHARE = 0.3
"""Part of the time limit that completing all baselines may take."""
GOOD_ENOUGH = 1e-3
"""Plan gap below which no further weighting is tried."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One choice with its true outcome."""

    name: str
    choices: NDArray[np.int64]
    outcome: Outcome
    fits: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The best choice, what bounds it, and every baseline's."""

    best: Candidate
    problem: Problem
    solution: Solution
    """Of the weighting whose bound is the certified one."""
    bound_s: float
    """No choice within the memory limit has a shorter true step time."""
    baselines: dict[str, Candidate]
    rounds: int


def even_weights(model: Model) -> dict[Channel, float]:
    """The start: half of every block's weight on compute, the rest shared by its links."""
    return {c: (0.5 if c[1] == "compute" else 0.5) / n for c, n in _channel_counts(model).items()}


def _channels(model: Model) -> list[Channel]:
    found = {c for node in model.nodes for c in node.time} | {c for move in model.moves for c in move.costs}
    return sorted(found - {EXPOSED})


def _channel_counts(model: Model) -> dict[Channel, int]:
    """For every channel the number by which an even share of its half is divided."""
    channels = _channels(model)
    counts = {}
    for block, what in channels:
        peers = [c for c in channels if c[0] == block]
        counts[(block, what)] = 1 if what == "compute" else max(1, len(peers) - 1)
    return counts


def normalise(model: Model, weights: Mapping[Channel, float]) -> dict[Channel, float]:
    """The same with every block's weights summing to one, as the bound needs."""
    totals: dict[int, float] = {}
    for (block, _), w in weights.items():
        totals[block] = totals.get(block, 0.0) + w
    return {c: w / totals[c[0]] for c, w in weights.items() if totals[c[0]] > 0}


def next_weights(model: Model, weights: Mapping[Channel, float], outcome: Outcome, rate: float) -> dict[Channel, float]:
    """Moves weight towards the channel that is longest in each block (multiplicative weights)."""
    raised = {}
    for (block, what), w in weights.items():
        longest = max(s for (b, _), s in outcome.channels.items() if b == block) if block in outcome.blocks else 0.0
        share = outcome.channels.get((block, what), 0.0) / longest if longest > 0 else 1.0
        raised[(block, what)] = max(w, 1e-3) * np.exp(rate * (share - 1.0))
    return normalise(model, raised)


def search(
    model: Model,
    baselines: list[Baseline],
    memory_limit: int,
    time_limit: float,
    seed: int,
    progress: Callable[[str], None],
    required: Required | None = None,
) -> Found:
    """The best plan within the memory limit that keeps what is `required`.

    Never worse than the best baseline that fits and keeps it too. Baselines themselves are completed without it.
    """
    required = required or Required({}, {})
    start = clock.monotonic()
    weights: Weights = normalise(model, even_weights(model))
    named = {}
    for number, baseline in enumerate(baselines):
        left = BASELINES_SHARE * time_limit - (clock.monotonic() - start)
        share = max(1.0, left / (len(baselines) - number))
        candidate = complete(model, baseline, weights, memory_limit, share, seed)
        if candidate is not None:
            named[baseline.name] = candidate
    fitting = [c for c in named.values() if c.fits and required.holds(c.choices)]
    best = min(fitting, key=_rank, default=None)
    bound, bound_problem, bound_solution = -1.0, None, None
    rounds = 0
    for rounds in range(1, MAX_ROUNDS + 1):
        left = time_limit - (clock.monotonic() - start)
        if rounds > 1 and left < 0.1 * time_limit:
            break
        hint = best.choices if best is not None else None
        share = max(2.0, left / (2 if rounds == 1 else 3))
        problem, solution = solve_within(model, weights, memory_limit, share, seed, hint, required.allowed)
        lower = solution.lower_bound * 1e-12
        if lower > bound or bound_problem is None:
            bound, bound_problem, bound_solution = lower, problem, solution
        candidate = make_candidate(model, "plan", solution, problem, memory_limit)
        if candidate is None or not required.holds(candidate.choices):
            break
        if candidate.fits and (best is None or _rank(candidate) < _rank(best)):
            best = candidate
        if best is None:
            break
        gap = 1.0 - bound / best.outcome.step_time_s
        progress(f"weighting {rounds}: step {best.outcome.step_time_s:.6g} s, plan gap {max(gap, 0):.2%}")
        if gap <= GOOD_ENOUGH or len(weights) <= len({b for b, _ in weights}):
            break
        weights = next_weights(model, weights, candidate.outcome, 1.0 / rounds**0.5)
    if best is None or bound_problem is None or bound_solution is None:
        raise Infeasible(bound_solution)
    best = dataclasses.replace(best, name="plan")
    return Found(best, bound_problem, bound_solution, bound, named, rounds)


def _rank(candidate: Candidate) -> tuple[float, int]:
    """Less time is better, and of equal times less memory; differences below a picosecond are rounding."""
    return round(candidate.outcome.step_time_s, 12), candidate.outcome.peak_bytes


def solve_within(
    model: Model,
    weights: Weights,
    memory_limit: int,
    time_limit: float,
    seed: int,
    hint: NDArray[np.int64] | None,
    allowed: Allowed | None = None,
) -> tuple[Problem, Solution]:
    """The least weighted time within the memory limit; without it first, since an optimum that fits is one with it."""
    start = clock.monotonic()
    limited = build_problem(model, weights, memory_limit, allowed)
    free = dataclasses.replace(limited, usage_limit=None)
    solution = solve(free, time_limit=time_limit / 2, seed=seed, hint=hint)
    if evaluate_problem(limited, solution.choices).feasible:
        return limited, solution
    left = max(1.0, time_limit - (clock.monotonic() - start))
    return limited, solve(limited, time_limit=left, seed=seed, hint=hint)


class Infeasible(Exception):
    """No choice within the memory limit was found; carries the solver's last answer."""

    def __init__(self, solution: Solution | None) -> None:
        super().__init__("no choice within the memory limit")
        self.solution = solution


def complete(
    model: Model, baseline: Baseline, weights: Weights, memory_limit: int, time_limit: float, seed: int
) -> Candidate | None:
    """A baseline with everything it leaves open chosen by the solver; within the limit if that is possible."""
    problem, solution = solve_within(model, weights, memory_limit, time_limit, seed, None, baseline.allowed)
    found = make_candidate(model, baseline.name, solution, problem, memory_limit)
    if found is None or not found.fits:
        # A baseline that cannot fit is shown all the same, with what it would take.
        problem = build_problem(model, weights, None, baseline.allowed)
        solution = solve(problem, time_limit=time_limit, seed=seed)
        found = make_candidate(model, baseline.name, solution, problem, memory_limit)
    return found


def make_candidate(
    model: Model, name: str, solution: Solution, problem: Problem, memory_limit: int
) -> Candidate | None:
    """A solution with its true outcome; None if it is not a choice at all.

    Checks the model against itself: memory by liveness must equal the Problem's, or a `RuntimeError` says so.
    """
    if solution.choices is None or len(solution.choices) != problem.num_nodes:
        return None
    checked = evaluate_problem(problem, solution.choices)
    try:
        outcome = evaluate(model, solution.choices)
    except ValueError:
        return None
    if checked.peak_usage + model.fixed_bytes != outcome.peak_bytes:
        raise RuntimeError(
            f"memory from specs is {outcome.peak_bytes} bytes but the solved problem says "
            f"{checked.peak_usage + model.fixed_bytes}: the plan cannot be trusted"
        )
    return Candidate(name, np.asarray(solution.choices), outcome, outcome.peak_bytes <= memory_limit)
