"""Bytes of reshards between sets of devices, counted element by element from JAX's own index maps."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.cost import Collectives, Topology, load_calibration, make_mesh
from autoshard.planning import PlacedMesh, ReshardedTensor, Spec, predict_placed_reshard


TOPOLOGY = Topology.parse("h100:4*2")
ISLAND = 4
ALL = tuple(range(8))
End = tuple[dict[str, int], tuple[int, ...], tuple[tuple[str, ...], ...]]
"""Mesh axes, device numbers, and the axes of each dim."""


def elements(end: End, shape: tuple[int, ...]) -> dict[int, set[int]]:
    """Return the elements that each device stores, by JAX."""
    sizes, numbers, dims = end
    devices = np.array(jax.devices())[list(numbers)].reshape(tuple(sizes.values()))
    sharding = NamedSharding(Mesh(devices, tuple(sizes)), PartitionSpec(*(axes or None for axes in dims)))
    grid = np.arange(np.prod(shape)).reshape(shape)
    number_of = {device: number for number, device in enumerate(jax.devices())}
    stored = {number: set[int]() for number in ALL}
    for device, index in sharding.devices_indices_map(shape).items():
        stored[number_of[device]] = set(grid[index].ravel().tolist())
    return stored


ENDS: tuple[End, ...] = (
    ({"dp": 4}, (0, 1, 2, 3), (("dp",), ())),
    ({"engine": 2, "kv": 2}, (4, 5, 6, 7), ((), ("kv",))),
    ({"dp": 2, "tp": 4}, ALL, (("tp", "dp"), ())),
    ({"engine": 2, "kv": 2, "query": 2}, ALL, (("kv", "query"), ())),
    ({"engine": 4, "kv": 2}, (0, 4, 1, 5, 2, 6, 3, 7), ((), ("kv",))),
    ({"dp": 8}, ALL, ((), ())),
    ({"one": 1}, (6,), ((), ())),
    ({"dp": 4}, (2, 3, 6, 7), (("dp",), ())),
)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(range(len(ENDS)), 2)))
def test_bytes_are_those_of_jax_index_maps(first: int, second: int):
    shape, copies = (16, 8), 3
    before, after = ENDS[first], ENDS[second]
    old, new = elements(before, shape), elements(after, shape)
    tensor = ReshardedTensor(
        shape, 16, copies, (PlacedMesh(*before[:2]), Spec(before[2])), (PlacedMesh(*after[:2]), Spec(after[2]))
    )
    found = predict_placed_reshard([tensor], TOPOLOGY)
    assert found.received_bytes == tuple(2 * copies * len(new[device] - old[device]) for device in ALL)
    islands = (range(ISLAND), range(ISLAND, 8))
    stored = [set().union(*(old[device] for device in island)) for island in islands]
    needed = [set().union(*(new[device] for device in island)) for island in islands]
    missing = [needed[island] - stored[island] for island in (0, 1)]
    assert found.entering_bytes == tuple(2 * copies * len(each) for each in missing)
    # With two islands, what one lacks is sent by the other one.
    assert found.leaving_bytes == found.entering_bytes[::-1]
    assert found.whole_bytes == 2 * copies * 16 * 8


def test_islands_with_equal_parts_share_what_they_send():
    place = Topology.parse("h100:1*3")
    before = PlacedMesh({"dp": 2}, (0, 1)), Spec.replicated(1)
    found = predict_placed_reshard(
        [ReshardedTensor((100,), 8, 1, before, (PlacedMesh({"one": 1}, (2,)), Spec.replicated(1)))], place
    )
    assert found.entering_bytes == (0, 0, 100) and found.leaving_bytes == (50, 50, 0)


def test_seconds_are_those_of_the_slower_of_links_and_network():
    chip, figures = TOPOLOGY.chip, load_calibration(TOPOLOGY.chip)
    network = chip.network_bytes_per_s_per_chip * figures.network_efficiency
    size = 4 * 10**9
    between = ReshardedTensor(
        (size,), 8, 1, (PlacedMesh({"dp": 4}, range(4)), Spec((("dp",),))),
        (PlacedMesh({"tp": 4}, range(4, 8)), Spec((("tp",),))),
    )  # fmt: skip
    found = predict_placed_reshard([between], TOPOLOGY)
    assert found.seconds == found.network_s == pytest.approx(size / (4 * network))
    assert found.broadcast_s == pytest.approx(size / network)
    inside = ReshardedTensor((size,), 8, 1, between.before, (PlacedMesh({"dp": 4}, range(4)), Spec.replicated(1)))
    found = predict_placed_reshard([inside], TOPOLOGY)
    gathered = Collectives(make_mesh(TOPOLOGY, {"island": 2, "inner": 4})).time("all-gather", ("inner",), size)
    assert found.network_s == 0 and found.seconds == pytest.approx(float(gathered))
    assert found.seconds > 0.75 * size / chip.link_oneway_bytes_per_s
