"""Ops without a sharding rule, with their share of the step, and what is said of them and of opaque calls."""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import SMALL, Op
from autoshard.plan.model._model import Model
from autoshard.plan.record._parts import Unruled


def find_unruled(model: Model, choices: NDArray[np.int64], step_time_s: float) -> tuple[Unruled, ...]:
    """Ops planned as replicated for lack of a rule, by kind or target, the largest share of the step first."""
    groups: dict[tuple[str, bool], list[tuple[float, Op]]] = defaultdict(list)
    for op_id in model.graph.without_rule:
        op = model.graph.ops[op_id]
        kind = op.opaque.target if op.opaque else op.kind
        groups[(kind, op.opaque is not None)].append((_seconds(model, choices, op), op))
    found = []
    for (kind, custom), ops in groups.items():
        seconds = sum(each for each, _ in ops)
        worst = max(ops, key=lambda item: item[0])[1]
        share = seconds / step_time_s if step_time_s > 0 else 0.0
        found.append(Unruled(kind, custom, len(ops), seconds, share, worst.name))
    return tuple(sorted(found, key=lambda u: (-u.seconds, u.kind)))


def _seconds(model: Model, choices: NDArray[np.int64], op: Op) -> float:
    number = model.op_node.get(op.id)
    if number is None:
        return 0.0
    return sum(float(seconds[int(choices[number])]) for seconds in model.nodes[number].time.values())


def _is_small(target: str) -> bool:
    return any(part in target for part in SMALL)


def unruled_lines(unruled: tuple[Unruled, ...]) -> list[str]:
    """One sentence for each kind."""
    lines = []
    for each in unruled:
        what = f"custom call `{each.kind}`" if each.custom_call else each.kind
        where = f" ({each.example})" if each.example and each.example != each.kind else ""
        count = f"{each.count} x " if each.count > 1 else ""
        line = (
            f"{count}{what}{where} has no sharding rule: every device repeats it whole ({each.share:.1%} of the step)"
        )
        if each.custom_call:
            line += f'; give it one with autoshard.register_rule("{each.kind}", "b ... -> b ...")'
        lines.append(line + ".")
    return lines


def call_lines(model: Model) -> list[str]:
    """Return sentences about calls that no device can run on a shard, and about those of unknown work."""
    calls = [(op, op.opaque) for op in model.graph.ops if op.opaque is not None]
    fixed = sorted({call.target for op, call in calls if op.rule is not None and call.fixed and call.on_shards})
    unknown = sorted({call.target for op, call in calls if not (op.flops or call.traffic or _is_small(call.target))})
    return [
        f"It is not known how much `{target}` computes: its time is that of reading its operands and writing its "
        f'results; give it FLOPs with autoshard.register_rule("{target}", ..., flops=...).'
        for target in unknown
    ] + [
        f"`{target}` is compiled for whole tensors in the module: to run the plan where it is split, plan the Python "
        "program it was traced from (autoshard then builds the kernel for its shards)."
        for target in fixed
    ]
