"""Predictions of a choice as plans carry them: its bill, and gains of other compiler flags."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import FLAG_SETS, Bill, Calibration, Charge, flag_set, with_flags
from autoshard.errors import UserError
from autoshard.planning.price.device_memory import tight_seconds
from autoshard.planning.price.evaluate import Outcome
from autoshard.planning.price.node_prices import PriceNotes
from autoshard.planning.price.reshard_times import reshard_overlap, reshard_relayouts, reshard_steps
from autoshard.planning.price.softmax_credit import unpaid_bytes
from autoshard.planning.record.plan_parts import Collective, Prediction
from autoshard.planning.space.decision_model import HOST, Model, Node
from autoshard.planning.space.op_strategies import heavy_seconds
from autoshard.planning.space.overlap import hiding_figures


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


def bill_of(model: Model, choices: NDArray[np.int64]) -> Bill:
    """All work and communication of one step; priced with the model's calibration it takes `evaluate`'s step time."""
    return Bill.of(model.mesh, [*_work(model, choices), *_communication(model, choices)])


def _work(model: Model, choices: NDArray[np.int64]) -> Iterator[Charge]:
    notes = PriceNotes(model.compute)
    for node, choice in zip(model.nodes, choices.tolist(), strict=True):
        if node.kind == "op":
            op = model.graph.ops[node.ref]
            trips = model.graph.trips(op.loop)
            states, axes = node.states[choice : choice + 1], model.axis_sizes
            heavy_seconds(model.graph, op, states, axes, notes, model.residency, model.padding)  # type: ignore[arg-type]
            yield from (Charge(*called, op.loop, trips) for called in notes.taken())
        else:
            yield from _streamed(model, node, choice)


def _streamed(model: Model, node: Node, choice: int) -> Iterator[Charge]:
    """What a cluster's fusions read and write, and what starting them takes; its times are those of nothing else."""
    overhead = model.compute.calibration.op_overhead_s
    for (block, what), seconds in node.time.items():
        name = "host" if what == HOST else "stream"
        one = model.compute.host_seconds(1.0) if what == HOST else model.compute.memory_seconds(1.0)
        launched = node.launches.get(block, 0.0) if what == "compute" else 0.0
        moving = float(seconds[choice]) - launched * overhead
        yield Charge(name, (), (moving / float(one),), block, 1.0)
        if launched:
            yield Charge("launch", (), (1.0,), block, launched)


def _communication(model: Model, choices: NDArray[np.int64]) -> Iterator[Charge]:
    for reshard in model.reshards:
        again = reshard_relayouts(model, reshard, choices)
        for name, amount in (("launch", float(again.ops)), ("relayout", float(again.size))):
            if amount:
                yield Charge(name, (), (amount,), reshard.block, reshard.trips)
        if owed := unpaid_bytes(model, reshard, choices):
            yield Charge("stream", (), (owed,), reshard.block, reshard.trips)
        overlap = reshard_overlap(model, reshard, choices)
        for kind, axes, size, _ in reshard_steps(model, reshard, choices):
            hides = hiding_figures(model.collectives, overlap, kind, axes)
            yield Charge(kind, (("axes", axes),), (size,), reshard.block, reshard.trips, hides)
    for node, choice in zip(model.nodes, choices.tolist(), strict=True):
        for inner in node.inner:
            if inner.size[choice] > 0:
                axes = tuple(model.axis_names[a] for a in inner.axes)
                loop = model.graph.ops[node.ref].loop
                waited = 1.0 if inner.hidden is None else 1.0 - float(inner.hidden[choice])
                times = model.graph.trips(loop) * inner.count * waited
                yield Charge(inner.as_kind or inner.kind, (("axes", axes),), (float(inner.size[choice]),), loop, times)


WORTH_SAYING = 0.02
"""Share of a step that a set of flags must gain to be proposed; less is within the noise of measured steps."""


def flag_gains(model: Model, choices: NDArray[np.int64], plain: Calibration) -> dict[str, float]:
    """Seconds of a step by each set of flags that makes a plan's step shorter by `WORTH_SAYING`; empty off TPUs.

    `plain` has the figures without flags. The plan stays as it is; made for those flags it may gain more.
    """
    chip = model.mesh.topology.chip
    if not chip.traits.compiles_ahead:
        return {}
    bill, now = None, 0.0
    found = {}
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
            found[name] = step
    return found
