"""The bill of a plan: what its step does, from the choices that were made (see `cost._bill`)."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Bill, Charge
from autoshard.plan.model._heavy import heavy_seconds
from autoshard.plan.model._model import HOST, Model, Node
from autoshard.plan.model._overlap import hiding_figures
from autoshard.plan.price._notes import PriceNotes
from autoshard.plan.price._reshard_times import reshard_overlap, reshard_relayouts, reshard_steps
from autoshard.plan.price._unpaid import unpaid_bytes


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
