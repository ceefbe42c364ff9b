"""Figures below the tensors on a plan's page: ops, roofline, memory, timeline and loads of links."""

from collections.abc import Iterable
from typing import Any

from autoshard.cost import Collectives, Mesh, PhysicalAxis, Segment, Topology, dtype_class, make_mesh
from autoshard.planning import WAITS_FOR_HOST, Plan
from autoshard.report.display import clean, op_words, readable


BOUNDS = {
    "compute": "compute: its units are busy for at least half of its time",
    "memory": "memory: it waits for what it reads and writes",
    "network": "network: it waits longer for communication than it computes",
    "overhead": "overhead: starting it takes at least half of its time",
    "host": "host: it waits for the host's memory",
}
"""Explanation for people of each value of `PlannedOp.bound`."""


def ops_data(plan: Plan) -> list[dict[str, Any]]:
    """Return rows of the op table, the longest first: seconds, FLOPs and bytes of one device in one step.

    `time_s` is the time that an op adds to the step: compute, and communication that is not hidden behind it. The row
    without a name sums the plan's many small ops. An unknown `bound` becomes `memory`.
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
    """Return `compute_s` and `waited_s` of all rows of the op table, their `share` of the step, and the chip's name.

    The share is at most 1, and 1 for a step without time. None for a plan that does not know its ops.
    """
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
    """Return the peaks of one device: FLOP/s by dtype, and bytes per second of main memory.

    Dtypes are bf16 and those of the plan's weights; of dtypes with one peak only the first is listed.
    """
    topology = Topology.parse(plan.topology)
    dtypes = {plan.dtypes[name] for name in plan.arguments if plan.is_weight(name)}
    peaks: dict[float, str] = {}
    for name in ("bf16", *sorted({dtype_class(dtype) for dtype in dtypes})):
        peaks.setdefault(topology.peak_flops(name), name)
    return {
        "flops": {name: peak for peak, name in peaks.items()},
        "bytes": topology.memory_bytes_per_s,
        "chip": topology.chip.name,
    }


def memory_data(plan: Plan) -> dict[str, Any] | None:
    """Return the memory chart's figures at each moment, and the tensors in them; None for a plan without them.

    A tensor is [name, kind, count, bytes, first moment, last moment], where moments are numbers in `moments`. These are
    in seconds.
    """
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


MAIN = "compute, and what it waits for"
"""Name of the row of compute and waiting."""


def timeline_data(plan: Plan) -> dict[str, Any] | None:
    """Return rows of spans: compute and waiting of the device, then each link of each loop; None without spans.

    `names` are those of spans. A span is [number of its name, kind, start, seconds], in seconds. Its kind is `compute`,
    a kind of collective or `other`. In a loop a span is the sum of all trips.
    """
    timeline = plan.timeline
    if timeline is None or not timeline.spans or timeline.end_s <= 0:
        return None
    names: dict[str, int] = {}
    rows: dict[tuple[str, int], list[list[Any]]] = {("", 0): []}
    for span in timeline.spans:
        main = span.lane in ("compute", "exposed")
        name = names.setdefault(_shown(span.name), len(names))
        kind = "compute" if span.lane == "compute" else span.name.partition(" over ")[0]
        kind = kind if " over " in span.name or span.lane == "compute" else "other"
        key = ("", 0) if main else (span.lane, span.block)
        rows.setdefault(key, []).append([name, kind, span.start_s, span.seconds])
    return {
        "end": timeline.end_s,
        "names": list(names),
        "rows": [
            {"name": MAIN if not lane else clean(f"{_link(lane)}, {_block(block)}", 80), "spans": spans}
            for (lane, block), spans in rows.items()
        ],
    }


def _shown(name: str) -> str:
    """Return words for an op, and for `all-gather over data: jit(f)/...` its collective with the op's words."""
    if name == WAITS_FOR_HOST:
        return name
    head, colon, cause = name.partition(": ")
    return clean(f"{head}: {op_words(cause)}" if colon else op_words(name), 200)


def _link(lane: str) -> str:
    """Return the name of a lane for people: `link x`, or `host memory`."""
    return lane if lane == "host memory" else f"link {lane}"


def _block(block: int) -> str:
    """Return the name of a block for people; a negative number is outside loops."""
    return "outside loops" if block < 0 else f"loop {block}"


def link_loads(plan: Plan) -> dict[str, Any] | None:
    """Return seconds and bytes by mesh axis, and by link along each physical axis; None without communication.

    All lines of chips along one physical axis carry equal loads, so one line represents them. A link is busy while a
    collective runs over any mesh axis that passes it. If the plan's mesh has another device order than ours, the links
    are not known and `physical` is empty. Axes of size 1 are left out.
    """
    if not plan.prediction.collectives:
        return None
    mesh = make_mesh(Topology.parse(plan.topology), plan.mesh)
    known = mesh.device_order == plan.device_order
    wire = plan.prediction.wire_bytes
    rows = [
        {
            "axis": clean(axis, 80),
            "on": _on(mesh, axis) if known else "",
            "bytes": wire.get(axis, 0),
            **_busy(plan, {axis}),
        }
        for axis, size in mesh.axes.items()
        if size > 1
    ]
    axes = [axis for axis in mesh.topology.physical_axes if axis.size > 1] if known else []
    return {"axes": rows, "physical": [_physical(plan, mesh, axis) for axis in axes]}


def _busy(plan: Plan, axes: Iterable[str]) -> dict[str, float]:
    """Return `seconds` of all collectives over any of these mesh axes, and `waited_s` that compute waits for them."""
    over = [each for each in plan.prediction.collectives if set(axes) & set(each.axes)]
    return {"seconds": sum(each.seconds for each in over), "waited_s": sum(each.waited_s for each in over)}


def _on(mesh: Mesh, axis: str) -> str:
    """Format the physical axes that a mesh axis covers: `x(4, ring) + y(2)`."""
    return " + ".join(f"{each.axis}({each.size}{', ring' if each.wrap else ''})" for each in mesh.segments(axis))


def _physical(plan: Plan, mesh: Mesh, axis: PhysicalAxis) -> dict[str, Any]:
    """Return the links along a physical axis, with the mesh axes, seconds and bytes of each.

    Links of a torus lead from each place to the next. For a switch or a network a single link represents each device's
    own.
    """
    segments = [(name, each) for name in mesh.names for each in mesh.segments(name) if each.axis == axis.name]
    line = axis.kind == "torus"
    # A ring of two chips has one link, used in both directions.
    count = 1 if not line else axis.size if axis.wrap and axis.size > 2 else axis.size - 1
    carried = _carried(plan, mesh, axis.name)
    links = []
    for place in range(count):
        passing = [name for name, each in segments if not line or _passes(each, place, axis.size)]
        link = {"to": (place + 1) % axis.size, "axes": [clean(name, 80) for name in passing], **_busy(plan, passing)}
        links.append(link | {"bytes": sum(size for axes, size in carried if set(passing) & set(axes))})
    return {"name": axis.name, "size": axis.size, "kind": axis.kind, "line": line, "links": links}


def _carried(plan: Plan, mesh: Mesh, axis: str) -> list[tuple[tuple[str, ...], float]]:
    """Return for each collective its mesh axes and the bytes that pass a link of the physical axis `axis` one way.

    A file may name axes that its mesh lacks: these are on no link, and their collectives are left out. So are those
    without bytes.
    """
    wires, loads = Collectives(mesh), []
    for each in plan.prediction.collectives:
        if not set(each.axes) <= set(mesh.names):
            continue
        kind: Any = each.kind
        one = sum(float(share) for share in wires.wire_bytes(kind, each.axes, 1.0).values())
        if one:
            loads.append((each.axes, wires.link_bytes(kind, each.axes, each.wire_bytes / one).get(axis, 0.0)))
    return loads


def _passes(segment: Segment, place: int, size: int) -> bool:
    """Return True if traffic along a segment passes the link from a place to the next; the last link closes the ring.

    A segment's groups lie within runs of `size * stride` devices. Together the groups use all links inside of a run.

    - `size`: places of the physical axis.
    """
    run = segment.size * segment.stride
    if place == size - 1:
        return segment.wrap
    return place % run != run - 1
