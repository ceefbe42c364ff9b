"""The load of links: the time of each mesh axis's collectives, and the links of each axis."""

import dataclasses

import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.planning import Collective, Plan
from autoshard.report import html_report
from autoshard.report.page.ops_page import link_loads


def laid(plan: Plan, topology: str, mesh: dict[str, int], *sent: tuple[tuple[str, ...], float]) -> Plan:
    """Return the plan on another topology, with so many seconds of communication over each tuple of axes."""
    collectives = tuple(
        Collective("all-gather", axes, 1, 100, seconds, False, exposed_s=seconds / 2) for axes, seconds in sent
    )
    return dataclasses.replace(
        plan,
        topology=topology,
        mesh=mesh,
        device_order=make_mesh(Topology.parse(topology), mesh).device_order,
        prediction=dataclasses.replace(
            plan.prediction,
            collectives=collectives,
            wire_bytes=dict.fromkeys({a for axes, _ in sent for a in axes}, 100),
        ),
    )


def test_axes_take_what_their_collectives_take(plan: Plan):
    loads = link_loads(plan)
    assert loads is not None
    rows = {row["axis"]: row for row in loads["axes"]}
    for axis in ("data", "model"):
        mine = [each for each in plan.prediction.collectives if axis in each.axes]
        assert rows[axis]["seconds"] == pytest.approx(sum(each.seconds for each in mine))
        assert rows[axis]["waited_s"] == pytest.approx(sum(each.waited_s for each in mine))
        assert rows[axis]["bytes"] == plan.prediction.wire_bytes[axis]


def test_a_ring_of_one_axis_is_loaded_alike(plan: Plan):
    loads = link_loads(laid(plan, "v5p:4x8x8", {"data": 32, "model": 8}, (("data",), 2.0), (("model",), 1.0)))
    assert loads is not None
    for axis in loads["physical"]:
        (load,) = {(*link["axes"], link["seconds"]) for link in axis["links"]}
        assert load == (("model", 1.0) if axis["name"] == "z" else ("data", 2.0))
        assert len(axis["links"]) == axis["size"] and axis["links"][-1]["to"] == 0


def test_axes_that_share_a_physical_one_add_up_where_both_pass(plan: Plan):
    mesh = {"data": 16, "expert": 8, "model": 4}  # x has data (8 by 2) and model (2)
    loads = link_loads(laid(plan, "v5e:16x16*2", mesh, (("data",), 4.0), (("model",), 1.0), (("data", "model"), 0.5)))
    assert loads is not None
    physical = {axis["name"]: axis for axis in loads["physical"]}
    inner = {tuple(link["axes"]) for link in physical["x"]["links"][0:15:2]}
    between = {tuple(link["axes"]) for link in physical["x"]["links"][1:15:2]}
    assert inner == {("data", "model")} and between == {("data",)}
    # A collective over both axes counts once in a link's busy time.
    assert physical["x"]["links"][0]["seconds"] == 5.5 and physical["x"]["links"][1]["seconds"] == 4.5
    assert len(physical["slice"]["links"]) == 1 and physical["slice"]["links"][0]["axes"] == ["data"]


def test_links_carry_what_devices_send(plan: Plan):
    """Gather 2 ** 20 bytes over 8 devices of a ring, 4 in a line, and 16 on two axes."""
    size = 1 << 20

    def carried(topology: str, mesh: dict[str, int], kind: str, axes: tuple[str, ...], wire: float) -> dict[str, float]:
        one = laid(plan, topology, mesh, (axes, 1.0))
        (sent,) = one.prediction.collectives
        sent = dataclasses.replace(sent, kind=kind, wire_bytes=round(wire))
        one = dataclasses.replace(one, prediction=dataclasses.replace(one.prediction, collectives=(sent,)))
        loads = link_loads(one)
        assert loads is not None
        return {axis["name"]: max(link["bytes"] for link in axis["links"]) for axis in loads["physical"]}

    ring = carried("v5p:4x8x8", {"data": 32, "model": 8}, "all-gather", ("model",), size * 7 / 8)
    assert ring == {"x": 0, "y": 0, "z": pytest.approx(size / 2)}  # half of the bytes in each direction
    line = carried("v5e:4x4", {"data": 4, "model": 4}, "all-gather", ("model",), size * 3 / 4)
    assert sorted(line.values()) == [0, pytest.approx(size * 3 / 4)]
    both = carried("v5e:4x4", {"data": 16}, "all-reduce", ("data",), 2 * size * 15 / 16)
    assert list(both.values()) == [pytest.approx(size * 15 / 16)] * 2  # both directions, on two axes at once
    # Half of each device's array crosses the middle of a line of 4: 2 devices send half in each direction.
    exchanged = carried("v5e:4x4", {"data": 4, "model": 4}, "all-to-all", ("model",), size * 3 / 4)
    assert max(exchanged.values()) == pytest.approx(size)


def test_a_line_that_does_not_close_has_no_last_link(plan: Plan):
    loads = link_loads(laid(plan, "v5e:4x4", {"data": 16}, (("data",), 1.0)))
    assert loads is not None
    assert [len(axis["links"]) for axis in loads["physical"]] == [3, 3]


def test_nothing_is_reported_without_communication_or_of_a_mesh_laid_otherwise(plan: Plan):
    silent = laid(plan, "v5p:4x8x8", {"data": 32, "model": 8})
    assert link_loads(silent) is None
    assert 'id="links"' not in html_report(silent) and 'id="links"' in html_report(plan)
    turned = dataclasses.replace(plan, device_order=tuple(reversed(plan.device_order)))
    loads = link_loads(turned)
    assert loads is not None and loads["physical"] == [] and loads["axes"][0]["seconds"] > 0
