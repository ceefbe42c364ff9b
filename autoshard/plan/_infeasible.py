"""What to say when no plan keeps within the memory limit."""

import numpy as np
from numpy.typing import NDArray

from autoshard.plan._asked import Required
from autoshard.plan._model import Model
from autoshard.plan._predict import evaluate
from autoshard.plan._solve import Solved, Terms, solve_within
from autoshard.plan._weights import even_weights, normalise
from autoshard.units import format_bytes


def explain_infeasible(
    model: Model,
    solved: Solved | None,
    memory_limit: int,
    time_limit: float,
    seed: int,
    required: Required | None = None,
) -> str:
    """One sentence: the least memory that any plan found needs, where its peak is, and what would help."""
    required = required or Required({}, {})
    least = _least_memory(model, memory_limit, time_limit, seed, required)
    if least is None and solved is not None and len(solved.choices) == len(model.nodes):
        least = solved.choices
    if least is not None and not required.holds(least):
        return "no plan keeps everything that was asked for: leave one of the pins out."
    if least is None:
        return f"no plan fits into {format_bytes(memory_limit)} per device; use more devices or a smaller batch."
    outcome = evaluate(model, least)
    op = model.graph.ops[min(outcome.peak_time, len(model.graph.ops) - 1)]
    kinds = sorted(outcome.memory.items(), key=lambda kv: -kv[1])
    parts = ", ".join(f"{kind.replace('_', ' ')} {format_bytes(size)}" for kind, size in kinds[:3])
    return (
        f"no plan fits into {format_bytes(memory_limit)} per device: the least found is "
        f"{format_bytes(outcome.peak_bytes)}{' with these pins' if required.allowed else ''}, at its peak in "
        f"{op.kind} {op.name} ({parts}); {_advice(kinds[0][0])}."
    )


def _advice(kind: str) -> str:
    if kind in ("activations", "temporaries"):
        return "a smaller batch, --remat full or more devices would help"
    if kind in ("optimizer_state", "gradients"):
        return "more devices or --state-dtype bf16 would help"
    return "more devices or a smaller dtype would help"


def _least_memory(
    model: Model, memory_limit: int, time_limit: float, seed: int, required: Required
) -> NDArray[np.int64] | None:
    """Choices of the smallest limit that the solver can keep, by bisection between the limit and the least need met.

    Fast plans split nearly everything and need little, so the fastest without a limit is one to begin with.
    """
    allowed = required.allowed
    best, high = None, 0
    for weights in ({}, normalise(even_weights(model))):
        free = solve_within(model, weights, Terms(None, time_limit / 8, seed, allowed=allowed))
        try:
            peak = evaluate(model, free.choices).peak_bytes
        except (ValueError, IndexError):  # none was found
            continue
        if best is None or peak < high:
            best, high = free.choices, peak
    if best is None:
        return None
    low = memory_limit
    for _ in range(12):
        if high - low < 0.01 * high:
            break
        middle = (low + high) // 2
        found = solve_within(model, {}, Terms(middle, max(1.0, time_limit / 16), seed, best, allowed))
        if found.solution.gap != float("inf"):
            best = found.choices
            high = min(middle, evaluate(model, best).peak_bytes)
        else:
            low = middle
    return best
