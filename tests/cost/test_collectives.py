"""Collectives: properties that hold for any of them, and hand-computed cases."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cost import (
    KINDS,
    Calibration,
    Collectives,
    Kind,
    Topology,
    links,
    load_calibration,
    make_mesh,
    parse_mesh,
)
from autoshard.errors import UserError


MESHES = [
    ("v5e:4x4", "2,8"),
    ("v5e:8x16", "8,16"),
    ("v5e:16x16", "32,8"),
    ("v5p:2x4x4", "2,4,4"),
    ("v5p:4x8x8", "32,8"),
    ("v4:4x4x8_twisted", "4,4,8"),
    ("v3:16x32", "32,32"),
    ("v6e:16x16*2", "32,16"),
    ("tpu7x:4x4x4", "16,8"),
    ("h100:8*4", "8,4"),
    ("gb200:72*2", "8,18"),
    ("cpu:8", "4,2"),
]


def _wire(topology: str, mesh: str, ideal: bool = False) -> Collectives:
    parsed = Topology.parse(topology)
    return Collectives(make_mesh(parsed, parse_mesh(mesh)), Calibration.ideal(parsed.chip) if ideal else None)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Collectives, tuple[str, ...]]:
    wire = _wire(*draw(st.sampled_from(MESHES)), ideal=draw(st.booleans()))
    axes = draw(st.lists(st.sampled_from(wire.mesh.names), min_size=1, unique=True))
    return wire, tuple(axes)


@given(groups(), st.sampled_from(KINDS), st.lists(st.floats(0, 1e13), min_size=2, max_size=20))
def test_time_grows_with_bytes(group: tuple, kind: Kind, sizes: list[float]) -> None:
    wire, axes = group
    times = wire.time(kind, axes, np.sort(sizes))
    assert times.shape == (len(sizes),) and times.dtype == np.float64
    assert np.all(np.diff(times) >= 0) and np.all(times >= 0)


@given(groups(), st.floats(1, 1e12))
def test_all_reduce_is_a_reduce_scatter_and_an_all_gather(group: tuple, size: float) -> None:
    wire, axes = group
    if wire.mesh.topology.backend == "cpu":  # one barrier of the threads, and half of it again to copy
        copied = wire.time("all-gather", axes, size) - wire.time("all-gather", axes, 0.0)
        assert wire.time("all-reduce", axes, size) == pytest.approx(
            float(wire.time("all-gather", axes, 0.0) + 1.5 * copied), rel=1e-9
        )
        return
    parts = wire.time("reduce-scatter", axes, size) + wire.time("all-gather", axes, size)
    if wire.measured:  # one launch, and a tree for small arrays
        assert 0.4 * parts <= wire.time("all-reduce", axes, size) <= 1.3 * parts
        return
    assert wire.time("all-reduce", axes, size) == pytest.approx(float(parts), rel=1e-12)


@given(groups(), st.sampled_from(KINDS), st.floats(1, 1e12))
def test_wire_bytes_add_up(group: tuple, kind: Kind, size: float) -> None:
    wire, axes = group
    n = math.prod(wire.mesh.axes[axis] for axis in axes)
    shares = wire.wire_bytes(kind, axes, size)
    whole = {"all-reduce": 2 * size * (n - 1) / n, "collective-permute": size}.get(kind, size * (n - 1) / n)
    assert set(shares) == set(axes)
    assert sum(float(share) for share in shares.values()) == pytest.approx(whole, rel=1e-12)
    assert all(share > 0 for share in shares.values())


@given(groups(), st.sampled_from(KINDS), st.permutations(range(4)), st.floats(1, 1e12))
def test_order_of_axes_does_not_matter(group: tuple, kind: Kind, order: list[int], size: float) -> None:
    wire, axes = group
    other = tuple(axes[i] for i in order if i < len(axes))
    assert wire.time(kind, axes, size) == wire.time(kind, other, size)
    assert wire.wire_bytes(kind, axes, size) == wire.wire_bytes(kind, other, size)


@given(groups(), st.floats(1e3, 1e12))
def test_no_collective_beats_the_ports_of_a_device(group: tuple, size: float) -> None:
    wire, axes = group
    topology = wire.mesh.topology
    if topology.backend != "tpu":
        return
    ports = (
        2 * topology.chip.torus_dims * topology.chip.link_oneway_bytes_per_s + topology.chip.die_link_oneway_bytes_per_s
    )
    n = math.prod(wire.mesh.axes[axis] for axis in axes)
    assert wire.time("all-gather", axes, size) >= size * (n - 1) / n / ports


@settings(max_examples=50)
@given(st.sampled_from(MESHES), st.sampled_from(KINDS), st.floats(1, 1e12))
def test_splitting_a_group_in_two_steps_is_never_faster_on_a_torus(mesh: tuple, kind: Kind, size: float) -> None:
    wire = _wire(*mesh, ideal=True)
    first, last = wire.mesh.names[0], wire.mesh.names[-1]
    if kind in ("all-gather", "all-reduce") and wire.mesh.topology.backend == "tpu":
        together = wire.time(kind, (first, last), size)
        in_turn = wire.time(kind, (last,), size) + wire.time(kind, (first,), size / wire.mesh.axes[last])
        assert together <= in_turn * (1 + 1e-9)


def test_array_in_array_out() -> None:
    wire = _wire("v5e:4x4", "4,4")
    assert wire.time("all-gather", ("data",), np.ones((3, 2))).shape == (3, 2)
    assert wire.time("all-gather", ("data",), 8).shape == ()
    assert wire.wire_bytes("all-gather", ("data",), [8.0, 16.0])["data"].tolist() == [6.0, 12.0]


def test_groups_of_one_are_free() -> None:
    wire = _wire("v5e:4x4", "16,1")
    assert wire.time("all-reduce", ("model",), 1e9) == 0
    assert wire.wire_bytes("all-reduce", ("model",), 1e9) == {}
    assert wire.time("all-gather", (), [1e9, 2e9]).tolist() == [0, 0]


W5E, W5P, W6E = 4.5e10, 9e10, 10.08e10


@pytest.mark.parametrize(
    ("topology", "mesh", "kind", "axes", "size", "seconds"),
    [
        # A ring of 16: both directions, half the steps.
        ("v5e:16x16", "16,16", "all-gather", "model", 1e9, 1e9 / (2 * W5E)),
        ("v5e:16x16", "16,16", "all-reduce", "model", 1e9, 1e9 / W5E),
        # A line of 4: the end receives three quarters over one link.
        ("v5e:4x4", "4,4", "all-gather", "model", 1e9, 0.75e9 / W5E),
        # Two lines at once: half of the links of a torus.
        ("v5e:4x4", "4,4", "all-gather", "data model", 1e9, 15 / 16 * 1e9 / (2 * W5E)),
        # Three rings at once.
        ("v5p:4x4x4", "4,4,4", "reduce-scatter", "data model axis2", 1e9, 1e9 / (6 * W5P)),
        ("v5p:4x4x4", "64", "reduce-scatter", "data", 1e9, 1e9 / (6 * W5P)),
        # The middle cut of a ring of 16 carries a quarter of 16 local arrays over two links.
        ("v5e:16x16", "16,16", "all-to-all", "model", 1e9, 4e9 / (2 * W5E)),
        ("v5e:16x16", "16,16", "all-to-all", "data model", 1e9, 4e9 / (2 * W5E)),
        ("v5e:4x4", "4,4", "all-to-all", "model", 1e9, 1e9 / W5E),
        ("v5e:16x16", "16,16", "collective-permute", "model", 1e9, 1e9 / W5E),
        # The major digit of a split ring: eight groups share every link.
        ("v5e:16x16", "16,2,8", "all-gather", "model", 1e9, 1e9 / (2 * W5E / 8)),
        ("v5e:16x16", "16,2,8", "all-gather", "axis2", 1e9, 7 / 8 * 1e9 / W5E),
        # Digits that together make a whole ring cost the same as one.
        ("v5e:16x16", "16,2,8", "all-gather", "model axis2", 1e9, 1e9 / (2 * W5E)),
        # Two slices: half of a ring-sized gather comes over the network, then the rings.
        ("v6e:16x16*2", "32,16", "all-gather", "data", 1e9, 1e9 / 16 / 2 / 1.25e10 + 1e9 / (2 * W6E)),
        # Two devices of a chip share its links. Between them, they have a link of their own.
        ("tpu7x:4x4x4", "16,8", "all-gather", "model", 1e9, 0.5e9 / (2 * 9e10 / 2) + 0.5e9 / 5.4e11),
        # A twisted torus: with the long axis, there are only rings and every axis is equally busy ...
        ("v4:4x4x8_twisted", "128", "all-gather", "data", 1e9, 1e9 / (6 * W5E)),
        ("v4:4x4x8_twisted", "128", "all-to-all", "data", 1e9, 55 / 48 * 1e9 / (2 * W5E)),
        ("v4:4x8x8_twisted", "256", "all-to-all", "data", 1e9, 69 / 48 * 1e9 / (2 * W5E)),
        ("v4:4x4x8_twisted", "4,4,8", "all-gather", "data axis2", 1e9, 1e9 / (4 * W5E)),
        # ... without it, short axes are lines.
        ("v4:4x4x8_twisted", "4,4,8", "all-gather", "model", 1e9, 3 / 4 * 1e9 / W5E),
        ("v4:4x4x8_twisted", "4,4,8", "all-gather", "axis2", 1e9, 1e9 / (2 * W5E)),
        ("v4:4x8x8_twisted", "4,8,8", "all-gather", "data model", 1e9, 1e9 / (3 * W5E)),
        # Islands: an eighth of the bytes uses each network card while the rest uses NVLink.
        ("h100:8*4", "32", "all-gather", "data", 1e9, 7 / 8 * 1e9 / 4.5e11),
        ("h100:8*32", "256", "all-reduce", "data", 1e9, 2 * 31 / 32 * 1e9 / 4e11),
        ("h100:8*2", "16", "all-gather", "data", 1e9, 7 / 8 * 1e9 / 4.5e11),
        # The same devices along an axis of islands alone use one card each.
        ("h200:8*4", "4,8", "all-gather", "data", 1e9, 3 / 4 * 1e9 / 5e10),
        ("h100:8", "8", "all-gather", "data", 2.0 * 1024 * 16384, 65.2e-6),
        ("h100:8", "8", "all-to-all", "data", 1e9, 7 / 8 * 1e9 / 4.5e11),
    ],
)
def test_hand_computed(topology: str, mesh: str, kind: Kind, axes: str, size: float, seconds: float) -> None:
    wire = _wire(topology, mesh, ideal=True)
    assert wire.time(kind, tuple(axes.split()), size) == pytest.approx(seconds, rel=1e-3)


def test_small_collectives_are_bound_by_hops_and_launch() -> None:
    wire = _wire("v5e:4x4", "4,4")
    figures = wire.calibration
    assert wire.time("all-gather", ("model",), 1) == pytest.approx(figures.collective_launch_s + 3 * figures.hop_s)
    assert _wire("v5e:16x16", "16,16", ideal=True).time("all-gather", ("model",), 1) == pytest.approx(8e-6)


@pytest.mark.parametrize(("topology", "mesh", "hops"), [("v5e:16x16", "16,16", 1), ("v5e:4x4", "4,4", 3)])
def test_a_shift_by_one_place_ends_a_ring_next_door_and_a_line_at_its_other_end(
    topology: str, mesh: str, hops: int
) -> None:
    wire = _wire(topology, mesh)
    expected = wire.calibration.collective_launch_s + hops * wire.calibration.hop_s
    assert wire.time("collective-permute", ("model",), 1) == pytest.approx(expected, rel=1e-3)


def test_an_exchange_over_parts_of_one_ring_goes_over_one_part_after_the_other() -> None:
    """Sum the exchanges of both axes: each device stores as many bytes in between, and both use the same links."""
    wire = _wire("v5e:16x16", "16,2,4,2", ideal=True)
    both, *each = (float(wire.time("all-to-all", axes, 1e9)) for axes in (("model", "axis3"), ("model",), ("axis3",)))
    assert both == pytest.approx(sum(each), rel=1e-3)


@pytest.mark.parametrize(
    ("topology", "mesh", "axes", "summed"),
    [
        # Compiled by libtpu 0.0.51 and 0.0.52.
        ("v5p:2x4x4", "32", ("data",), 0),
        ("v5p:4x4x4", "64", ("data",), math.inf),
        ("v5p:4x4x4", "32,2", ("data",), 0),
        ("v5e:4x8", "32", ("data",), 0),
        ("v5e:8x8", "64", ("data",), 8 * 2**20),
        ("v6e:8x8", "64", ("data",), 8 * 2**20),
        ("v5e:16x16", "16,16", ("data", "model"), 8 * 2**20),
        ("v5e:8x16", "64,2", ("data",), 0),
    ],
)
def test_gathers_over_many_devices(topology: str, mesh: str, axes: tuple[str, ...], summed: float) -> None:
    assert _wire(topology, mesh).summed_gathers(axes) == summed


def test_cpu_devices_share_memory_bandwidth() -> None:
    size = 1e9
    two, eight = (_wire(f"cpu:{n}", str(n)).time("all-reduce", ("data",), size) for n in (2, 8))
    assert eight == pytest.approx(4 * float(two), rel=0.01)


def test_threads_of_a_cpu_arrive_one_after_the_other() -> None:
    wire = _wire("cpu:8", "4,2")
    launch, each = wire.calibration.collective_launch_s, wire.calibration.hop_s
    for axes, members in ((("data", "model"), 8), (("data",), 4), (("model",), 2)):
        for kind in KINDS:
            assert wire.time(kind, axes, 0.0) == pytest.approx(launch + members * each)
    bits = np.arange(4, dtype=np.int32)
    sizes = np.full(4, 1e6)
    alone = [0.0, *(wire.time("all-to-all", axes, 1e6) for axes in (("data",), ("model",), ("data", "model")))]
    assert wire.time_of_groups("all-to-all", bits, sizes) == pytest.approx(alone)


def test_hierarchical_attribution() -> None:
    wire = _wire("v5e:4x4", "4,4")
    shares = wire.wire_bytes("all-reduce", ("data", "model"), 1600.0)
    assert {axis: float(share) for axis, share in shares.items()} == pytest.approx({"model": 2400.0, "data": 600.0})


@pytest.mark.parametrize(
    ("topology", "mesh", "expected"),
    [
        ("v5e:16x16", "16,16", (("data",), ("model",))),
        ("v5e:16x16", "32,8", (("data", "model"),)),
        ("v5e:16x16", "4,4,16", (("data", "model"), ("axis2",))),
        ("v5p:4x8x8", "32,8", (("data",), ("model",))),
        ("v6e:16x16*2", "2,16,16", (("data",), ("model",), ("axis2",))),
        ("cpu:8", "4,2", (("data", "model"),)),
        ("h100:8*4", "4,4,2", (("data", "model", "axis2"),)),
        ("v5e:4x4", "16,1", (("data",),)),
    ],
)
def test_links(topology: str, mesh: str, expected: tuple) -> None:
    assert links(make_mesh(Topology.parse(topology), parse_mesh(mesh))) == expected


@pytest.mark.parametrize(
    ("topology", "mesh", "axes", "kind"),
    [
        ("cpu:8", "4,2", ("data",), "all-reduce"),
        ("h100:8", "8", ("data",), "reduce-scatter"),
        # Compiled by libtpu 0.0.51, a weight gradient: over a whole slice of several hosts, it falls back to
        # all-reduce.
        ("v5e:2x4", "8", ("data",), "reduce-scatter"),
        ("v5p:2x2x2", "8", ("data",), "all-reduce"),
        ("v5e:4x4", "16", ("data",), "all-reduce"),
        ("v5e:4x4", "4,4", ("data", "model"), "all-reduce"),
        ("v5e:4x4", "4,4", ("data",), "reduce-scatter"),
        ("v5p:2x4x4", "8,4", ("data",), "reduce-scatter"),
        ("v5e:4x4*2", "2,16", ("data",), "reduce-scatter"),
        ("v5e:4x4*2", "2,16", ("model",), "all-reduce"),
        ("v5e:4x4*2", "2,4,4", ("data", "model"), "all-reduce"),
        ("v5e:4x8", "32", ("data",), "all-reduce"),
        ("v5e:8x8", "64", ("data",), "all-reduce"),
        ("v5e:16x16", "256", ("data",), "all-reduce"),
        ("v5e:16x16", "64,4", ("data",), "reduce-scatter"),
        ("v5e:16x16", "128,2", ("data",), "reduce-scatter"),
        ("v5p:4x4x4", "64", ("data",), "all-reduce"),
        ("v5p:8x8x8", "64,8", ("data",), "reduce-scatter"),
        ("v6e:8x8", "64", ("data",), "all-reduce"),
        ("v4:8x8x8", "64,8", ("data",), "reduce-scatter"),
    ],
)
def test_partial_to_split(topology: str, mesh: str, axes: tuple[str, ...], kind: str) -> None:
    assert _wire(topology, mesh).partial_to_split_kind(axes) == kind


def test_backends_reduce_in_their_own_dtype() -> None:
    cpu, tpu = _wire("cpu:8", "8"), _wire("v5e:4x4", "16")
    assert [cpu.widen_dtype(d) for d in ("bf16", "bfloat16", "f16", "f32", "s32")] == [
        "f32",
        "f32",
        "f32",
        "f32",
        "s32",
    ]
    assert tpu.widen_dtype("bf16") == "bf16"
    assert (cpu.can_overlap, tpu.can_overlap) == (False, True)


def test_calibration_can_be_replaced() -> None:
    slow = Calibration(**{**_figures("v5e"), "link_efficiency": 0.45})
    mesh = make_mesh(Topology.parse("v5e:16x16"), {"data": 16, "model": 16})
    usual = float(Collectives(mesh).time("all-gather", ("model",), 1e10))
    assert Collectives(mesh, slow).time("all-gather", ("model",), 1e10) == pytest.approx(usual * 2, rel=0.01)


def _figures(chip: str) -> dict:
    return {"chip": chip, **load_calibration(chip).values(), "link_efficiency": 0.9}


@pytest.mark.parametrize(
    ("kind", "axes", "message"),
    [
        ("allgather", ("data",), "unknown collective 'allgather'; known are all-gather, reduce-scatter"),
        ("all-gather", ("seq",), "mesh axis 'seq' does not exist; the mesh has data, model"),
    ],
)
def test_wrong_calls(kind: Kind, axes: tuple[str, ...], message: str) -> None:
    wire = _wire("cpu:8", "4,2")
    with pytest.raises(UserError, match=message):
        wire.time(kind, axes, 1.0)
    with pytest.raises(UserError, match=message):
        wire.wire_bytes(kind, axes, 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_many_groups_at_once_take_what_each_takes(kind: Kind) -> None:
    for topology, sizes in MESHES:
        prices = Collectives(make_mesh(Topology.parse(topology), parse_mesh(sizes)))
        names = prices.mesh.names
        groups = np.arange(1 << len(names)).repeat(3)
        size = np.tile([1.0, 1e5, 1e9], 1 << len(names))
        found = prices.time_of_groups(kind, groups, size)
        for bits, amount, seconds in zip(groups.tolist(), size.tolist(), found.tolist(), strict=True):
            axes = tuple(name for a, name in enumerate(names) if bits >> a & 1)
            assert seconds == pytest.approx(float(prices.time(kind, axes, amount)), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("shape", "measured"), [("4x4x8", 1.63), ("4x8x8", 1.31)])
def test_twisting_speeds_up_all_to_all_as_published(shape: str, measured: float) -> None:
    """Compare with the speedups measured by Jouppi et al., ISCA 2023. Shortest paths allow a little more."""
    chips = math.prod(map(int, shape.split("x")))
    plain, twisted = (
        float(_wire(f"v4:{shape}{form}", str(chips), ideal=True).time("all-to-all", ("data",), 1e9))
        for form in ("", "_twisted")
    )
    assert measured <= plain / twisted <= 1.1 * measured


def test_more_slices_slow_each_other() -> None:
    def seconds(slices: int) -> float:
        mesh = make_mesh(Topology.parse(f"v5e:4x4*{slices}"), {"slice": slices, "data": 16})
        return float(Collectives(mesh).time("all-reduce", ("slice",), 1e9))

    ideal = [2 * 1e9 * (n - 1) / n for n in (2, 32)]
    assert seconds(32) / seconds(2) > 2 * ideal[1] / ideal[0]
