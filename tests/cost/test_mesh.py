"""Meshes: their axes, the order of devices, and errors for wrong input."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cost import Mesh, Topology, default_axis_names, hybrid_mesh, make_mesh, parse_mesh
from autoshard.errors import UserError


TOPOLOGIES = [
    "v5e:4x4",
    "v5e:8x16",
    "v5e:16x16",
    "v5p:2x2x4",
    "v5p:4x4x8",
    "v5p:4x4x12*2",
    "v4:4x8x8_twisted",
    "v3:8x16",
    "tpu7x:4x4x4",
    "h100:8*4",
    "cpu:8",
]


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    topology = Topology.parse(draw(st.sampled_from(TOPOLOGIES)))
    left, sizes = topology.num_devices, []
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        sizes.append(size)
        left //= size
    return make_mesh(topology, dict(zip("abcd", [*sizes, left], strict=False)))


@settings(deadline=None)
@given(meshes())
def test_every_device_has_one_place(mesh: Mesh) -> None:
    assert sorted(mesh.device_order) == list(range(mesh.topology.num_devices))
    assert math.prod(mesh.sizes) == mesh.num_devices


@settings(deadline=None)
@given(meshes())
def test_segments_make_the_axes_and_use_the_hardware_once(mesh: Mesh) -> None:
    for size, segments in zip(mesh.sizes, mesh.layout, strict=True):
        assert math.prod(segment.size for segment in segments) == size
    for axis in mesh.topology.physical_axes:
        digits = sorted((s.stride, s.size) for part in mesh.layout for s in part if s.axis == axis.name)
        stride = 1
        for digit_stride, size in digits:
            assert digit_stride == stride
            stride *= size
        assert stride == axis.size


@settings(deadline=None)
@given(meshes())
def test_devices_along_an_axis_differ_only_in_its_own_segments(mesh: Mesh) -> None:
    places = np.array(mesh.device_order).reshape(mesh.sizes)
    names = [axis.name for axis in mesh.topology.physical_axes]
    sizes = [axis.size for axis in mesh.topology.physical_axes]
    for number, segments in enumerate(mesh.layout):
        lines = np.moveaxis(places, number, -1).reshape(-1, mesh.sizes[number])
        coordinates = np.array(np.unravel_index(lines, sizes))
        for name, coordinate in zip(names, coordinates, strict=True):
            count = len(np.unique(coordinate[0]))
            assert count == math.prod(s.size for s in segments if s.axis == name)


def _mean_hops(mesh: Mesh) -> list[float]:
    """Average the distance of ring neighbours along each axis: hops on a torus, 0.2 inside a chip, 50 between
    slices.
    """
    topology = mesh.topology
    shape = [*topology.shape, 1, 1][:3]
    wrap = [*topology.wrap, False, False][:3]

    def hops(a: int, b: int) -> float:
        (slice_a, xyz_a, _), (slice_b, xyz_b, _) = topology.coords(a), topology.coords(b)
        if slice_a != slice_b:
            return 50
        apart = [abs(i - j) for i, j in zip(xyz_a, xyz_b, strict=True)]
        total = sum(min(d, n - d) if w else d for d, n, w in zip(apart, shape, wrap, strict=True))
        return total or 0.2

    places = np.array(mesh.device_order).reshape(mesh.sizes)
    means = []
    for axis in range(places.ndim):
        pairs = zip(places.ravel(), np.roll(places, -1, axis).ravel(), strict=True)
        means.append(float(np.mean([hops(int(a), int(b)) for a, b in pairs])))
    return means


@pytest.mark.parametrize(
    ("topology", "sizes", "theirs"),
    [
        # Mean hops of jax 0.10.2 mesh_utils with allow_split_physical_axes=True, on libtpu 0.0.51 descriptions.
        ("v5e:2x2", (2, 2), [2.0, 1.0]),
        ("v5e:2x4", (8,), [1.5]),
        ("v5e:2x4", (2, 4), [3.0, 1.5]),
        ("v5e:4x4", (16,), [1.0]),
        ("v5e:4x4", (4, 4), [1.5, 1.5]),
        ("v5e:4x4", (2, 8), [2.0, 1.75]),
        ("v5e:4x4", (8, 2), [2.0, 1.0]),
        ("v5e:4x8", (32,), [1.938]),
        ("v5e:4x8", (2, 16), [2.0, 1.875]),
        ("v5e:8x16", (32, 4), [1.25, 1.5]),
        ("v5e:16x16", (256,), [1.0625]),
        ("v5e:16x16", (32, 8), [1.5, 1.75]),
        ("v5e:16x16", (64, 4), [1.25, 1.5]),
        ("v5e:16x16", (8, 32), [2.0, 1.5]),
        ("v5p:2x2x2", (8,), [1.75]),
        ("v5p:2x2x4", (4, 4), [1.5, 1.5]),
        ("v5p:4x4x8", (16, 8), [1.25, 1.0]),
        ("v5p:4x4x8", (4, 32), [1.0, 1.125]),
        ("v4:4x4x4", (16, 4), [1.25, 1.0]),
        ("tpu7x:2x2x1", (8,), [0.6]),
        ("tpu7x:4x4x4", (16, 8), [1.25, 0.6]),
        ("tpu7x:4x4x4", (8, 16), [0.6, 1.25]),
        ("v6e:16x16*2", (64, 8), [2.78125, 1.75]),
    ],
)
def test_neighbours_are_as_near_as_jax_makes_them(topology: str, sizes: tuple, theirs: list[float]) -> None:
    mesh = make_mesh(Topology.parse(topology), dict(zip("ab", sizes, strict=False)))
    for ours, bound in zip(_mean_hops(mesh), theirs, strict=True):
        assert ours <= bound + 1e-3


@pytest.mark.parametrize(
    ("topology", "mesh", "words"),
    [
        ("v5e:4x4", "2,8", "data=2 on x(2 by 2); model=8 on x(2) + y(4)"),
        ("v5e:16x16", "32,8", "data=32 on y(2 by 8, ring) + x(16, ring); model=8 on y(8)"),
        ("v5p:4x8x8", "32,8", "data=32 on x(4, ring) + y(8, ring); model=8 on z(8, ring)"),
        ("v6e:16x16*2", "32,16", "data=32 on slice(2) + x(16, ring); model=16 on y(16, ring)"),
        ("h100:8*4", "4,8", "data=4 on island(4); model=8 on gpu(8)"),
        ("h100:8*4", "8,4", "data=8 on island(4) + gpu(2 by 4); model=4 on gpu(4)"),
        ("tpu7x:2x2x1", "4,2", "data=4 on x(2) + y(2); model=2 on core(2)"),
        ("cpu:8", "4,2", "data=4 on cpu(4 by 2); model=2 on cpu(2)"),
        ("v5e:1x1", "1", "data=1"),
        ("v4:4x4x8_twisted", "16,8", "data=16 on x(4, twisted) + y(4, twisted); model=8 on z(8, ring)"),
        ("v3:4x4", "16,2", "data=16 on x(4) + y(4); model=2 on core(2)"),
    ],
)
def test_layouts(topology: str, mesh: str, words: str) -> None:
    assert make_mesh(Topology.parse(topology), parse_mesh(mesh)).describe() == words


def test_device_order_of_a_plain_mesh_is_row_major() -> None:
    assert make_mesh(Topology.parse("v5e:4x4"), {"data": 4, "model": 4}).device_order == tuple(range(16))


def test_device_order_is_a_ring_where_the_torus_has_none() -> None:
    order = make_mesh(Topology.parse("v5e:4x4"), {"data": 16}).device_order
    points = [divmod(device, 4) for device in order]
    for (a, b), (c, d) in itertools.pairwise([*points, points[0]]):
        assert abs(a - c) + abs(b - d) == 1


def test_a_hybrid_mesh_is_made_of_two_shapes() -> None:
    topology = Topology.parse("v5e:4x4*4")
    mesh = hybrid_mesh(topology, {"data": 4, "model": 4}, {"data": 2, "model": 2})
    assert mesh == make_mesh(topology, {"data": 8, "model": 8}, network={"data": 2, "model": 2})
    assert mesh.describe() == "data=8 on slice(2 by 2) + x(4); model=8 on slice(2) + y(4)"
    # Slices are major on each axis: the other half of an axis is in another slice.
    places = np.array(mesh.device_order).reshape(8, 8) // 16
    assert len(np.unique(places[:4, :4])) == 1 and len(np.unique(places)) == 4
    assert hybrid_mesh(topology, {"data": 16}, {"data": 4}) == make_mesh(topology, {"data": 64})


@pytest.mark.parametrize(
    ("ici", "dcn", "message"),
    [
        ({"data": 8}, {"data": 4}, "has ici data=8 = 8 and dcn data=4 = 4, but v5e:4x4\\*4 has 16 devices in each"),
        ({"data": 16}, {"slice": 4}, "the hybrid mesh names slice in dcn alone"),
        ({"data": 16}, {"data": 2}, "and dcn data=2 = 2, but v5e:4x4\\*4 has 16 devices in each of 4 slices"),
    ],
)
def test_wrong_hybrid_mesh(ici: dict, dcn: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        hybrid_mesh(Topology.parse("v5e:4x4*4"), ici, dcn)


def test_hybrid_mesh() -> None:
    topology = Topology.parse("v5e:16x16*4")
    mesh = make_mesh(topology, {"data": 32, "model": 32}, network={"data": 2, "model": 2})
    assert [[s.size for s in part if s.kind == "network"] for part in mesh.layout] == [[2], [2]]
    assert sorted(mesh.device_order) == list(range(1024))
    default = make_mesh(topology, {"data": 32, "model": 32})
    assert [[s.size for s in part if s.kind == "network"] for part in default.layout] == [[4], []]


@pytest.mark.full
def test_a_network_shape_is_found_among_many_assignments() -> None:
    # These 13 axes have 13!/(4! 4! 4! 1!) = 450 450 assignments, and those with slices on the first axis come last.
    sizes = {f"axis{number}": 2 for number in range(13)}
    mesh = make_mesh(Topology.parse("v5p:16x16x16*2"), sizes, network={"axis0": 2})
    assert [[s.size for s in part if s.kind == "network"] for part in mesh.layout] == [[2]] + [[]] * 12


@pytest.mark.parametrize(
    ("topology", "network", "message"),
    [
        ("v5e:4x4*2", {"data": 4}, "the network shape data=4 cannot be laid on 2 slices; it must name mesh axes"),
        ("v5e:4x4*2", {"dta": 2}, "the network shape dta=2 cannot be laid on 2 slices"),
        ("v5e:4x4*2", {"model": 2}, "mesh axis model=1 cannot span 2 slices: 2 does not divide it"),
        ("cpu:8", {"data": 2}, "cannot be laid on one machine"),
    ],
)  # fmt: skip
def test_wrong_network_shape(topology: str, network: dict, message: str) -> None:
    parsed = Topology.parse(topology)
    with pytest.raises(UserError, match=message):
        make_mesh(parsed, {"data": parsed.num_devices, "model": 1}, network)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 4, "model": 8}, "mesh data=4 x model=8 = 32, but v5e:4x4 has 16 devices; they must be equal"),
        ({"data": 0}, "mesh axis data=0 must be at least 1"),
        ({}, "the mesh has no axes; write for example data=16"),
    ],
)
def test_wrong_mesh(sizes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_mesh(Topology.parse("v5e:4x4"), sizes)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("data=32,model=8", {"data": 32, "model": 8}),
        ("32,8", {"data": 32, "model": 8}),
        (" 4 , 2,2,1 ", {"data": 4, "model": 2, "axis2": 2, "axis3": 1}),
        ("fsdp = 16", {"fsdp": 16}),
    ],
)
def test_parse_mesh(text: str, sizes: dict) -> None:
    parsed = parse_mesh(text)
    assert parsed == sizes and list(parsed) == list(sizes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=32,8", "mesh 'data=32,8' names some axes and not others"),
        ("a=2,a=4", "names the axis a twice"),
        ("data=x", "'data=x' is not an axis; write data=32,model=8 or 32,8"),
        ("32,,8", "'' is not an axis"),
        ("0,8", "'0' is not an axis"),
        ("", "'' is not an axis"),
        ("4x2", "'4x2' is not an axis"),
    ],
)
def test_parse_wrong_mesh(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_mesh(text)


def test_default_axis_names() -> None:
    assert default_axis_names(4) == ("data", "model", "axis2", "axis3")


def test_unknown_axis() -> None:
    with pytest.raises(UserError, match="mesh axis 'seq' does not exist; the mesh has data, model"):
        make_mesh(Topology.parse("cpu:8"), {"data": 4, "model": 2}).segments("seq")
