"""Seconds of a step by op and by collective, and the rows of them that a plan stores."""

import dataclasses
import math
from collections import defaultdict

from autoshard.cost import HOST, TRAFFIC, WORK, Charge, Compute
from autoshard.graph import OpClass, scores_by_op
from autoshard.planning.price.reshard_times import cluster_names
from autoshard.planning.price.step_ledger import Ledger, LedgerRow, Place
from autoshard.planning.record.plan_parts import Collective, PlannedOp
from autoshard.planning.record.spec import pattern, patterns
from autoshard.planning.space.decision_model import EXPOSED, Channel, Model, Node, Reshard
from autoshard.program import WEIGHTS


@dataclasses.dataclass(slots=True)
class PlaceWork:
    """Work of one device at one place in one step."""

    flops: float = 0.0
    """FLOPs of matmuls, attention kernels and other heavy ops."""
    moved_bytes: float = 0.0
    """Bytes read from and written to main memory."""
    busy_s: float = 0.0
    """Seconds that the compute units need without memory traffic."""
    overhead_s: float = 0.0
    """Seconds of launching ops and of the grid steps of kernels."""

    def add(self, other: "PlaceWork", share: float, total: float) -> None:
        """Add `share / total` of each amount of other work (in place)."""
        for field in dataclasses.fields(PlaceWork):
            mine, more = getattr(self, field.name), getattr(other, field.name)
            setattr(self, field.name, mine + more * share / total)


@dataclasses.dataclass(frozen=True, slots=True)
class OpPrices:
    """Parts of a plan's predicted step; together they add up to the prediction."""

    compute: dict[Place, float]
    """Seconds of compute in one step; a fusion's reads and writes count at its last op."""
    host: dict[Place, float]
    """Seconds of host memory traffic in one step by place, which overlaps with compute."""
    inside: dict[int, tuple[Collective, ...]]
    """Collectives by op: those inside it, such as halos, and those that reduce its partial results or reshard its
    result.
    """
    work: dict[Place, PlaceWork]
    """Work behind the seconds of compute, by place."""
    moved: dict[tuple[int, int], tuple[Collective, ...]]
    """Collectives that reshard an operand, by (tensor, consuming op); op -1 for results tied to an argument, and for
    initial values of loops.
    """


def price_ops(ledger: Ledger) -> OpPrices:
    """Return all seconds and collectives of a ledger by their place in the program.

    Seconds of a cluster are divided among the passes over its tensors. Negative seconds of a softmax are subtracted
    from its matmuls.
    """
    model = ledger.model
    compute: dict[Place, float] = defaultdict(float)
    host: dict[Place, float] = defaultdict(float)
    work: dict[Place, PlaceWork] = defaultdict(PlaceWork)
    inside: dict[int, list[Collective]] = defaultdict(list)
    moved: dict[tuple[int, int], list[Collective]] = defaultdict(list)
    owed: dict[int, float] = defaultdict(float)
    traffic = _traffic(ledger)
    for row in ledger.rows:
        where, seconds = row.where, row.step_s
        if row.axes:
            if isinstance(where, Node) or (row.op >= 0 and where.tensor in model.graph.ops[row.op].results):
                inside[row.op].append(_collective(model, row))
            else:
                moved[where.tensor, row.op].append(_collective(model, row))
        elif seconds < 0 and isinstance(where, Node):
            # The node of a softmax has negative seconds where its matmuls were charged for tensors that it does not
            # store.
            owed[where.ref] += seconds
        elif seconds:
            shares, done = _shares(model, row, traffic), _work(row, model.compute)
            total = sum(shares.values())
            for place, share in shares.items():
                (host if row.kind == HOST else compute)[place] += seconds * share / total
                if row.kind != HOST:
                    work[place].add(done, share, total)
    one_byte = float(model.compute.memory_seconds(1.0))
    for place, seconds in _taken_back(model, owed, compute).items():
        compute[place] += seconds
        work[place].moved_bytes = max(0.0, work[place].moved_bytes + seconds / one_byte)
    at_ops = {op: tuple(made) for op, made in inside.items()}
    at_operands = {at: tuple(made) for at, made in moved.items()}
    return OpPrices(dict(compute), dict(host), at_ops, dict(work), at_operands)


def _shares(model: Model, row: LedgerRow, traffic: dict[tuple[int, Channel], dict[Place, float]]) -> dict[Place, float]:
    """Return the places of a row of work, in proportion to which its seconds are divided.

    A cluster has the places of its memory passes, else its first tensor. A reshard without an op has its tensor; all
    else has its op. `traffic` is the result of `_traffic`.
    """
    if isinstance(row.where, Node) and row.where.kind == "cluster":
        found = traffic.get((row.where.ref, (row.block, row.kind)))
        return found or {("tensor", model.structure.clusters[row.where.ref].tensors[0]): 1.0}
    if isinstance(row.where, Reshard) and row.op < 0:
        return {("tensor", row.where.tensor): 1.0}
    return {("op", row.op): 1.0}


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


def _work(row: LedgerRow, compute: Compute) -> PlaceWork:
    """Return the work behind a row: kernels for a heavy op, else launches and, for the rest of its seconds, memory
    traffic.
    """
    work = PlaceWork()
    if isinstance(row.where, Node) and row.where.kind == "op":
        for charge in row.charges:
            _add_kernel(work, charge, compute)
    else:
        work.overhead_s = sum(each.seconds(compute) * each.count for each in row.charges if each.op == "launch")
        work.moved_bytes = max(0.0, row.step_s - work.overhead_s) / float(compute.memory_seconds(1.0))
    return work


def _add_kernel(work: PlaceWork, charge: Charge, compute: Compute) -> None:
    """Add the work of a kernel (in place), or of its further passes (`again`) and grid steps (`steps`), which have no
    traffic.
    """
    if charge.op == "again":
        work.busy_s += charge.seconds(compute) * charge.count
        return
    if charge.op == "steps":
        work.overhead_s += charge.seconds(compute) * charge.count
        return
    named = dict(zip(WORK[charge.op].amounts, charge.amounts, strict=True))
    traffic = {name: amount for name, amount in named.items() if name in TRAFFIC}
    still = dataclasses.replace(charge, amounts=tuple((named | dict.fromkeys(traffic, 0.0)).values()))
    started = compute.calibration.op_overhead_s
    work.moved_bytes += sum(traffic.values()) * charge.count
    work.busy_s += max(0.0, still.seconds(compute) - started) * charge.count
    work.overhead_s += started * charge.count
    if charge.op == "dot":
        work.flops += 2.0 * math.prod(named[name] for name in ("m", "n", "k", "batch")) * charge.count
    elif charge.op == "attention":
        given = dict(charge.properties)
        work.flops += named["scores"] * given["matmuls"] * (given["head"] + given["value_head"]) * charge.count
    elif charge.op == "op":
        work.flops += named["flops"] * charge.count


def _traffic(ledger: Ledger) -> dict[tuple[int, Channel], dict[Place, float]]:
    """Return by (cluster, channel) the bytes that pass through memory at every place in one step; passes without bytes
    are left out.
    """
    traffic: dict[tuple[int, Channel], dict[Place, float]] = defaultdict(lambda: defaultdict(float))
    for each in ledger.passes:
        if each.size * each.times > 0:
            channel = (each.block, HOST if each.on_host else "compute")
            cluster = ledger.model.structure.cluster_of[each.tensor]
            traffic[cluster, channel][each.place] += each.size * each.times
    return traffic


def _collective(model: Model, row: LedgerRow) -> Collective:
    """Return the record of a row's collective with all its executions in a step; it counts as hidden if less than half
    is exposed.
    """
    wire = sum(float(v) for v in model.collectives.wire_bytes(row.kind, row.axes, row.bytes * row.times).values())  # type: ignore[arg-type]
    exposed = row.lanes.get(EXPOSED, 0.0)
    tensors = row.where.combined if isinstance(row.where, Reshard) else 1
    return Collective(
        row.kind, row.axes, math.ceil(row.times * tensors), round(wire), row.step_s, exposed < 0.5, row.cause, row.line,
        exposed_s=row.step_s * exposed,
    )  # fmt: skip


MOST_ROWS = 400
"""Largest number of ops that a plan stores a row for, longest first."""
SHORTEST = 1e-5
"""Least share of the step for an op to have its own row; all other ops share one row."""


def planned_ops(ledger: Ledger, prices: OpPrices) -> tuple[PlannedOp, ...]:
    """Return the rows of a step's ops, longest first; `prices` are those of the ledger (`price_ops`).

    Ops that differ only in the number of their layer share a row. The last row sums all ops beyond `MOST_ROWS` or below
    `SHORTEST`, and has no name, kind, line or parameter. Compute, host traffic and communication of all rows add up to
    the totals of `evaluate` for the same choices.
    """
    row_of: dict[tuple[str, ...], PlannedOp] = {}
    for each in _places(ledger.model, prices):
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
    """Return the fields that identify a row, its bound included: rows with equal fields are merged."""
    return row.name, row.kind, row.line, row.parameter, row.bound


def _seconds(row: PlannedOp) -> float:
    """Return a row's seconds of compute, host traffic and communication in one step, hidden parts included."""
    return row.compute_s + row.host_s + row.sent_s


def _together(a: PlannedOp, b: PlannedOp) -> PlannedOp:
    """Return two rows merged: add their amounts, and use the names and the bound of the first."""
    summed = ("times", "compute_s", "host_s", "sent_s", "waited_s", "flops", "moved_bytes", "wire_bytes")
    return dataclasses.replace(a, **{name: getattr(a, name) + getattr(b, name) for name in summed})


def _places(model: Model, prices: OpPrices) -> list[PlannedOp]:
    """Return one row for each place that takes time, ops before tensors, by number."""
    collectives: dict[Place, list[tuple[float, float, int]]] = defaultdict(list)
    for op, inside in prices.inside.items():
        collectives["op", op] += [(c.seconds, c.waited_s, c.wire_bytes) for c in inside]
    for (tensor, op), moved in prices.moved.items():
        place: Place = ("op", op) if op >= 0 else ("tensor", tensor)
        collectives[place] += [(c.seconds, c.waited_s, c.wire_bytes) for c in moved]
    rows, parameters, scores = [], _parameters(model), model.graph.once(scores_by_op)
    for place in sorted({*prices.compute, *prices.host, *collectives}):
        sent, waited, wire = (sum(part) for part in zip(*collectives.get(place, [(0.0, 0.0, 0)]), strict=True))
        work, compute, host = prices.work.get(place, PlaceWork()), prices.compute.get(place, 0.0), prices.host
        name, kind, line, times = _place_words(model, place)
        parameter = parameters.get(place[1], "") if place[0] == "op" else ""
        seconds = (compute, host.get(place, 0.0), sent, waited)
        amounts = (work.flops, work.moved_bytes, int(wire))
        bound = _bound(work, compute, waited, host.get(place, 0.0))
        shape = dataclasses.astuple(scores[place[1]]) if place[0] == "op" and place[1] in scores else ()
        rows.append(PlannedOp(name, kind, line, parameter, times, *seconds, *amounts, bound, shape))
    return rows


def _parameters(model: Model) -> dict[int, str]:
    """Return by heavy op the name pattern of the parameter that it consumes, else of the one whose gradient it
    computes.

    The name is empty if there is neither; other ops have no entry.
    """
    roles = {argument.name: argument.role for argument in model.program.arguments}
    weights = {cluster: name for cluster, name in cluster_names(model).items() if roles[name] in WEIGHTS}
    shared = patterns(weights.values())
    named = {cluster: shared[name] for cluster, name in weights.items()}
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

    Network or host is the bound if its seconds (`waited`, `host`) exceed those of compute; the larger counts, network
    in a tie. Otherwise the bound is compute if the units are busy for half of the compute time. Else it is overhead if
    that is half of it, else memory.
    """
    if max(waited, host) > compute:
        return "network" if waited >= host else "host"
    if 2.0 * work.busy_s >= compute and work.busy_s > 0.0:
        return "compute"
    return "overhead" if 2.0 * work.overhead_s >= compute and work.overhead_s > 0.0 else "memory"
