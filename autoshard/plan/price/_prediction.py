"""What is predicted of a choice, as plans carry it."""

from collections import defaultdict

from autoshard.plan.model._model import Model
from autoshard.plan.price._headroom import tight_seconds
from autoshard.plan.price._predict import Outcome
from autoshard.plan.record._parts import Collective, Prediction


def predict(model: Model, outcome: Outcome, memory_limit: int) -> Prediction:
    """An outcome as the record that plans carry."""
    step, compute = outcome.step_time_s, outcome.compute_s
    exposed = step - compute
    wire: dict[str, int] = {axis: 0 for axis in model.axis_names}
    for c in outcome.collectives:
        for axis, share in _wire_shares(model, c).items():
            wire[axis] += int(round(share))
    return Prediction(
        step_time_s=step,
        compute_s=compute,
        hidden_comm_s=outcome.hidden_s,
        exposed_comm_s=exposed,
        mfu=mfu(model, step),
        peak_bytes=outcome.peak_bytes,
        memory=outcome.memory,
        fits=outcome.peak_bytes <= memory_limit,
        wire_bytes=wire,
        collectives=outcome.collectives,
        peak_at=_op_name(model, outcome.peak_time),
        tight_s=tight_seconds(model.mesh.topology, outcome.peak_bytes, compute, outcome.hidden_s),
        host_bytes=outcome.host_bytes,
    )


def _wire_shares(model: Model, c: Collective) -> dict[str, float]:
    """A collective's wire bytes by mesh axis, by the same attribution as `Collectives.wire_bytes`."""
    shares = model.collectives.wire_bytes(c.kind, c.axes, 1.0)  # type: ignore[arg-type]
    whole = sum(float(v) for v in shares.values())
    return {axis: c.wire_bytes * float(v) / whole for axis, v in shares.items()} if whole else {}


def mfu(model: Model, step: float) -> float | None:
    """Model FLOPs (the program's own count, else the matmul FLOPs of the graph) over the peak of all devices."""
    flops = model.program.model_flops or model.graph.flops
    if not flops or step <= 0:
        return None
    dtypes: dict[str, float] = defaultdict(float)
    for op in model.graph.ops:
        if op.flops:
            dtypes[model.graph.tensors[op.operands[0]].dtype] += op.flops * model.graph.trips(op.loop)
    dtype = max(dtypes, key=lambda d: (dtypes[d], d), default="bfloat16")
    topology = model.mesh.topology
    return flops / (step * topology.peak_flops(dtype) * topology.num_devices)


def _op_name(model: Model, moment: int) -> str:
    ops = model.graph.ops
    if not ops:
        return ""
    op = ops[min(moment, len(ops) - 1)]
    return f"{op.kind} {op.name}".strip()
