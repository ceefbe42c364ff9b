"""Seconds of a step by op and by collective, and the rows of them that a plan stores."""

import dataclasses
import math
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import WORK
from autoshard.graph import OpClass
from autoshard.planning.price.evaluate import cluster_names, reshard_cause, reshard_line, tensor_spec
from autoshard.planning.price.node_prices import RecordedCompute, streams
from autoshard.planning.price.reshard_times import (
    ReshardStep,
    relayout_seconds,
    reshard_overlap,
    reshard_relayouts,
    reshard_steps,
)
from autoshard.planning.record.plan_parts import Collective, PlannedOp
from autoshard.planning.record.spec import pattern
from autoshard.planning.space.decision_model import EXPOSED, HOST, Channel, Model, Node, link_names
from autoshard.planning.space.op_models import FOLDED_OPS, heavy_seconds
from autoshard.planning.space.op_work import OpWork
from autoshard.planning.space.overlap import lanes
from autoshard.program import WEIGHTS


Place = tuple[str, int]
"""`("op", id)`, or `("tensor", id)` for a tensor that is copied at no op: a loop's initial value, or a result."""


@dataclasses.dataclass(slots=True)
class PlaceWork:
    """Work of one device at one place in one step."""

    flops: float = 0.0
    """FLOPs of the matrix unit."""
    moved_bytes: float = 0.0
    """Bytes read from and written to main memory."""
    busy_s: float = 0.0
    """Seconds that the compute units need without memory traffic."""
    overhead_s: float = 0.0
    """Seconds of launching ops and of the grid steps of kernels."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpPrices:
    """Parts of a plan's predicted step; together they add up to the prediction."""

    compute: dict[Place, float]
    """Seconds of compute in one step; a fusion's reads and writes count at its last op."""
    host: dict[Place, float]
    """Seconds of host memory traffic in one step, which overlaps with compute."""
    inside: dict[int, tuple[Collective, ...]]
    """Collectives by op: halos, and those that reduce its partial results or reshard its result."""
    work: dict[Place, PlaceWork]
    """Work behind the seconds of compute, by place."""
    moved: dict[tuple[int, int], tuple[Collective, ...]]
    """Collectives that reshard an operand, by (tensor, consuming op); op -1 for results tied to an argument."""


def price_ops(model: Model, choices: NDArray[np.int64]) -> OpPrices:
    """Return all seconds and collectives that `evaluate` counts for the same choices, by their place in the program.

    Raises ValueError if a forbidden pair was chosen.
    """
    compute: dict[Place, float] = defaultdict(float)
    host: dict[Place, float] = defaultdict(float)
    work: dict[Place, PlaceWork] = defaultdict(PlaceWork)
    traffic, notes = _traffic(model, choices), RecordedCompute(model.compute)
    owed: dict[int, float] = defaultdict(float)
    one_byte, overhead = float(model.compute.memory_seconds(1.0)), model.compute.calibration.op_overhead_s
    for node, choice in zip(model.nodes, choices.tolist(), strict=True):
        for channel, table in node.time.items():
            seconds = float(table[choice])
            if channel == EXPOSED or not seconds:
                continue
            # The node of a softmax has negative seconds where its matmuls were charged for tensors that it does not
            # store.
            if seconds < 0:
                owed[node.ref] += seconds
                continue
            shares: dict[Place, float] = {("op", node.ref): 1.0}
            if node.kind == "cluster":
                shares = traffic.get((node.ref, channel)) or {
                    ("tensor", model.structure.clusters[node.ref].tensors[0]): 1.0
                }
            total = sum(shares.values())
            for place, share in shares.items():
                (host if channel[1] == HOST else compute)[place] += seconds * share / total
                if node.kind != "op" and channel[1] != HOST:
                    launch_s = node.launches.get(channel[0], 0.0) * overhead
                    work[place].overhead_s += launch_s * share / total
                    work[place].moved_bytes += max(0.0, seconds - launch_s) / one_byte * share / total
        if node.kind == "op":
            _add_work(work["op", node.ref], model, node, choice, notes)
    for reshard in model.reshards:
        if relayout_s := relayout_seconds(model, reshard, choices):
            place = ("op", reshard.op) if reshard.op >= 0 else ("tensor", reshard.tensor)
            launch_s = float(reshard_relayouts(model, reshard, choices).ops) * overhead * reshard.trips
            compute[place] += relayout_s
            work[place].overhead_s += launch_s
            work[place].moved_bytes += max(0.0, relayout_s - launch_s) / one_byte
    for place, seconds in _taken_back(model, owed, compute).items():
        compute[place] += seconds
        work[place].moved_bytes = max(0.0, work[place].moved_bytes + seconds / one_byte)
    inside, moved = _collectives(model, choices)
    return OpPrices(dict(compute), dict(host), inside, dict(work), moved)


def _taken_back(model: Model, owed: dict[int, float], compute: dict[Place, float]) -> dict[Place, float]:
    """Return the negative seconds of softmaxes by place of their adjacent matmuls, in proportion to the matmuls'
    compute.

    Such a softmax stores fewer bytes than its matmuls were charged for. The caller adds the result to `compute`.

    - `owed`: negative seconds by cluster.
    - `compute`: seconds of compute by place.
    """
    credits: dict[Place, float] = defaultdict(float)
    for softmax in model.liveness.softmaxes:
        if softmax.cluster not in owed:
            continue
        matmuls = [
            ("op", op.id)
            for op in model.graph.ops
            if op.op_class is OpClass.HEAVY and not softmax.credited_tensors.isdisjoint((*op.operands, *op.results))
        ]
        paid = sum(compute[place] for place in matmuls)
        for place in matmuls:
            credits[place] += owed[softmax.cluster] * compute[place] / paid
    return credits


def _add_work(work: PlaceWork, model: Model, node: Node, choice: int, notes: RecordedCompute) -> None:
    """Add the work of a heavy op in its chosen state, from the calls that `heavy_seconds` makes to the cost model."""
    op, compute = model.graph.ops[node.ref], model.compute
    trips = model.graph.trips(op.loop)
    states = node.states[choice : choice + 1]
    where = (model.graph, op, states, model.axis_sizes)
    heavy_seconds(OpWork(*where, notes, model.residency, model.padding))  # type: ignore[arg-type]
    for name, keywords, amounts in notes.pop_calls():
        given = dict(keywords)
        if name == "again":
            work.busy_s += float(WORK[name](compute, *amounts, **given)) * trips
            continue
        if name == "steps":
            work.overhead_s += float(WORK[name](compute, *amounts)) * trips
            continue
        # Positions of the amounts that are bytes of memory traffic.
        sizes = (4, 5) if name == "dot" else (1,)
        still = tuple(0.0 if at in sizes else amount for at, amount in enumerate(amounts))
        started = compute.calibration.op_overhead_s
        work.moved_bytes += sum(amounts[at] for at in sizes) * trips
        work.busy_s += max(0.0, float(WORK[name](compute, *still, **given)) - started) * trips
        work.overhead_s += started * trips
        if name == "dot":
            work.flops += 2.0 * math.prod(amounts[:4]) * trips
        elif name == "attention":
            work.flops += amounts[0] * given["matmuls"] * (given["head"] + given["value_head"]) * trips
        elif name == "op":
            work.flops += amounts[0] * trips


def _traffic(model: Model, choices: NDArray[np.int64]) -> dict[tuple[int, Channel], dict[Place, float]]:
    """Return by (cluster, channel) the bytes at every place: the fusions and copies whose time `NodePricer` adds up."""
    traffic: dict[tuple[int, Channel], dict[Place, float]] = defaultdict(lambda: defaultdict(float))

    def note(place: Place, tensor: int, block: int, times: float) -> None:
        record, cluster = model.graph.tensors[tensor], model.structure.cluster_of[tensor]
        if cluster < 0:
            return
        shape = tensor_spec(model, choices, tensor).local_shape(record.shape, model.mesh.axes)
        local = math.prod(shape) * record.itemsize
        away = tensor in model.liveness.hosted
        size = float(local) if away else float(model.residency.streamed(tensor, local))
        if size * times > 0:
            traffic[cluster, (block, HOST if away else "compute")][place] += size * times

    for fusion in model.liveness.fusions:
        op = model.graph.ops[fusion.root]
        if op.op_class is not OpClass.HEAVY or op.kind in FOLDED_OPS:
            for tensor in (*fusion.moved, *fusion.reads):
                note(("op", op.id), tensor, op.loop, model.graph.trips(op.loop))
    for each in model.liveness.extra_traffic:
        note(("tensor", each.tensor), each.tensor, each.block, streams(each, model.graph, model.compute))
    return traffic


def _collectives(
    model: Model, choices: NDArray[np.int64]
) -> tuple[dict[int, tuple[Collective, ...]], dict[tuple[int, int], tuple[Collective, ...]]]:
    """Return the collectives inside ops or at their results, by op, and those of operands.

    The latter are by (tensor, consuming op).
    """
    inside: dict[int, list[Collective]] = defaultdict(list)
    moved: dict[tuple[int, int], tuple[Collective, ...]] = {}
    for node, choice in zip(model.nodes, choices.tolist(), strict=True):
        for inner in node.inner:
            size = float(inner.size[choice])
            if size > 0:
                op = model.graph.ops[node.ref]
                axes = tuple(model.axis_names[a] for a in inner.axes)
                seconds, exposed = (float(each[0]) / inner.count for each in inner.times(model.collectives, choice))
                step = (inner.kind, axes, size * inner.senders, seconds)
                trips, waited = model.graph.trips(op.loop) * inner.count, exposed / seconds if seconds else 1.0
                inside[op.id].append(_collective(model, step, trips, waited, node.name, op.line))
    for (tensor, op_id), collectives in _reshards(model, choices).items():
        if op_id >= 0 and tensor in model.graph.ops[op_id].results:
            inside[op_id] += collectives
        else:
            moved[tensor, op_id] = tuple(collectives)
    return {op_id: tuple(collectives) for op_id, collectives in inside.items()}, moved


def _reshards(model: Model, choices: NDArray[np.int64]) -> dict[tuple[int, int], list[Collective]]:
    """Return the collectives of every reshard, by (tensor, op that it enters or leaves)."""
    collectives: dict[tuple[int, int], list[Collective]] = defaultdict(list)
    link_of, named = link_names(model.mesh), cluster_names(model)
    for reshard in model.reshards:
        overlap = reshard_overlap(model, reshard, choices)
        for step in reshard_steps(model, reshard, choices):
            kind, axes, size, _ = step
            where = lanes(model.collectives, link_of, overlap, kind, axes, size, reshard.block)
            cause, line = reshard_cause(model, reshard, named), reshard_line(model, reshard)
            collective = _collective(model, step, reshard.trips, where.get(EXPOSED, 0.0), cause, line)
            collectives[reshard.tensor, reshard.op].append(collective)
    return collectives


def _collective(model: Model, step: ReshardStep, trips: float, exposed: float, cause: str, line: str) -> Collective:
    """Return the record of one collective with all its executions in a step.

    - `step`: kind, axes, bytes and seconds of one execution.
    - `trips`: executions in a step.
    - `exposed`: share of its seconds that compute waits for.
    - `cause`, `line`: the resharded tensor and the line of the source code.
    """
    kind, axes, size, seconds = step
    wire = sum(float(v) for v in model.collectives.wire_bytes(kind, axes, size * trips).values())  # type: ignore[arg-type]
    whole = seconds * trips
    return Collective(
        kind, axes, math.ceil(trips), round(wire), whole, exposed < 0.5, cause, line, exposed_s=whole * exposed
    )


MOST_ROWS = 400
"""Largest number of ops that a plan stores a row for, longest first."""
SHORTEST = 1e-5
"""Least share of the step for an op to have its own row; all other ops share one row."""


def planned_ops(model: Model, choices: NDArray[np.int64]) -> tuple[PlannedOp, ...]:
    """Return the rows of a step's ops, longest first.

    Ops that differ only in the number of their layer share a row. The last row sums all ops beyond `MOST_ROWS` or below
    `SHORTEST`, and has no name. Compute, host traffic and communication of all rows add up to the totals of `evaluate`
    for the same choices. Raises ValueError if a forbidden pair was chosen.
    """
    prices = price_ops(model, choices)
    row_of: dict[tuple[str, ...], PlannedOp] = {}
    for each in _places(model, prices):
        key = _sort_key(each)
        row_of[key] = _together(row_of[key], each) if key in row_of else each
    rows = sorted(row_of.values(), key=lambda row: (-_seconds(row), *_sort_key(row)))
    least = SHORTEST * sum(map(_seconds, rows))
    kept = [row for row in rows[:MOST_ROWS] if _seconds(row) >= least]
    if rest := rows[len(kept) :]:
        small = dataclasses.replace(rest[0], name="", kind="", line="", parameter="")
        for row in rest[1:]:
            small = _together(small, row)
        kept.append(small)
    return tuple(kept)


def _sort_key(row: PlannedOp) -> tuple[str, ...]:
    """Return the fields that identify a row: rows with equal fields are merged."""
    return row.name, row.kind, row.line, row.parameter, row.bound


def _seconds(row: PlannedOp) -> float:
    """Return a row's seconds of compute, host traffic and communication, hidden parts included."""
    return row.compute_s + row.host_s + row.sent_s


def _together(a: PlannedOp, b: PlannedOp) -> PlannedOp:
    """Merge two rows: add their amounts, and use the names of the first."""
    summed = ("times", "compute_s", "host_s", "sent_s", "waited_s", "flops", "moved_bytes", "wire_bytes")
    return dataclasses.replace(a, **{name: getattr(a, name) + getattr(b, name) for name in summed})


def _places(model: Model, prices: OpPrices) -> list[PlannedOp]:
    """Return one row for each place that takes time, in program order."""
    collectives: dict[Place, list[tuple[float, float, int]]] = defaultdict(list)
    for op, inside in prices.inside.items():
        collectives["op", op] += [(c.seconds, c.waited_s, c.wire_bytes) for c in inside]
    for (tensor, op), moved in prices.moved.items():
        place: Place = ("op", op) if op >= 0 else ("tensor", tensor)
        collectives[place] += [(c.seconds, c.waited_s, c.wire_bytes) for c in moved]
    rows, parameters = [], _parameters(model)
    for place in sorted({*prices.compute, *prices.host, *collectives}):
        sent, waited, wire = (sum(part) for part in zip(*collectives.get(place, [(0.0, 0.0, 0)]), strict=True))
        work, compute, host = prices.work.get(place, PlaceWork()), prices.compute.get(place, 0.0), prices.host
        name, kind, line, times = _place_words(model, place)
        parameter = parameters.get(place[1], "") if place[0] == "op" else ""
        seconds = (compute, host.get(place, 0.0), sent, waited)
        amounts = (work.flops, work.moved_bytes, int(wire))
        bound = _bound(work, compute, waited, host.get(place, 0.0))
        rows.append(PlannedOp(name, kind, line, parameter, times, *seconds, *amounts, bound))
    return rows


def _parameters(model: Model) -> dict[int, str]:
    """Return for heavy ops the name pattern of the parameter that they consume, else of the one whose gradient they
    compute.

    The name is empty if there is neither.
    """
    roles = {argument.name: argument.role for argument in model.program.arguments}
    named = {cluster: pattern(name) for cluster, name in cluster_names(model).items() if roles[name] in WEIGHTS}
    parameters = {}
    for op in model.graph.ops:
        if op.op_class is OpClass.HEAVY:
            clusters = (model.structure.cluster_of[tensor] for tensor in (*op.operands, *op.results))
            parameters[op.id] = next((named[cluster] for cluster in clusters if cluster in named), "")
    return parameters


def _place_words(model: Model, place: Place) -> tuple[str, str, str, int]:
    """Return the name pattern, kind, source line and executions of a place. A tensor has the kind `copy` and no
    line.
    """
    what, number = place
    graph = model.graph
    if what == "op":
        op = graph.ops[number]
        kind = op.opaque.target if op.opaque else op.kind
        return pattern(op.name or op.kind), kind, op.line, math.ceil(graph.trips(op.loop))
    tensor = graph.tensors[number]
    return pattern(tensor.name or f"value {number}"), "copy", "", math.ceil(graph.trips(tensor.loop))


def _bound(work: PlaceWork, compute: float, waited: float, host: float) -> str:
    """Return the resource that bounds a place: network, host, compute, overhead or memory.

    Network or host is the bound if its seconds (`waited`, `host`) exceed those of compute. Otherwise the bound is
    compute or overhead if that takes half of the compute time, else memory.
    """
    if max(waited, host) > compute:
        return "network" if waited >= host else "host"
    if 2.0 * work.busy_s >= compute and work.busy_s > 0.0:
        return "compute"
    return "overhead" if 2.0 * work.overhead_s >= compute and work.overhead_s > 0.0 else "memory"
