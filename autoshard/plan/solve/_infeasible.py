"""What to say when no plan keeps within the memory limit."""

import numpy as np
from numpy.typing import NDArray

from autoshard.plan.model._asked import Required
from autoshard.plan.model._model import Model
from autoshard.plan.price._predict import evaluate
from autoshard.plan.solve._solve import Solved, Terms, solve_within
from autoshard.plan.solve._weights import even_weights, normalise
from autoshard.program import WEIGHTS, Role
from autoshard.units import format_bytes


RECOMPUTES = b"rematted_computation"
"""What JAX writes into the locations of all that a backward pass computes again."""


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
        helps = _advice(model, "activations", memory_limit, bool(required.allowed))
        return f"no plan fits into {format_bytes(memory_limit)} per device; {helps}."
    outcome = evaluate(model, least)
    op = model.graph.ops[min(outcome.peak_time, len(model.graph.ops) - 1)] if model.graph.ops else None
    where = f"its peak in {op.kind} {op.name}" if op else "most"
    kinds = sorted(outcome.memory.items(), key=lambda kv: -kv[1])
    parts = ", ".join(f"{kind.replace('_', ' ')} {format_bytes(size)}" for kind, size in kinds[:3]) or "nothing"
    return (
        f"no plan fits into {format_bytes(memory_limit)} per device: the least found is "
        f"{format_bytes(outcome.peak_bytes)}{' with these pins' if required.allowed else ''}, at {where} "
        f"({parts}); {_advice(model, kinds[0][0] if kinds else '', memory_limit, bool(required.allowed))}."
    )


_NARROW = ("bfloat16", "bf16", "float16", "f16")


def _advice(model: Model, kind: str, memory_limit: int, pinned: bool) -> str:
    """What would help with what holds most at the peak; nothing that the program or the plan has already."""
    program = model.program
    source = program.source or {}
    options = source.get("options", {})
    flags = str(source.get("program", "")).startswith("hf:") or bool(options.get("train"))
    found = []
    if kind in ("activations", "temporaries", "batch"):
        if any(a.role is Role.BATCH and a.shape and a.shape[0] > 1 for a in program.arguments):
            found.append("a smaller batch")
    if kind in ("activations", "temporaries") and program.training:
        if flags and options.get("remat", "none") != "full":
            found.append("--remat full")
        elif not flags and RECOMPUTES not in program.module:
            found.append("recomputing activations in the backward pass (jax.checkpoint)")
    if kind == "optimizer_state":
        if flags and options.get("state_dtype", "float32") not in _NARROW:
            found.append("--state-dtype bfloat16")
        elif not flags and any(a.role is Role.OPTIMIZER_STATE and a.dtype == "float32" for a in program.arguments):
            found.append("optimizer state in bfloat16")
        if program.on_host == "none" and model.graph.loops and not model.mesh.topology.traits.shares_machine:
            found.append("--host optimizer" if flags else 'autoshard.trace(..., host="optimizer")')
    if kind in ("parameters", "gradients", "gathered"):
        if any(a.role in WEIGHTS and a.dtype in ("float32", "float64") for a in program.arguments):
            found.append("--param-dtype bfloat16" if flags else "parameters in bfloat16")
    if pinned:
        found.append("fewer pins")
    usable = model.mesh.topology.usable_bytes
    if memory_limit < usable:
        found.append(f"a higher memory limit (a device has {format_bytes(usable)})")
    found.append("more devices")
    listed = f"{', '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else found[0]
    return f"{listed} would help"


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
