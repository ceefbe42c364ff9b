"""Predictions of a choice in the form that plans store: its bill, and the gains of other compiler flags."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import FLAG_SETS, Bill, Calibration, Charge, flag_set, with_flags
from autoshard.errors import UserError
from autoshard.planning.price.device_memory import tight_seconds
from autoshard.planning.price.evaluate import Outcome
from autoshard.planning.price.node_prices import RecordedCompute
from autoshard.planning.price.reshard_times import reshard_overlap, reshard_relayouts, reshard_steps
from autoshard.planning.price.softmax_credit import uncharged_bytes
from autoshard.planning.record.plan_parts import Collective, Prediction
from autoshard.planning.space.decision_model import HOST, Model, Node
from autoshard.planning.space.op_models import heavy_seconds
from autoshard.planning.space.op_work import OpWork
from autoshard.planning.space.overlap import hiding_figures


def predict(model: Model, outcome: Outcome, memory_limit: int) -> Prediction:
    """Convert an outcome into the record that plans store."""
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
    """Return a collective's wire bytes by mesh axis, attributed as `Collectives.wire_bytes` does."""
    shares = model.collectives.wire_bytes(c.kind, c.axes, 1.0)  # type: ignore[arg-type]
    total = sum(float(v) for v in shares.values())
    return {axis: c.wire_bytes * float(v) / total for axis, v in shares.items()} if total else {}


def mfu(model: Model, step: float) -> float | None:
    """Return the model FLOPs over the peak of all devices in a step of `step` seconds; None if there are no FLOPs.

    The model FLOPs are the program's own count if it has one, else the matmul FLOPs of the graph. The peak is that of
    the dtype with the most FLOPs.
    """
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
    """Return the kind and name of the op at a moment, "" for a graph without ops."""
    ops = model.graph.ops
    if not ops:
        return ""
    op = ops[min(moment, len(ops) - 1)]
    return f"{op.kind} {op.name}".strip()


def bill_of(model: Model, choices: NDArray[np.int64]) -> Bill:
    """Return all work and communication of one step.

    The bill, priced with the model's calibration, adds up to the step time of `evaluate`.
    """
    return Bill.of(model.mesh, [*_work(model, choices), *_communication(model, choices)])


def _work(model: Model, choices: NDArray[np.int64]) -> Iterator[Charge]:
    """Yield the charges of nodes: the calls to the cost model for heavy ops, and the memory traffic of clusters."""
    notes = RecordedCompute(model.compute)
    for node, choice in zip(model.nodes, choices.tolist(), strict=True):
        if node.kind == "op":
            op = model.graph.ops[node.ref]
            trips = model.graph.trips(op.loop)
            where = (model.graph, op, node.states[choice : choice + 1], model.axis_sizes)
            heavy_seconds(OpWork(*where, notes, model.residency, model.padding))  # type: ignore[arg-type]
            yield from (Charge(*called, op.loop, trips) for called in notes.pop_calls())
        else:
            yield from _streamed(model, node, choice)


def _streamed(model: Model, node: Node, choice: int) -> Iterator[Charge]:
    """Yield the charges for the memory traffic and launches of a cluster's fusions, which make up the node's time."""
    overhead = model.compute.calibration.op_overhead_s
    for (block, what), seconds in node.time.items():
        name = "host" if what == HOST else "stream"
        byte_s = model.compute.host_seconds(1.0) if what == HOST else model.compute.memory_seconds(1.0)
        launches = node.launches.get(block, 0.0) if what == "compute" else 0.0
        traffic_s = float(seconds[choice]) - launches * overhead
        yield Charge(name, (), (traffic_s / float(byte_s),), block, 1.0)
        if launches:
            yield Charge("launch", (), (1.0,), block, launches)


def _communication(model: Model, choices: NDArray[np.int64]) -> Iterator[Charge]:
    """Yield the charges of reshards, with their relayouts and softmax corrections, and of collectives inside ops."""
    for reshard in model.reshards:
        relayout = reshard_relayouts(model, reshard, choices)
        for name, amount in (("launch", float(relayout.ops)), ("relayout", float(relayout.size))):
            if amount:
                yield Charge(name, (), (amount,), reshard.block, reshard.trips)
        if unpaid := uncharged_bytes(model, reshard, choices):
            yield Charge("stream", (), (unpaid,), reshard.block, reshard.trips)
        overlap = reshard_overlap(model, reshard, choices)
        for kind, axes, size, _ in reshard_steps(model, reshard, choices):
            hides = hiding_figures(model.collectives, overlap, kind, axes)
            yield Charge(kind, (("axes", axes),), (size,), reshard.block, reshard.trips, hides)
    for node, choice in zip(model.nodes, choices.tolist(), strict=True):
        for inner in node.inner:
            if inner.size[choice] > 0:
                axes = tuple(model.axis_names[a] for a in inner.axes)
                loop = model.graph.ops[node.ref].loop
                exposed = 1.0 if inner.hidden is None else 1.0 - float(inner.hidden[choice])
                times = model.graph.trips(loop) * inner.count * exposed
                yield Charge(inner.as_kind or inner.kind, (("axes", axes),), (float(inner.size[choice]),), loop, times)


WORTH_SAYING = 0.02
"""Share of a step that a set of flags must gain to be proposed; less is within the noise of measured steps."""


def flag_gains(model: Model, choices: NDArray[np.int64], plain: Calibration) -> dict[str, float]:
    """Return the predicted step seconds for each set of compiler flags that gains at least `WORTH_SAYING`.

    The plan is the same for all sets; a plan made for those flags may gain more. There are no sets for other backends
    than TPUs. `plain` is the calibration without flags.
    """
    chip = model.mesh.topology.chip
    if not chip.traits.compiles_ahead:
        return {}
    bill, now = None, 0.0
    step_of_flags = {}
    for name in FLAG_SETS:
        try:
            flagged = with_flags(plain, flag_set(name, chip))
        except UserError:
            continue  # a set that the chip cannot run
        if name == "default" or not flagged.figures:
            continue
        if bill is None:
            bill = bill_of(model, choices)
            now = bill.seconds(model.compute.calibration)
        step = bill.seconds(flagged.calibration)
        if step < (1.0 - WORTH_SAYING) * now:
            step_of_flags[name] = step
    return step_of_flags
