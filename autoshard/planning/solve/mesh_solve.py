"""Solution of one weighting: large problems are first pruned, and repeated layers share decisions."""

import dataclasses
import math
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import OutOfRangeError
from autoshard.planning.solve.problem_builder import (
    MAX_COST,
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
from autoshard.solver import (
    FORBIDDEN,
    Messages,
    Problem,
    Pruned,
    Solution,
    Status,
    Useful,
    processor_seconds,
    prune,
    solve,
)
from autoshard.solver import evaluate as evaluate_problem


LARGE = 100_000
"""Number of edge table entries from which on a problem is pruned before it is written out."""
ROUNDS = 8
"""Largest number of search rounds for one problem that is not proven earlier.

Work is limited, and not time, so that plans are reproducible.
"""
FREE_ROUNDS = 2
"""Largest number of such rounds without the memory limit where one is given: enough to see that it is exceeded."""


OUT_OF_RANGE = MAX_COST - 1024
"""Cost in picoseconds from which on choices are out of range, since costs clipped to `MAX_COST` may be among theirs."""
# Message for costs or sizes beyond the range of the solver's integers.
TOO_LONG = (
    "the program takes too long or too much memory to be planned exactly: 11 days of one step and 4 EiB of one device "
    "can be; plan fewer iterations of its loops, since what they repeat is planned once, or smaller tensors"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Solved:
    """Problem of a weighting, over the alternatives that were left, and its solution."""

    problem: Problem
    """Problem with the memory limit, over the alternatives in `kept`."""
    solution: Solution
    """Choices of `problem`, with a bound for the whole problem."""
    kept: Kept
    """Remaining alternatives of every node of `problem`, as numbers among all alternatives of the node."""
    limited: bool
    """True if the memory limit was enforced, since the optimum without a limit did not fit or was not computed."""
    messages: Messages | None = None
    """Messages to start the next weighting from, None without any."""
    of: NDArray[np.int64] | None = None
    """Node of `problem` that decides each node of the model, [model nodes]; None if each decides for itself."""
    unconstrained_bound: int = 0
    """Lower bound in picoseconds without a memory limit; 0 if it was not computed."""

    @property
    def choices(self) -> NDArray[np.int64]:
        """Choices for every node of the model; those with the least excess of memory if none fits, else empty."""
        if len(self.solution.choices) != len(self.kept):
            return np.zeros(0, dtype=np.int64)
        chosen = np.array([left[c] for left, c in zip(self.kept, self.solution.choices.tolist(), strict=True)])
        return chosen if self.of is None else chosen[self.of]


def first_messages(model: Decisions, weights: Weights) -> Messages | None:
    """Return messages that every solve of a large model may start from; None for a small model.

    A model is large if its edge tables have more than `LARGE` entries. The messages are computed for all alternatives,
    without a memory limit.
    """
    kept = kept_of(model, None)
    return prune(build_network(model, weights, None, kept)).messages if entries(model, kept) > LARGE else None


class FirstBound(NamedTuple):
    """Lower bound of a large model before its first solve."""

    picoseconds: float
    """Bound on the weighted time of all allowed choices."""
    messages: Messages | None
    """Messages in the form that `solve_within` accepts: of the shared network with repeats, else of the whole one."""
    choices: NDArray[np.int64] | None
    """Best choices that were found, None if none were."""


def first_bound(
    model: Model,
    repeats: Repeats | None,
    weights: Weights,
    allowed: Allowed | None,
    enough: float,
    small: bool = False,
) -> FirstBound | None:
    """Return a lower bound of a model without a memory limit; None for a small model unless `small` is True.

    - `repeats`: shared decisions of repeated layers, to start from; not used if None, or if masks differ in a set.
    - `weights`: weight of each channel.
    - `allowed`: masks of the allowed alternatives.
    - `enough`: picoseconds at which the bound is not raised further.
    - `small`: True to compute the bound of a model with at most `LARGE` entries too.
    """
    kept = kept_of(model, allowed)
    if entries(model, kept) <= LARGE and not small:
        return None
    shared = None if repeats is None else repeats.allowed(allowed)
    start = shared_messages = None
    if repeats is not None and shared is not None:
        shared_messages = prune(build_network(repeats, weights, None, kept_of(repeats, shared))).messages
        start = repeats.lift(model, weights, shared_messages)
    pruned = prune(build_network(model, weights, None, kept), start=start, enough=enough)
    return FirstBound(pruned.bound, pruned.messages if repeats is None else shared_messages, pruned.choices)


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """Limits and starting points of a solve."""

    memory_limit: int | None
    """Bytes of one device; None for no limit."""
    time_limit: float
    """Processor seconds after which the best solution so far is used; a safeguard, since `ROUNDS` limits the work."""
    seed: int
    """Seed of the solver's random search."""
    hint: NDArray[np.int64] | None = None
    """Choices to start from, for every node of the model."""
    allowed: Allowed | None = None
    """Masks of the alternatives that may be chosen; None for all."""
    messages: Messages | None = None
    """Messages to start from in a large model."""
    free_first: bool = True
    """True to solve without the memory limit first; an optimum that fits is also optimal with the limit."""
    stop: threading.Event | None = None
    """Event that ends the solve early, with the best solution so far."""
    enough: float = math.inf
    """Picoseconds from which on choices are useless; a bound of this value ends the solve, possibly without choices."""

    nearest: bool = True
    """False to return no choices where none fit, in place of those with the least excess of memory."""
    rounds: int = ROUNDS
    """Largest number of search rounds, see `ROUNDS`."""
    gap: float = 0.0
    """Share of the time by which the bound may be lower when the solve ends."""

    def left(self, began: float) -> "Terms":
        """Return the terms with the rest of the time limit; at least 1 s.

        `began` is the processor time of the start in seconds.
        """
        return dataclasses.replace(self, time_limit=max(1.0, self.time_limit - (processor_seconds() - began)))


def solve_within(model: Model, weights: Weights, terms: Terms, repeats: Repeats | None = None) -> Solved:
    """Solve for the least weighted time within the memory limit.

    With `repeats`, repeated layers first share decisions; this solve starts from the messages of `terms` and returns
    its own. The whole model is then solved from the shared solution. Raises `OutOfRangeError` if times or bytes are too
    large for the solver.
    """
    began = processor_seconds()
    if repeats is None:
        return _solve(model, weights, terms)
    tied = solve_tied(repeats, weights, dataclasses.replace(terms, time_limit=terms.time_limit / 2, free_first=True))
    alone = dataclasses.replace(terms, messages=None, free_first=True)
    if tied is None or not len(tied.choices):
        return dataclasses.replace(_solve(model, weights, alone), messages=None)
    lifted = repeats.lift(model, weights, tied.messages)
    informed = dataclasses.replace(alone, hint=tied.choices, messages=lifted, free_first=not tied.limited)
    solved = _solve(model, weights, informed.left(began))
    return dataclasses.replace(solved, messages=tied.messages)


def solve_tied(repeats: Repeats, weights: Weights, terms: Terms) -> Solved | None:
    """Solve with one decision for each set of repeated nodes.

    None if the masks of `terms.allowed` differ within a set, or leave it no alternative.

    The hint of `terms` is for the whole model, its messages are for the shared one. The bound holds for shared
    decisions only.
    """
    shared = repeats.allowed(terms.allowed)
    if shared is None:
        return None
    part = dataclasses.replace(terms, hint=repeats.part(terms.hint), allowed=shared, enough=math.inf)
    return dataclasses.replace(_solve(repeats, weights, part), of=repeats.of, unconstrained_bound=0)


def _solve(model: Decisions, weights: Weights, terms: Terms) -> Solved:
    """Solve without the memory limit first if `terms.free_first`, then within the limit if the solution does not fit.

    A limit of None is solved without one, in the whole time limit; else the free solve may use half of it. Its bound is
    the result's `unconstrained_bound`, and no second solve follows if the bound reaches `terms.enough`.
    """
    began = processor_seconds()
    limit = terms.memory_limit
    if terms.free_first or limit is None:
        seconds = terms.time_limit if limit is None else terms.time_limit / 2
        rounds = terms.rounds if limit is None else min(terms.rounds, FREE_ROUNDS)
        free = _solve_pruned(model, weights, None, dataclasses.replace(terms, time_limit=seconds, rounds=rounds))
        if _is_answer(free, terms) and free.solution.status is Status.FEASIBLE and rounds < terms.rounds:
            hint = free.choices if len(free.choices) else terms.hint
            more = dataclasses.replace(terms.left(began), hint=hint, messages=free.messages)
            free = _solve_pruned(model, weights, None, more)
        free_bound = max(0, free.solution.lower_bound)
        if _is_answer(free, terms):
            return dataclasses.replace(free, unconstrained_bound=free_bound)
        limited = dataclasses.replace(terms, messages=free.messages)
        return dataclasses.replace(
            _solve_pruned(model, weights, limit, limited.left(began)), unconstrained_bound=free_bound
        )
    return _solve_pruned(model, weights, limit, terms.left(began))


def _is_answer(free: Solved, terms: Terms) -> bool:
    """Return True if a solve without the memory limit answers for the limit too: its choices fit or are of no use."""
    if terms.memory_limit is None or free.solution.lower_bound >= terms.enough:
        return True
    return evaluate_problem(free.problem, free.solution.choices).feasible


def _solve_pruned(model: Decisions, weights: Weights, enforced: int | None, terms: Terms) -> Solved:
    """Solve under the memory limit `enforced`, None for none; a large problem is pruned first.

    The returned problem has the memory limit of `terms`. If pruning removed alternatives without proof, the status is
    no longer optimal or infeasible, and the bound is the pruned network's if lower. Pruning removes useless choices
    too, so that the bound is at most `enough` of the terms. Raises `OutOfRangeError` for a solution that costs
    `OUT_OF_RANGE` or more.
    """
    kept = kept_of(model, terms.allowed)
    hint, messages = terms.hint, terms.messages
    pruned = None
    if entries(model, kept) > LARGE:
        pruned = prune(build_network(model, weights, enforced, kept), hint, messages, terms.enough)
        messages = pruned.messages or messages
        if pruned.bound >= terms.enough:
            return _of_no_use(model, weights, terms, kept, pruned, int(pruned.bound))
        kept, hint = pruned.alternatives, hint if pruned.choices is None else pruned.choices
    problem = build_problem(model, weights, terms.memory_limit, kept)
    try:
        solution = solve(
            problem if enforced is not None else dataclasses.replace(problem, usage_limit=None),
            time_limit=terms.time_limit,
            iterations=terms.rounds,
            seed=terms.seed,
            hint=None if hint is None else _places(kept, hint),
            stop=terms.stop,
            clock=processor_seconds,
            useful=Useful(terms.enough, terms.nearest, terms.gap),
        )
    except OutOfRangeError:
        raise OutOfRangeError(TOO_LONG) from None
    if solution.status in (Status.OPTIMAL, Status.FEASIBLE) and solution.cost >= OUT_OF_RANGE:
        raise OutOfRangeError(TOO_LONG)
    if pruned is not None and not (pruned.complete and solution.cost < terms.enough):
        # Pruned choices may cost less than the solution, but no less than this.
        least = math.ceil(terms.enough) if pruned.complete else max(0, int(pruned.bound))
        if pruned.complete and solution.status is Status.INFEASIBLE:
            return _of_no_use(model, weights, terms, kept, pruned, least)
        bound = min(solution.lower_bound, least)
        status = Status.FEASIBLE if solution.status is Status.OPTIMAL else solution.status
        status = Status.UNKNOWN if solution.status is Status.INFEASIBLE else status
        solution = dataclasses.replace(solution, lower_bound=bound, status=status)
    return Solved(problem, solution, kept, enforced is not None, messages)


def _of_no_use(model: Decisions, weights: Weights, terms: Terms, kept: Kept, pruned: Pruned, bound: int) -> Solved:
    """Return a result without choices, since none costs less than `enough`.

    Its problem has one alternative of each node, and its solution the given bound.
    """
    part = build_problem(model, weights, terms.memory_limit, [mine[:1] for mine in kept])
    solution = Solution(np.zeros(0, dtype=np.int64), FORBIDDEN, bound, Status.UNKNOWN, {})
    return Solved(part, solution, kept, False, pruned.messages or terms.messages)


def _places(kept: Kept, choices: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Convert choices to positions among the remaining alternatives; None if a choice was pruned or none exists."""
    places = [np.flatnonzero(mine == c) for mine, c in zip(kept, choices.tolist(), strict=True)]
    return np.array([p[0] for p in places]) if places and all(len(p) for p in places) else None
