"""The bill of a plan: what its step does, from the choices that were made (see `cost._bill`)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Bill, Charge, Compute
from autoshard.plan.model._heavy import heavy_seconds
from autoshard.plan.model._model import HOST, Model, Node
from autoshard.plan.model._overlap import hiding_figures
from autoshard.plan.price._predict import reshard_overlap, reshard_relayouts, reshard_steps


def bill_of(model: Model, choices: NDArray[np.int64]) -> Bill:
    """All work and communication of one step; priced with the model's calibration it takes `evaluate`'s step time."""
    return Bill.of(model.mesh, [*_work(model, choices), *_communication(model, choices)])


def _work(model: Model, choices: NDArray[np.int64]) -> Iterator[Charge]:
    notes = _Notes(model.compute)
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


class _Notes:
    """A `Compute` that writes down what it is asked to price, of one state at a time."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.calls: list[tuple[str, tuple[tuple[str, Any], ...], tuple[float, ...]]] = []

    def taken(self) -> list[tuple[str, tuple[tuple[str, Any], ...], tuple[float, ...]]]:
        calls, self.calls = self.calls, []
        return calls

    def note(self, op: str, *amounts: Any, **said: Any) -> None:
        numbers = tuple(float(np.asarray(amount).reshape(-1)[0]) for amount in amounts)
        self.calls.append((op, tuple(sorted(said.items())), numbers))

    def dot_seconds(self, m: Any, n: Any, k: Any, batch: Any, dtype: str, size: Any) -> NDArray[np.float64]:
        self.note("dot", m, n, k, batch, size, dtype=dtype)
        return self.compute.dot_seconds(m, n, k, batch, dtype, size)

    def op_seconds(self, flops: Any, size: Any, dtype: str = "bf16", efficiency: Any = None) -> NDArray[np.float64]:
        used = 1.0 if efficiency is None else np.asarray(efficiency) / self.compute.calibration.matmul_efficiency
        self.note("op", flops, size, used, dtype=dtype)
        return self.compute.op_seconds(flops, size, dtype, efficiency)

    def attention_seconds(
        self, scores: Any, head: int, value_head: int, matmuls: int, dtype: str, size: Any
    ) -> NDArray[np.float64]:
        self.note("attention", scores, size, head=head, value_head=value_head, matmuls=matmuls, dtype=dtype)
        return self.compute.attention_seconds(scores, head, value_head, matmuls, dtype, size)

    def step_seconds(self, steps: Any) -> NDArray[np.float64]:
        self.note("steps", steps)
        return self.compute.step_seconds(steps)

    def sort_seconds(self, elements: Any, length: int, arrays: int, size: Any) -> NDArray[np.float64]:
        self.note("sort", elements, size, length=length, arrays=arrays)
        return self.compute.sort_seconds(elements, length, arrays, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compute, name)
