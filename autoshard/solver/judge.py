"""Independent judge: exact cost and memory of given choices, computed without the solver's code."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from autoshard.errors import UserError
from autoshard.solver.problem import FORBIDDEN, Problem


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """Cost and memory of given choices."""

    cost: int
    """Sum of the chosen node and edge costs; an exact integer of any size."""
    peak_usage: int
    """Bytes in use at the worst time."""
    peak_time: int
    """First time at which `peak_usage` is reached; 0 when no memory is used."""
    feasible: bool
    """True if no chosen cost (nor their sum) reaches `FORBIDDEN`, and memory stays within the limit."""
    excess: int
    """Bytes by which the peak exceeds the limit; 0 within the limit."""


def evaluate(problem: Problem, choices: ArrayLike) -> Evaluation:
    """Compute cost and memory of `choices` ([N], one alternative for each node).

    Choices that are forbidden or exceed the limit have `feasible` False. Raises `UserError` for a wrong shape or type,
    or an alternative that a node lacks.
    """
    chosen = np.asarray(choices)
    count = problem.num_nodes
    if chosen.shape != (count,) or (chosen.size and chosen.dtype.kind not in "iu"):
        raise UserError(f"there are {chosen.size} choices for {count} nodes; one whole number per node is needed")
    chosen = chosen.astype(np.int64)
    sizes = np.diff(problem.node_offsets)
    wrong = np.flatnonzero((chosen < 0) | (chosen >= sizes))
    if len(wrong):
        node = int(wrong[0])
        raise UserError(
            f"node {node} was given alternative {chosen[node]}, but it has alternatives 0 to {sizes[node] - 1}"
        )
    picked = problem.node_costs[problem.node_offsets[:-1] + chosen].tolist()
    first, second = problem.edge_nodes[:, 0], problem.edge_nodes[:, 1]
    picked += problem.edge_costs[problem.edge_offsets[:-1] + chosen[first] * sizes[second] + chosen[second]].tolist()
    cost = sum(picked)
    allowed = cost < FORBIDDEN and max(picked) < FORBIDDEN
    peak, time = _peak(problem, chosen)
    limit = problem.usage_limit
    excess = 0 if limit is None else max(0, peak - limit)
    return Evaluation(cost=cost, peak_usage=peak, peak_time=time, feasible=allowed and excess == 0, excess=excess)


def _peak(problem: Problem, chosen: np.ndarray) -> tuple[int, int]:
    """Return the largest usage in bytes over all times, and the first time at which it occurs; (0, 0) without usage.

    The result is exact for any size of usages. Times are those of the problem.
    """
    usage = problem.term_usages[problem.term_offsets[:-1] + chosen[problem.term_nodes]]
    starts, stops = problem.term_intervals[:, 0], problem.term_intervals[:, 1]
    live = (starts < stops) & (usage > 0)
    usage, starts, stops = usage[live], starts[live], stops[live]
    if not len(usage):
        return 0, 0
    # Sums beyond 64 bits use Python's integers.
    if sum(usage.tolist()) >= 2**62:
        usage = usage.astype(object)
    times, place = np.unique(np.concatenate([starts, stops]), return_inverse=True)
    change = np.zeros(len(times), dtype=usage.dtype)
    np.add.at(change, place[: len(starts)], usage)
    np.subtract.at(change, place[len(starts) :], usage)
    profile = np.cumsum(change)
    top = int(np.argmax(profile))
    return int(profile[top]), int(times[top])
