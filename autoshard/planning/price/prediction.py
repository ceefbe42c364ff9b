"""Predictions of a choice in the form that plans store: its bill, and the gains of other compiler flags."""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import FLAG_SETS, Bill, Calibration, flag_set, with_flags
from autoshard.errors import UserError
from autoshard.graph import OpGraph, model_shares
from autoshard.planning.price.device_memory import tight_seconds
from autoshard.planning.price.evaluate import Outcome
from autoshard.planning.price.remat_values import AGAIN
from autoshard.planning.price.step_ledger import Ledger, itemise
from autoshard.planning.record.plan_parts import Collective, Prediction
from autoshard.planning.space.decision_model import Model


def predict(model: Model, outcome: Outcome, memory_limit: int) -> Prediction:
    """Convert an outcome into the record that plans store.

    All communication that does not overlap with compute counts as exposed, in seconds. Wire bytes are those of one
    device by mesh axis. `fits` compares the peak with `memory_limit`, in bytes of one device.
    """
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
        tight_s=tight_seconds(model, outcome.peak_bytes, compute, outcome.hidden_s),
        host_bytes=outcome.host_bytes,
    )


def _wire_shares(model: Model, c: Collective) -> dict[str, float]:
    """Return a collective's wire bytes by mesh axis, in proportion to `Collectives.wire_bytes`; empty for one that
    sends nothing.
    """
    shares = model.collectives.wire_bytes(c.kind, c.axes, 1.0)  # type: ignore[arg-type]
    total = sum(float(v) for v in shares.values())
    return {axis: c.wire_bytes * float(v) / total for axis, v in shares.items()} if total else {}


def mfu(model: Model, step: float) -> float | None:
    """Return the model FLOPs over the peak of all devices in a step of `step` seconds, as a share.

    None if there are no FLOPs or no seconds. The model FLOPs are the program's own count if it has one, else the count
    of the graph. The peak is that of the dtype in which most FLOPs multiply.
    """
    needed, dtype = model.graph.once(_model_flops)
    flops = model.program.model_flops or needed
    if not flops or step <= 0:
        return None
    topology = model.mesh.topology
    return flops / (step * topology.peak_flops(dtype) * topology.num_devices)


def _model_flops(graph: OpGraph) -> tuple[float, str]:
    """Return the matmul FLOPs that a graph's model needs in one step, and the dtype in which most FLOPs multiply.

    FLOPs that the backward pass recomputes do not count, nor do masked or recomputed scores of attention
    (`model_shares`).
    """
    shares, needed, multiplied = model_shares(graph), 0.0, defaultdict[str, float](float)
    for op in graph.ops:
        if op.flops:
            flops = op.flops * graph.trips(op.loop)
            multiplied[graph.multiplied_dtype(op)] += flops
            if AGAIN not in op.name:
                needed += flops * shares.get(op.id, 1.0)
    return needed, max(multiplied, key=lambda dtype: (multiplied[dtype], dtype), default="bfloat16")


def _op_name(model: Model, moment: int) -> str:
    """Return the kind and name of the op at a moment (op id); "" for a graph without ops.

    A moment after the last op gives the last op.
    """
    ops = model.graph.ops
    if not ops:
        return ""
    op = ops[min(moment, len(ops) - 1)]
    return f"{op.kind} {op.name}".strip()


def bill_of(ledger: Ledger) -> Bill:
    """Return all work and communication of one step.

    The bill, priced with the model's calibration, adds up to the step time of `evaluate`.
    """
    charges = (charge for row in ledger.rows for charge in row.charges)
    return Bill.of(ledger.model.mesh, charges, ledger.model.one_in_flight)


WORTH_SAYING = 0.02
"""Share of a step that a set of flags must gain to be proposed; less is within the noise of measured steps."""


def flag_gains(model: Model, choices: NDArray[np.int64], plain: Calibration) -> dict[str, float]:
    """Return the predicted step seconds for each set of compiler flags that gains at least `WORTH_SAYING`.

    The plan is the same for all sets; a plan made for those flags may gain more. The gain is relative to the step with
    the model's own calibration, its flags included. The result is empty for other backends than TPUs. `plain` is the
    calibration without flags.
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
            bill = bill_of(itemise(model, choices))
            now = bill.seconds(model.compute.calibration)
        step = bill.seconds(flagged.calibration)
        if step < (1.0 - WORTH_SAYING) * now:
            step_of_flags[name] = step
    return step_of_flags
