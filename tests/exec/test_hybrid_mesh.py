"""Our hybrid meshes against those of PyTorch/XLA's `HybridMesh`, whose rules run on given device attributes."""

import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from autoshard.cost import Topology, hybrid_mesh
from autoshard.exec.torch_xla_hook.planning.runtime_topology import numbers_by_coordinates


sharding = pytest.importorskip("torch_xla.distributed.spmd.xla_sharding")


def attributes(topology: Topology) -> list[dict[str, Any]]:
    """Return the runtime's attributes of TPUs, in an order with x fastest."""
    shape = (*topology.shape, 1, 1)[:3]
    every = itertools.product(range(topology.slices), *(range(size) for size in reversed(shape)))
    return [
        {"name": f"TPU:{number}", "slice_index": index, "coords": [x, y, z], "core_on_chip": 0}
        for number, (index, z, y, x) in enumerate(every)
    ]


def theirs(topology: Topology, ici: Sequence[int], dcn: Sequence[int]) -> np.ndarray:
    made = sharding.HybridMesh.__new__(sharding.HybridMesh)
    made.device_attributes = attributes(topology)
    with (
        mock.patch.object(sharding.xm, "xla_device_hw", lambda _: "TPU"),
        mock.patch.object(sharding.torch_xla, "device", lambda: None),
    ):
        return made._create_hybrid_device_mesh(ici, dcn)


def ours(topology: Topology, ici: Sequence[int], dcn: Sequence[int]) -> np.ndarray:
    names = [f"axis{number}" for number in range(len(ici))]
    mesh = hybrid_mesh(topology, dict(zip(names, ici, strict=True)), dict(zip(names, dcn, strict=True)))
    numbers = numbers_by_coordinates(topology, mesh.device_order, attributes(topology))
    return np.array(numbers).reshape(mesh.sizes)


def groups(grid: np.ndarray, axis: int) -> set[frozenset[int]]:
    """Return the groups of devices that communicate along an axis."""
    return {frozenset(row) for row in np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]).tolist()}


def same_groups(topology: Topology, one: np.ndarray, other: np.ndarray) -> bool:
    """Return True if all axes have the same groups, up to swaps of physical axes of one size."""
    known = attributes(topology)
    shape = (*topology.shape, 1, 1)[:3]
    number = {(each["slice_index"], *each["coords"]): k for k, each in enumerate(known)}
    for order in itertools.permutations(range(3)):
        if tuple(shape[k] for k in order) == shape:
            swap = [number[each["slice_index"], *(each["coords"][k] for k in order)] for each in known]
            swapped = np.array(swap)[one]
            if all(groups(swapped, axis) == groups(other, axis) for axis in range(one.ndim)):
                return True
    return False


def shapes(count: int) -> list[tuple[int, ...]]:
    """List the shapes of meshes of two and three axes with this many devices."""
    powers = [2**k for k in range(count.bit_length())]
    pairs: list[tuple[int, ...]] = [(a, count // a) for a in powers if count % a == 0]
    return pairs + [(a, b, count // a // b) for a in (2, 4) for b in (2, 4) if count % (a * b) == 0]


@pytest.mark.parametrize("name", ["v5e:4x4*2", "v5e:4x4*4", "v4:4x4x4*2", "v5p:4x4x8*2", "v6e:8x16*4", "v4:2x2x4*2"])
def test_slices_are_laid_as_pytorch_xla_lays_them(name: str):
    topology = Topology.parse(name)
    count = topology.num_devices // topology.slices
    for ici in shapes(count):
        spans = {(topology.slices, *[1] * (len(ici) - 1)), (1, topology.slices, *[1] * (len(ici) - 2))}
        for dcn in spans | ({(2, 2, *[1] * (len(ici) - 2))} if topology.slices == 4 else set()):
            one, other = ours(topology, ici, dcn), theirs(topology, ici, dcn)
            assert one.shape == other.shape
            assert (one // count == other // count).all(), (ici, dcn)
            if len(set(topology.shape)) == 1:
                assert same_groups(topology, one, other), (ici, dcn)


@pytest.mark.parametrize(
    ("name", "ici", "dcn"),
    [("v6e:8x16*4", (8, 16), (4, 1)), ("v6e:8x16*4", (16, 8), (2, 2)), ("v5p:4x4x8*2", (16, 8), (2, 1))],
)
def test_axes_that_are_whole_physical_ones_have_the_same_groups(name: str, ici: tuple[int, ...], dcn: tuple[int, ...]):
    topology = Topology.parse(name)
    assert same_groups(topology, ours(topology, ici, dcn), theirs(topology, ici, dcn))
