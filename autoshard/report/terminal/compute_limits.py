"""Sentences on the source lines that take most compute of a step, and on kernels of attention for them."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from autoshard.base.units import format_seconds
from autoshard.cost import Topology
from autoshard.planning import Plan, PlannedOp
from autoshard.program import LANES, block_sizes_words
from autoshard.report.display import clean, readable


_LIMITS = {"compute": "FLOPs", "memory": "memory traffic", "network": "memory traffic", "overhead": "starting ops"}
"""Words for the resource that takes most of an op's compute time, by the op's `bound`."""


def compute_limits(plan: Plan) -> list[str]:
    """Return sentences on the source lines that take most compute, on a softmax in memory and on kernels' blocks.

    There are none if compute is less than half of the step.
    """
    step = plan.prediction.step_time_s
    if step <= 0 or plan.by_stage or plan.prediction.compute_s < 0.5 * step:
        return []
    lines: dict[str, list[PlannedOp]] = {}
    for op in plan.ops:
        if op.line or op.name:
            lines.setdefault(_place(plan, op), []).append(op)
    costly = sorted(lines.items(), key=lambda item: -sum(op.compute_s for op in item[1]))
    named = []
    for line, ops in costly[:3]:
        share = sum(op.compute_s for op in ops) / step
        # Smaller parts do not explain a step.
        if share >= 0.05:
            named.append(f"{clean(line)} {share:.0%} ({_kinds(ops)})")
    if not named:
        return []
    compute = plan.prediction.compute_s / step
    shares = ", ".join(named)
    sentence = f"Compute is {compute:.0%} of the step. Its costliest lines, as shares of the step: {shares}."
    return [sentence, *_softmax_in_memory(plan), *_small_blocks(plan)]


def _place(plan: Plan, op: PlannedOp) -> str:
    """Return the source line of an op, else words for it.

    An optimizer that the planner adds to a model has no source line; its ops are outside of loops and gradients.
    """
    updates = "optimizer_state" in plan.roles.values()
    if not op.line and updates and re.fullmatch(r"jit\(\w+\)/\w+", op.name):
        return "the optimizer's update"
    return op.line or readable(op.name)


def _kinds(ops: Sequence[PlannedOp]) -> str:
    """Return the costliest kind of some ops, and the resource that limits most of their compute."""
    by_kind, by_limit = defaultdict[str, float](float), defaultdict[str, float](float)
    for op in ops:
        by_kind[op.kind] += op.compute_s
        by_limit[_LIMITS.get(op.bound, op.bound)] += op.compute_s
    kind, limit = (max(seconds, key=lambda each: seconds[each]) for seconds in (by_kind, by_limit))
    return f"{kind}, limited by {limit}"


def _softmax_in_memory(plan: Plan) -> list[str]:
    """Return a sentence if passes over scores of attention in memory take a tenth of the step.

    A kernel stores no scores, so it saves these passes. It is named by its flag for a configuration, else by JAX's
    function with its blocks. Scores of equal sizes count together, at the line of their softmax. Empty for devices
    without a kernel.
    """
    traits, step = Topology.parse(plan.topology).traits, plan.prediction.step_time_s
    flag = plan.source is not None and plan.source.is_configuration
    kernel = f"--attention {traits.attention}" if flag else traits.attention_kernel
    if not traits.attention_kernel:
        return []
    passes: dict[tuple[int, ...], list[PlannedOp]] = defaultdict(list)
    for op in plan.ops:
        if op.scores and op.bound == "memory" and not op.scores[3]:
            passes[op.scores].append(op)
    if not passes:
        return []
    scores, ops = max(passes.items(), key=lambda item: (_seconds(item[1]), item[0]))
    seconds = _seconds(ops)
    # An exponential that is fused into later ops passes over no memory; the reductions of a softmax always do.
    kinds = {kind: [op for op in ops if op.kind == kind] for kind in ("exponential", "reduce")}
    softmax = kinds["exponential"] or kinds["reduce"]
    if not softmax or seconds <= 0.1 * step:
        return []
    where = _place(plan, max(softmax, key=lambda op: op.compute_s))
    _, sizes = block_sizes_words(*scores[:3]) if traits.attention == "splash" else (0, "")
    if sizes and not flag:
        kernel += f" with {sizes}; its default of {LANES} takes longer"
    return [
        f"The softmax at {clean(where)} stores its scores in memory: a fused kernel ({kernel}) would save about "
        f"{format_seconds(seconds)} ({seconds / step:.0%} of the step)."
    ]


def _seconds(ops: Sequence[PlannedOp]) -> float:
    """Return the seconds of compute of some ops."""
    return sum(op.compute_s for op in ops)


def _small_blocks(plan: Plan) -> list[str]:
    """Return a sentence on kernels of attention that take a tenth of the step mostly to start steps of their grids.

    It states the blocks of fewer steps. Empty if there are no such kernels, or no larger blocks divide the sequences.
    """
    step = plan.prediction.step_time_s
    slow: list[PlannedOp] = []
    sizes, times = "", 1
    for op in plan.ops:
        if op.bound != "overhead" or len(op.scores) != 4 or not op.scores[3]:
            continue
        side, words = block_sizes_words(*op.scores[:3])
        if side * side > op.scores[3]:
            slow.append(op)
            sizes, times = sizes or words, max(times, side * side // op.scores[3])
    seconds = sum(op.compute_s for op in slow)
    if seconds <= 0.1 * step:
        return []
    queries, keys, _, block = slow[0].scores
    kernels, side = ", ".join(sorted({clean(op.kind) for op in slow})), math.isqrt(block)
    return [
        f"The kernels of attention ({kernels}) take {seconds / step:.0%} of the step: they compute {side} x {side} of "
        f"{queries} x {keys} scores at a time. With {sizes} they would start up to {times} times fewer steps."
    ]
