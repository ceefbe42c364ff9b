"""Solving one weighting: narrowed first where it is large, and with what repeats shared."""

import dataclasses
import math
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import OutOfRangeError
from autoshard.planning.solve.problem_builder import (
    DEAREST,
    Allowed,
    Kept,
    Weights,
    build_network,
    build_problem,
    entries,
    kept_of,
)
from autoshard.planning.solve.repeats import Repeats
from autoshard.planning.space.decision_model import Decisions, Model
from autoshard.solver import FORBIDDEN, Messages, Narrowed, Problem, Solution, Status, narrow, processor_seconds, solve
from autoshard.solver import evaluate as evaluate_problem


LARGE = 100_000
"""Numbers in edge tables from which on a Problem is narrowed before it is written out."""
ROUNDS = 8
"""Rounds of search for one Problem that is not proven sooner: work, not time, so that plans can be made again."""


LONG = DEAREST - 1024
"""Picoseconds from which on choices are out of range, since what is cut down to `DEAREST` may be among them."""
TOO_LONG = (
    "the program takes too long or too much memory to be planned exactly: 11 days of one step and 4 EiB of one device "
    "can be; plan fewer iterations of its loops, since what they repeat is planned once, or smaller tensors"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Solved:
    """A weighting's Problem, of what was left to choose from, and its solution."""

    problem: Problem
    solution: Solution
    """Its choices are those of `problem`, its bound that of the whole."""
    kept: Kept
    limited: bool
    """The memory limit was in the way."""
    messages: Messages | None = None
    """Messages to begin the next weighting with, where there are any."""
    of: NDArray[np.int64] | None = None
    """[nodes of the model] the node of `problem` that decides it; None if each decides for itself."""
    free: int = 0
    """Picoseconds that no choice takes less than, whatever fits into memory; 0 where that was not looked at."""

    @property
    def choices(self) -> NDArray[np.int64]:
        """For every node of the model; empty without any."""
        if len(self.solution.choices) != len(self.kept):
            return np.zeros(0, dtype=np.int64)
        chosen = np.array([mine[c] for mine, c in zip(self.kept, self.solution.choices.tolist(), strict=True)])
        return chosen if self.of is None else chosen[self.of]


def first_messages(model: Decisions, weights: Weights) -> Messages | None:
    """What every solve of a large model may begin with: found for all alternatives, without a memory limit."""
    kept = kept_of(model, None)
    return narrow(build_network(model, weights, None, kept)).messages if entries(model, kept) > LARGE else None


class FirstBound(NamedTuple):
    """What is known of a large model before it is solved."""

    picoseconds: float
    messages: Messages | None
    """As `solve_within` takes them."""
    choices: NDArray[np.int64] | None
    """The best ones met."""


def first_bound(
    model: Model,
    repeats: Repeats | None,
    weights: Weights,
    allowed: Allowed | None,
    enough: float,
    small: bool = False,
) -> FirstBound | None:
    """A bound of a model, up to `enough`, without a memory limit; None for a small one, unless that is wanted too."""
    kept = kept_of(model, allowed)
    if entries(model, kept) <= LARGE and not small:
        return None
    shared = None if repeats is None else repeats.allowed(allowed)
    start = first = None
    if repeats is not None and shared is not None:
        first = narrow(build_network(repeats, weights, None, kept_of(repeats, shared))).messages
        start = repeats.lift(model, weights, first)
    found = narrow(build_network(model, weights, None, kept), start=start, enough=enough)
    return FirstBound(found.bound, found.messages if repeats is None else first, found.choices)


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """How a weighting is solved."""

    memory_limit: int | None
    time_limit: float
    """Seconds of processor after which the best so far is taken; a guard, see `ROUNDS`."""
    seed: int
    hint: NDArray[np.int64] | None = None
    """Choices to begin from, for every node of the model."""
    allowed: Allowed | None = None
    messages: Messages | None = None
    """Messages to begin with in a large model."""
    free_first: bool = True
    """Whether it is solved without the memory limit first: an optimum that fits is one with it."""
    stop: threading.Event | None = None
    """Ends it early, with whatever there is, when it is set."""
    enough: float = math.inf
    """Picoseconds from which on choices are of no use: a bound of as much ends it, perhaps without any."""

    def left(self, began: float) -> "Terms":
        """With what is left of the time limit, which began then."""
        return dataclasses.replace(self, time_limit=max(1.0, self.time_limit - (processor_seconds() - began)))


def solve_within(model: Model, weights: Weights, terms: Terms, repeats: Repeats | None = None) -> Solved:
    """The least weighted time within the memory limit.

    With `repeats` what repeats is first decided as one, beginning with the messages of `terms` (and ending with such);
    then everything for itself, from there on.
    """
    began = processor_seconds()
    if repeats is None:
        return _solve(model, weights, terms)
    tied = solve_tied(repeats, weights, dataclasses.replace(terms, time_limit=terms.time_limit / 2, free_first=True))
    alone = dataclasses.replace(terms, messages=None, free_first=True)
    if tied is None or not len(tied.choices):
        return dataclasses.replace(_solve(model, weights, alone), messages=None)
    lifted = repeats.lift(model, weights, tied.messages)
    known = dataclasses.replace(alone, hint=tied.choices, messages=lifted, free_first=not tied.limited)
    solved = _solve(model, weights, known.left(began))
    return dataclasses.replace(solved, messages=tied.messages)


def solve_tied(repeats: Repeats, weights: Weights, terms: Terms) -> Solved | None:
    """The same with one decision for what repeats; None if what is allowed keeps it from being one.

    The hint is of the whole model, messages are of what is shared. The bound is one of shared decisions only.
    """
    shared = repeats.allowed(terms.allowed)
    if shared is None:
        return None
    part = dataclasses.replace(terms, hint=repeats.part(terms.hint), allowed=shared, enough=math.inf)
    return dataclasses.replace(_solve(repeats, weights, part), of=repeats.of, free=0)


def _solve(model: Decisions, weights: Weights, terms: Terms) -> Solved:
    began = processor_seconds()
    limit = terms.memory_limit
    if terms.free_first or limit is None:
        free = _solve_narrowed(model, weights, None, dataclasses.replace(terms, time_limit=terms.time_limit / 2))
        known = max(0, free.solution.lower_bound)
        useless = free.solution.lower_bound >= terms.enough
        if limit is None or useless or evaluate_problem(free.problem, free.solution.choices).feasible:
            return dataclasses.replace(free, free=known)
        limited = dataclasses.replace(terms, messages=free.messages)
        return dataclasses.replace(_solve_narrowed(model, weights, limit, limited.left(began)), free=known)
    return _solve_narrowed(model, weights, limit, terms.left(began))


def _solve_narrowed(model: Decisions, weights: Weights, enforced: int | None, terms: Terms) -> Solved:
    """Solves under the limit `enforced`; a large Problem is narrowed first, and is given with that of `terms`."""
    kept = kept_of(model, terms.allowed)
    hint, messages = terms.hint, terms.messages
    narrowed = None
    if entries(model, kept) > LARGE:
        narrowed = narrow(build_network(model, weights, enforced, kept), hint, messages, terms.enough)
        messages = narrowed.messages or messages
        if narrowed.bound >= terms.enough:
            return _of_no_use(model, weights, terms, kept, narrowed)
        kept, hint = narrowed.kept, hint if narrowed.choices is None else narrowed.choices
    problem = build_problem(model, weights, terms.memory_limit, kept)
    try:
        solution = solve(
            problem if enforced is not None else dataclasses.replace(problem, usage_limit=None),
            time_limit=terms.time_limit,
            iterations=ROUNDS,
            seed=terms.seed,
            hint=None if hint is None else _places(kept, hint),
            stop=terms.stop,
            clock=processor_seconds,
            enough=terms.enough,
        )
    except OutOfRangeError:
        raise OutOfRangeError(TOO_LONG) from None
    if solution.status in (Status.OPTIMAL, Status.FEASIBLE) and solution.cost >= LONG:
        raise OutOfRangeError(TOO_LONG)
    if narrowed is not None and not narrowed.complete:
        lower = min(solution.lower_bound, max(0, int(narrowed.bound)))
        status = Status.FEASIBLE if solution.status is Status.OPTIMAL else solution.status
        status = Status.UNKNOWN if solution.status is Status.INFEASIBLE else status
        solution = dataclasses.replace(solution, lower_bound=lower, status=status)
    return Solved(problem, solution, kept, enforced is not None, messages)


def _of_no_use(model: Decisions, weights: Weights, terms: Terms, kept: Kept, narrowed: Narrowed) -> Solved:
    """Without choices, where none costs less than enough; its problem is but a part of the whole."""
    part = build_problem(model, weights, terms.memory_limit, [mine[:1] for mine in kept])
    solution = Solution(np.zeros(0, dtype=np.int64), FORBIDDEN, int(narrowed.bound), Status.UNKNOWN, {})
    return Solved(part, solution, kept, False, narrowed.messages or terms.messages)


def _places(kept: Kept, choices: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The same choices among the alternatives left; None if one is gone, or nothing is to be chosen."""
    places = [np.flatnonzero(mine == c) for mine, c in zip(kept, choices.tolist(), strict=True)]
    return np.array([p[0] for p in places]) if places and all(len(p) for p in places) else None
