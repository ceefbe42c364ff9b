"""Candidate meshes of a topology."""

import math

import pytest

from autoshard.cost import MOST_AXES, Topology, candidate_meshes, default_axis_names, make_mesh


TOPOLOGIES = [
    "v5e:4x4",
    "v5e:4x8",
    "v5p:4x8x8",
    "v6e:16x16*2",
    "v5p:4x4x12",
    "v4:4x4x4",
    "tpu7x:4x4x4",
    "h100:8*4",
    "cpu:8",
    "v5p:16x20x28",
]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_candidate_has_all_devices_on_axes_above_one(name: str) -> None:
    topology = Topology.parse(name)
    found = candidate_meshes(topology)
    assert len({(mesh.sizes, mesh.layout) for mesh in found}) == len(found)
    for mesh in found:
        assert math.prod(mesh.sizes) == topology.num_devices
        assert min(mesh.sizes) > 1 and len(mesh.sizes) <= MOST_AXES
        assert mesh.names == default_axis_names(len(mesh.sizes))
        assert mesh == make_mesh(topology, mesh.axes), "giving it with --mesh gives the same layout"
    counts = [len(mesh.sizes) for mesh in found]
    assert counts == sorted(counts) and counts[0] == 1


def axes(name: str) -> set[tuple[int, ...]]:
    return {mesh.sizes for mesh in candidate_meshes(Topology.parse(name))}


def test_sizes_are_those_of_the_factorisations() -> None:
    assert axes("cpu:8") == {(8,), (4, 2), (2, 2, 2)}
    assert axes("v5e:4x4") == {(16,), (8, 2), (4, 4), (4, 2, 2), (2, 2, 2, 2)}
    assert axes("cpu:7") == {(7,)}


def test_whole_physical_axes_come_first() -> None:
    two = [mesh for mesh in candidate_meshes(Topology.parse("v5p:4x8x8")) if len(mesh.sizes) == 2]
    assert {mesh.sizes for mesh in two[:2]} == {(64, 4), (32, 8)}
    assert all(segment.wrap for mesh in two[:2] for segments in mesh.layout for segment in segments)


def test_slices_are_an_axis_of_their_own_and_part_of_the_first() -> None:
    found = [mesh for mesh in candidate_meshes(Topology.parse("v6e:16x16*2")) if len(mesh.sizes) == 2]
    networks = [[{s.kind for s in segments} for segments in mesh.layout] for mesh in found]
    assert [{"network"}, {"torus"}] in networks
    assert [{"network", "torus"}, {"torus"}] in networks
    assert not any("network" in kinds for first, *rest in networks for kinds in rest)


def test_an_unequal_torus_keeps_its_rings() -> None:
    (long,) = [mesh for mesh in candidate_meshes(Topology.parse("v5p:4x4x16")) if mesh.sizes == (16, 16)]
    assert {len(segments) for segments in long.layout} == {1, 2}, "one axis is the long ring, the other the square"
    assert all(segment.wrap for segments in long.layout for segment in segments)


def test_both_devices_of_a_chip_stay_together() -> None:
    for mesh in candidate_meshes(Topology.parse("tpu7x:4x4x4")):
        places = [n for n, segments in enumerate(mesh.layout) for s in segments if s.kind == "die"]
        assert len(places) == 1


def test_one_device_is_one_mesh() -> None:
    (mesh,) = candidate_meshes(Topology.parse("v5e:1x1"))
    assert mesh.axes == {"data": 1}


def test_sizes_are_only_numbers() -> None:
    """Count the candidate meshes: a hundred thousand chips have hardly more than a thousand."""
    few, many = (len(candidate_meshes(Topology.parse(name))) for name in ("v6e:16x16*4", "v6e:16x16*512"))
    assert many < 4 * few
