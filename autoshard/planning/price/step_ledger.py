"""Ledger of a step: one row for each piece of work and each collective under a choice of alternatives.

The tables of a plan are sums of these rows: its ops, timeline, bill, repeated work and segments. `evaluate` computes
the same step without them, and the tests compare the two.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import HOST, Charge
from autoshard.graph import Op, OpClass
from autoshard.planning.price.evaluate import tensor_spec
from autoshard.planning.price.node_prices import streams
from autoshard.planning.price.recorded_compute import RecordedCompute
from autoshard.planning.price.reshard_paths import Relayouts
from autoshard.planning.price.reshard_times import (
    cluster_names,
    reshard_cause,
    reshard_line,
    reshard_overlap,
    reshard_time,
    uncharged_bytes,
)
from autoshard.planning.space.decision_model import EXPOSED, Channel, Model, Node, Reshard, link_names
from autoshard.planning.space.op_models import FOLDED_OPS, heavy_seconds
from autoshard.planning.space.op_work import OpWork
from autoshard.planning.space.overlap import hiding_figures, lanes


Place = tuple[str, int]
"""`("op", id)`, or `("tensor", id)` for a tensor that is copied at no op: a loop's initial value, or a result."""


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerRow:
    """Work of a node in one channel, relayouts of a reshard, or one collective."""

    where: Node | Reshard
    """Decision that the row belongs to; `cause` and `line` are its name and source line."""
    kind: str
    """`compute`, `host memory` or `relayout` for work, else the kind of collective."""
    block: int
    """Loop that contains the work; -1 for none."""
    seconds: float
    """Seconds of one execution; negative for a softmax that stores fewer bytes than its matmuls were charged for."""
    times: float
    """Number of executions in one step; 1 for a node's work, whose seconds are those of the step."""
    lanes: Mapping[Channel, float]
    """Share of the seconds in each channel. A hidden collective has its share in the channel of each of its links."""
    charges: tuple[Charge, ...]
    """Calls to the cost model for all executions in one step, with which other calibrations price the row again."""
    axes: tuple[str, ...] = ()
    """Mesh axes of a collective; none for work."""
    bytes: float = 0.0
    """Bytes of one execution of a collective, as `Collectives.wire_bytes` counts them."""
    cause: str = ""
    """Name of the node, or of the resharded tensor (`reshard_cause`)."""
    line: str = ""
    """Source line; empty if unknown."""

    @property
    def op(self) -> int:
        """Id of the heavy op, or of the op that the resharded tensor enters or leaves; -1 for none."""
        if isinstance(self.where, Reshard):
            return self.where.op
        return self.where.ref if self.where.kind == "op" else -1

    @property
    def step_s(self) -> float:
        """Seconds of all executions in one step."""
        return self.seconds * self.times

    @property
    def exposed_s(self) -> float:
        """Seconds in one step of a collective that overlap with nothing; 0 for work."""
        return self.seconds * self.lanes.get(EXPOSED, 0.0) * self.times

    def channels(self) -> Iterator[tuple[Channel, float]]:
        """Yield the channels with their seconds in one step."""
        for channel, share in self.lanes.items():
            yield channel, self.seconds * share * self.times


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPass:
    """Bytes of one tensor that a fusion reads or writes, or that are copied apart from any fusion."""

    place: Place
    """Place to which the pass belongs: the fusion's last op, or the tensor."""
    tensor: int
    block: int
    """Loop that contains the pass; -1 for none."""
    times: float
    """Number of passes in one step."""
    size: float
    """Main-memory bytes of one device that take as long as one pass (`Residency.streamed`), without padding."""
    on_host: bool
    """True if the bytes go to or from the host's memory."""
    axes: tuple[str, ...]
    """Mesh axes that split the tensor."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger:
    """All work and communication of one step on one device under a choice of alternatives."""

    model: Model
    choices: NDArray[np.int64]
    rows: tuple[LedgerRow, ...]
    """Rows of nodes in their order, then rows of reshards in their order."""
    passes: tuple[MemoryPass, ...]
    """Memory traffic of fusions, by which a cluster's seconds are divided among its ops."""


def itemise(model: Model, choices: NDArray[np.int64]) -> Ledger:
    """Return the ledger of a choice of one alternative per node. Raises `ValueError` if a forbidden pair was chosen."""
    rows = (*_node_rows(model, choices), *_reshard_rows(model, choices))
    return Ledger(model, choices, rows, tuple(memory_passes(model, choices)))


def _node_rows(model: Model, choices: NDArray[np.int64]) -> Iterator[LedgerRow]:
    """Yield the rows of nodes: their compute and host traffic, one for each channel, and the collectives inside ops."""
    notes = RecordedCompute(model.compute)
    for node, choice in zip(model.nodes, choices.tolist(), strict=True):
        op = model.graph.ops[node.ref] if node.kind == "op" else None
        for channel, seconds in node.time.items():
            if channel == EXPOSED:
                continue
            block, what = channel
            if op is None:
                charges = _streamed(model, node, choice, channel)
            else:
                where = (model.graph, op, node.states[choice : choice + 1], model.axis_sizes)
                heavy_seconds(OpWork(*where, notes, model.residency, model.padding))  # type: ignore[arg-type]
                charges = notes.pop_charges(block, model.graph.trips(block))
            line = "" if op is None else op.line
            yield LedgerRow(
                node, what, block, float(seconds[choice]), 1.0, {channel: 1.0}, charges, cause=node.name, line=line
            )
        if op is not None:
            yield from _inside(model, node, op, choice)


def _streamed(model: Model, node: Node, choice: int, channel: Channel) -> tuple[Charge, ...]:
    """Return the charges that make up a cluster's seconds in a channel: launches of its fusions, and memory or host
    traffic for the rest.
    """
    block, what = channel
    seconds = float(node.time[channel][choice])
    if what == HOST:
        return (Charge("host", (), (seconds / float(model.compute.host_seconds(1.0)),), block, 1.0),)
    launches = node.launches.get(block, 0.0)
    traffic_s = seconds - launches * model.compute.calibration.op_overhead_s
    stream = Charge("stream", (), (traffic_s / float(model.compute.memory_seconds(1.0)),), block, 1.0)
    return (stream, Charge("launch", (), (1.0,), block, launches)) if launches else (stream,)


def _inside(model: Model, node: Node, op: Op, choice: int) -> Iterator[LedgerRow]:
    """Yield the rows of the collectives inside an op in its chosen state; those without bytes are left out."""
    for inner in node.inner:
        size = float(inner.size[choice])
        if size <= 0:
            continue
        axes = tuple(model.axis_names[a] for a in inner.axes)
        seconds = float(inner.times(model.collectives, choice)[0][0]) / inner.count
        exposed = 1.0 if inner.hidden is None else 1.0 - float(inner.hidden[choice])
        times = model.graph.trips(op.loop) * inner.count
        # The hidden part overlaps with the op's own compute and occupies no channel.
        charge = Charge(inner.as_kind or inner.kind, (("axes", axes),), (size,), op.loop, times * exposed)
        yield LedgerRow(
            node, inner.kind, op.loop, seconds, times, {EXPOSED: exposed}, (charge,), axes, size * inner.senders,
            node.name, op.line,
        )  # fmt: skip


def _reshard_rows(model: Model, choices: NDArray[np.int64]) -> Iterator[LedgerRow]:
    """Yield the rows of reshards: relayouts with softmax corrections as one row, then each collective. Free reshards
    have none.
    """
    link_of, named = link_names(model.mesh), cluster_names(model)
    for reshard in model.reshards:
        timing = reshard_time(model, reshard, choices)
        relaid = _relaid(reshard, timing.relayouts, uncharged_bytes(model, reshard, choices))
        if not relaid and not timing.steps:
            continue
        cause, line = reshard_cause(model, reshard, named), reshard_line(model, reshard)
        if relaid:
            seconds = sum(charge.seconds(model.compute) for charge in relaid)
            lane = {(reshard.block, "compute"): 1.0}
            yield LedgerRow(
                reshard, "relayout", reshard.block, seconds, reshard.trips, lane, relaid, cause=cause, line=line
            )
        overlap = reshard_overlap(model, reshard, choices)
        for kind, axes, size, seconds in timing.steps:
            hides = hiding_figures(model.collectives, overlap, kind, axes)
            parts = (((), reshard.exposed), (hides, 1.0 - reshard.exposed))
            charges = tuple(
                Charge(kind, (("axes", axes),), (size,), reshard.block, reshard.trips * part, figures)
                for figures, part in parts
                if part
            )
            shares = lanes(model.collectives, link_of, overlap, kind, axes, size, reshard.block, reshard.exposed)
            yield LedgerRow(
                reshard, kind, reshard.block, seconds, reshard.trips, shares, charges, axes, size, cause, line
            )


def _relaid(reshard: Reshard, relayouts: Relayouts, uncharged: float) -> tuple[Charge, ...]:
    """Return the charges of a reshard's relayouts and of the bytes that a softmax credits without a charge; empty
    amounts are left out.
    """
    amounts = {"launch": float(relayouts.ops), "relayout": float(relayouts.size), "stream": uncharged}
    return tuple(
        Charge(name, (), (amount,), reshard.block, reshard.trips) for name, amount in amounts.items() if amount
    )


def memory_passes(model: Model, choices: NDArray[np.int64]) -> Iterator[MemoryPass]:
    """Yield the memory traffic of fusions and copies, by which the seconds that `NodePricer` adds up by cluster are
    divided.
    """

    def passes(place: Place, tensor: int, block: int, times: float, reader: int = -1) -> Iterator[MemoryPass]:
        """Yield the pass of a tensor with a cluster, with the bytes of its planned shard; none for other tensors."""
        if model.structure.cluster_of[tensor] < 0:
            return
        record, spec = model.graph.tensors[tensor], tensor_spec(model, choices, tensor)
        local = math.prod(spec.local_shape(record.shape, model.mesh.axes)) * record.itemsize
        on_host = tensor in model.liveness.hosted
        size = float(local) if on_host else float(model.residency.streamed(tensor, local, reader))
        yield MemoryPass(place, tensor, block, times, size, on_host, spec.axes)

    for fusion in model.liveness.fusions:
        op = model.graph.ops[fusion.root]
        if op.op_class is not OpClass.HEAVY or op.kind in FOLDED_OPS:
            for tensor, reader in (*((t, -1) for t in fusion.moved), *((t, op.id) for t in fusion.reads)):
                yield from passes(("op", op.id), tensor, op.loop, model.graph.trips(op.loop), reader)
    for each in model.liveness.extra_traffic:
        times = streams(each, model.graph, model.compute)
        yield from passes(("tensor", each.tensor), each.tensor, each.block, times)
