"""The load of links: how long the collectives of a step keep each link of the topology busy, and what they carry."""

from collections.abc import Iterable
from typing import Any

from autoshard.cost import Collectives, Mesh, PhysicalAxis, Segment, Topology, make_mesh
from autoshard.plan import Plan
from autoshard.report._names import clean


def link_loads(plan: Plan) -> dict[str, Any] | None:
    """Seconds and bytes by mesh axis, and by link along each physical axis; None without communication.

    All lines of chips along one physical axis are loaded alike, so that one stands for them. A link is busy while a
    collective runs over any mesh axis that passes it. Where the mesh was laid by other rules than ours, nothing is
    said of links (`physical` is empty).
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
    """Seconds of all collectives over any of these mesh axes, and what of them compute waits for."""
    over = [each for each in plan.prediction.collectives if set(axes) & set(each.axes)]
    return {"seconds": sum(each.seconds for each in over), "waited_s": sum(each.waited_s for each in over)}


def _on(mesh: Mesh, axis: str) -> str:
    return " + ".join(f"{each.axis}({each.size}{', ring' if each.wrap else ''})" for each in mesh.segments(axis))


def _physical(plan: Plan, mesh: Mesh, axis: PhysicalAxis) -> dict[str, Any]:
    """The links along a physical axis; for a switch or a network one, which stands for each device's own."""
    segments = [(name, each) for name in mesh.names for each in mesh.segments(name) if each.axis == axis.name]
    line = axis.kind == "torus"
    # A ring of two has one link between them, there and back.
    count = 1 if not line else axis.size if axis.wrap and axis.size > 2 else axis.size - 1
    carried = _carried(plan, mesh, axis.name)
    links = []
    for place in range(count):
        passing = [name for name, each in segments if not line or _passes(each, place, axis.size)]
        said = {"to": (place + 1) % axis.size, "axes": [clean(name, 80) for name in passing], **_busy(plan, passing)}
        links.append(said | {"bytes": sum(size for axes, size in carried if set(passing) & set(axes))})
    return {"name": axis.name, "size": axis.size, "kind": axis.kind, "line": line, "links": links}


def _carried(plan: Plan, mesh: Mesh, axis: str) -> list[tuple[tuple[str, ...], float]]:
    """Of each collective its mesh axes, and the bytes that pass a link of a physical axis one way.

    A file may name axes that its mesh does not have: these are on no link.
    """
    wires, found = Collectives(mesh), []
    for each in plan.prediction.collectives:
        if not set(each.axes) <= set(mesh.names):
            continue
        kind: Any = each.kind
        one = sum(float(share) for share in wires.wire_bytes(kind, each.axes, 1.0).values())
        if one:
            found.append((each.axes, wires.link_bytes(kind, each.axes, each.wire_bytes / one).get(axis, 0.0)))
    return found


def _passes(segment: Segment, place: int, size: int) -> bool:
    """Whether traffic along a segment passes the link from a place to the next one; the last link closes the ring.

    A segment's groups lie within runs of `size * stride` devices, all of whose inner links they use between them.
    """
    run = segment.size * segment.stride
    if place == size - 1:
        return segment.wrap
    return place % run != run - 1
