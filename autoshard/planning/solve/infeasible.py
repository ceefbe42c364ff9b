"""Explanation for the user if no plan fits into the memory limit."""

import math
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from autoshard.base.units import dtype_bits, format_bytes
from autoshard.errors import UserError
from autoshard.graph import Op, Tensor, attention_scores, is_summed, scores_of
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.solve.mesh_solve import Solved, Terms, solve_tied, solve_within
from autoshard.planning.solve.problem_builder import Weights
from autoshard.planning.solve.repeats import find_repeats
from autoshard.planning.solve.time_weights import even_weights, normalise
from autoshard.planning.solve.weight_search import Infeasible
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.user_constraints import Required
from autoshard.program import WEIGHTS, Program, Role, block_sizes_words


PRECISION = 0.05
"""Share of the least memory to which a refusal states it: predictions of memory are no more exact."""

RECOMPUTES = b"rematted_computation"
"""Part of the locations that JAX writes for everything that a backward pass recomputes."""


def state_bytes(program: Program) -> int:
    """Return the bytes of parameters and optimizer state on devices, which every plan holds when a step begins."""
    held = [*WEIGHTS, *([Role.OPTIMIZER_STATE] if program.on_host == "none" else [])]
    return sum(
        math.prod(argument.shape) * dtype_bits(argument.dtype) // 8
        for argument in program.arguments
        if argument.role in held
    )


def explain_infeasible(model: Model, found: Infeasible, limits: Limits, required: Required) -> str:
    """Return a sentence with the least memory that a plan was found to need, the op at its peak, and possible remedies.

    If no choices were found, it has remedies only. Raises `UserError` if no choices satisfy the user's pins.

    - `found`: the failed search.
    - `limits`: memory limit and time of the search.
    - `required`: the user's demands on the model.
    """
    memory_limit, solved = limits.memory_bytes, found.solved
    least = _least_memory(model, found, limits, required)
    if least is None and solved is not None and len(solved.choices) == len(model.nodes):
        least = solved.choices
    if least is not None and not required.holds(least):
        raise UserError("no plan keeps everything that was asked for: leave one of the pins out.")
    if least is None:
        remedies = _advice(model, "activations", memory_limit, bool(required.allowed))
        return f"no plan fits into {format_bytes(memory_limit)} per device; {remedies}."
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


# Dtypes of two bytes, as options and programs write them.
_NARROW = ("bfloat16", "bf16", "float16", "f16")


def _advice(model: Model, kind: str, memory_limit: int, pinned: bool) -> str:
    """Return remedies as one clause, `a smaller batch or more devices would help`, for the largest kind of memory.

    Remedies that the program already uses are left out; `more devices` always ends the list. Options of the command
    line are named if the program was made by it.

    - `kind`: kind of memory, as in `Prediction.memory`.
    - `memory_limit`: bytes of one device; a limit below the usable memory adds a remedy.
    - `pinned`: True if the user pinned specs.
    """
    program = model.program
    source = program.source or {}
    options = source.get("options", {})
    flags = str(source.get("program", "")).startswith("hf:") or bool(options.get("train"))
    remedies = []
    if kind in ("activations", "temporaries", "batch"):
        if any(a.role is Role.BATCH and a.shape and a.shape[0] > 1 for a in program.arguments):
            remedies.append("a smaller batch")
    if kind in ("activations", "temporaries") and not flags:
        remedies += _kernel_remedy(model, memory_limit)
    if kind in ("activations", "temporaries") and program.training:
        if flags and options.get("remat", "none") != "full":
            remedies.append("--remat full")
        elif not flags and RECOMPUTES not in program.module:
            remedies.append("recomputing activations in the backward pass (jax.checkpoint)")
    if kind == "optimizer_state":
        if flags and options.get("state_dtype", "float32") not in _NARROW:
            remedies.append("--state-dtype bfloat16")
        elif not flags and any(a.role is Role.OPTIMIZER_STATE and a.dtype == "float32" for a in program.arguments):
            remedies.append("optimizer state in bfloat16")
        if program.on_host == "none" and model.graph.loops and not model.mesh.topology.traits.shares_machine:
            remedies.append("--host optimizer" if flags else 'autoshard.trace(..., host="optimizer")')
    if kind in ("parameters", "gradients", "gathered"):
        if any(a.role in WEIGHTS and a.dtype in ("float32", "float64") for a in program.arguments):
            remedies.append("--param-dtype bfloat16" if flags else "parameters in bfloat16")
    lora = str(options.get("lora") or "")
    if kind == "frozen_parameters" and lora and "base=" not in lora:
        remedies.append(f"--lora {lora},base=nf4")
    if pinned:
        remedies.append("fewer pins")
    usable = model.mesh.topology.usable_bytes
    if memory_limit < usable:
        remedies.append(f"a higher memory limit (a device has {format_bytes(usable)})")
    remedies.append("more devices")
    listed = f"{', '.join(remedies[:-1])} or {remedies[-1]}" if len(remedies) > 1 else remedies[0]
    return f"{listed} would help"


SCORES_SHARE = 0.1
"""Share of the memory limit that scores of attention must need before a kernel is proposed."""


def _kernel_remedy(model: Model, memory_limit: int) -> list[str]:
    """Return a remedy for scores of attention that the program stores, if they are a large part of the memory.

    It names the line with most bytes of scores. They are counted once for each attention, split over all devices. Empty
    for topologies without a kernel.
    """
    kernel = model.mesh.topology.traits.attention_kernel
    if not kernel:
        return []
    graph, lines = model.graph, defaultdict[str, list[tuple[Op, Tensor]]](list)
    for op in graph.ops:
        if op.kind != "exponential" or not is_summed(graph, op):
            continue
        if (scores := scores_of(graph, op)) is not None:
            lines[graph.ops[scores.producer].line].append((op, scores))
    if not lines:
        return []
    line, stored = max(lines.items(), key=lambda item: sum(scores.bytes for _, scores in item[1]))
    size = sum(scores.bytes for _, scores in stored) / model.mesh.topology.num_devices
    if size < SCORES_SHARE * memory_limit:
        return []
    where = f"the attention at {line}" if line else "the attention"
    first = attention_scores(graph, stored[0][0])
    if first is not None and model.mesh.topology.traits.attention == "splash":
        _, sizes = block_sizes_words(first.queries, first.keys, first.head)
        kernel += f" with {sizes}" if sizes else ""
    return [
        f"a fused kernel ({kernel}) for {where}, whose scores need at least {format_bytes(int(size))} of each device"
    ]


def _least_memory(model: Model, found: Infeasible, limits: Limits, required: Required) -> NDArray[np.int64] | None:
    """Return choices for the smallest memory limit that the solver can satisfy, by bisection above the given limit.

    The upper end is the smallest peak among completed baselines and choices that are optimal without a limit. Baselines
    split the parameters, and fast choices split nearly everything. Repeated layers share their decisions, as in
    baselines, unless the pins exclude it. None if no choices were found. The result is within `PRECISION` of the least
    limit, unless time runs out.
    """
    repeats, allowed = find_repeats(model), required.allowed

    def solved(weights: Weights, terms: Terms) -> Solved:
        """Solve with shared decisions of repeated layers; without these, solve the whole model."""
        tied = None if repeats is None else solve_tied(repeats, weights, terms)
        return solve_within(model, weights, terms) if tied is None else tied

    best, high = None, 0
    named = [each.choices for each in found.baselines.values() if required.holds(each.choices)]
    # These two solves and the twelve below together have the time of the failed search.
    free = (
        solved(weights, Terms(None, limits.seconds / 8, limits.seed, allowed=allowed)).choices
        for weights in ({}, normalise(even_weights(model)))
    )
    for choices in (*named, *free):
        try:
            peak = evaluate(model, choices).peak_bytes
        except (ValueError, IndexError):  # no choices, or a forbidden pair
            continue
        if best is None or peak < high:
            best, high = choices, peak
    if best is None:
        return None
    low = limits.memory_bytes
    for _ in range(12):
        if high - low < PRECISION * high:
            break
        middle = (low + high) // 2
        seconds = max(1.0, limits.seconds / 16)
        solved_within = solved({}, Terms(middle, seconds, limits.seed, best, allowed, free_first=False))
        if solved_within.solution.gap != math.inf:
            best = solved_within.choices
            high = min(middle, evaluate(model, best).peak_bytes)
        else:
            low = middle
    return best
