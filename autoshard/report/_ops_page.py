"""Figures of a plan's page below the tensors: its ops, its roofline, what memory consists of, and the load of links."""

from typing import Any

from autoshard.cost import Topology, dtype_class
from autoshard.plan import Plan
from autoshard.report._names import clean, readable


BOUNDS = {
    "compute": "compute: its units are busy for at least half of its time",
    "memory": "memory: it waits for what it reads and writes",
    "network": "network: it waits longer for communication than it computes",
    "overhead": "overhead: starting it takes at least half of its time",
    "host": "host: it waits for the host's memory",
}
"""What each of `PlannedOp.bound` means, for people."""


def ops_data(plan: Plan) -> list[dict[str, Any]]:
    """Rows of the op table, the longest first: seconds, FLOPs and bytes of one device in one step.

    `time_s` is what the step waits for: compute, and communication that is not hidden behind it.
    """
    rows = [
        {
            "name": clean(readable(op.name), 200) if op.name else "the rest, of many small ones",
            "full": clean(op.name, 400),
            "kind": clean(op.kind, 60),
            "line": clean(op.line, 200),
            "parameter": clean(op.parameter, 200),
            "times": op.times,
            "time_s": op.compute_s + op.waited_s,
            "compute_s": op.compute_s,
            "sent_s": op.sent_s,
            "waited_s": op.waited_s,
            "flops": op.flops,
            "moved_bytes": op.moved_bytes,
            "wire_bytes": op.wire_bytes,
            "bound": op.bound if op.bound in BOUNDS else "memory",
        }
        for op in plan.ops
    ]
    return sorted(rows, key=lambda row: -row["time_s"])


def ops_summary(plan: Plan) -> dict[str, Any] | None:
    """What the rows of the op table come to together; None for a plan that does not know its ops."""
    if not plan.ops:
        return None
    compute, waited = sum(op.compute_s for op in plan.ops), sum(op.waited_s for op in plan.ops)
    step = plan.prediction.step_time_s
    return {
        "compute_s": compute,
        "waited_s": waited,
        "share": min(1.0, (compute + waited) / step) if step > 0 else 1.0,
        "chip": Topology.parse(plan.topology).chip.name,
    }


def roofs(plan: Plan) -> dict[str, Any]:
    """Peaks of one device: FLOP/s by dtype, and bytes a second of main memory."""
    topology = Topology.parse(plan.topology)
    held = {plan.dtypes[name] for name in plan.arguments if plan.is_weight(name)}
    peaks: dict[float, str] = {}
    for name in ("bf16", *sorted({dtype_class(dtype) for dtype in held})):
        peaks.setdefault(topology.peak_flops(name), name)
    return {
        "flops": {name: peak for peak, name in peaks.items()},
        "bytes": topology.memory_bytes_per_s,
        "chip": topology.chip.name,
    }


def memory_data(plan: Plan) -> dict[str, Any] | None:
    """What the memory chart shows at each moment, and the tensors it consists of: [name, kind, count, bytes, first,
    last moment]. None for a plan that does not know."""
    timeline = plan.timeline
    if timeline is None or len(timeline.moments_s) < 2 or not timeline.held:
        return None
    return {
        "moments": list(timeline.moments_s),
        "kinds": {kind: list(sizes) for kind, sizes in timeline.memory.items()},
        "held": [
            [clean(readable(row.name), 200) or "unnamed", row.kind, row.count, row.bytes, row.first, row.last]
            for row in timeline.held
        ],
    }
