"""Transfer of tensors between two sets of devices of one topology, which may be the same: bytes and seconds."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autoshard.cost import Collectives, Topology, load_calibration, make_mesh
from autoshard.planning.record.spec import Spec
from autoshard.planning.record.state_reshard import shard_bounds, shard_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedMesh:
    """A mesh on some of a topology's devices."""

    mesh: Mapping[str, int]
    """Sizes of the mesh axes, major first."""
    device_order: Sequence[int]
    """Number of the device in each place of the mesh, row-major."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReshardedTensor:
    """A tensor that is stored in one way and needed in another."""

    shape: tuple[int, ...]
    bits: int
    """Bits of an element as it is sent."""
    copies: int
    """Number of equal tensors, such as those of several layers."""
    before: tuple[PlacedMesh, Spec]
    """Devices that store it, and its spec there."""
    after: tuple[PlacedMesh, Spec]
    """Devices that need it, and its spec there."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedReshard:
    """Bytes of a transfer by device and by island (or slice), and its least seconds.

    A part that an island lacks enters it once, and its devices pass it on. Islands that store a part send it once
    altogether, in equal shares; islands that have received it send it further.
    """

    whole_bytes: int
    """Bytes of all tensors once."""
    received_bytes: tuple[int, ...]
    """Bytes by device that it needs and did not store."""
    entering_bytes: tuple[float, ...]
    """Bytes by island that its devices need and none of them stored."""
    leaving_bytes: tuple[float, ...]
    """Bytes by island that it sends to others."""
    link_s: float
    """Seconds in which the device that receives most would gather as much inside its island."""
    network_s: float
    """Seconds for the island that receives or sends most, over all of its connections to the network."""
    broadcast_s: float
    """Seconds in which one device sends every whole tensor once, as a broadcast from the first rank does.

    It uses the network if any bytes cross it, else the links of the device.
    """

    @property
    def seconds(self) -> float:
        """The longer of both times: links and network work at once."""
        return max(self.link_s, self.network_s)


def predict_placed_reshard(tensors: Iterable[ReshardedTensor], topology: Topology) -> PlacedReshard:
    """Return the bytes and the least seconds of a transfer between devices of a topology.

    Links are priced as for an all-gather, and the network by its calibrated rate.
    """
    count = topology.num_devices
    island_of = [topology.coords(device)[0] for device in range(count)]
    received = np.zeros(count, np.int64)
    entering, leaving = np.zeros(topology.slices), np.zeros(topology.slices)
    whole = 0
    for tensor in tensors:
        old, new = (shard_bounds(place, spec, tensor.shape, count) for place, spec in (tensor.before, tensor.after))
        common = np.stack([np.maximum(old[0], new[0]), np.minimum(old[1], new[1])])
        received += tensor.copies * (shard_bytes(new, tensor.bits) - shard_bytes(common, tensor.bits))
        whole += tensor.copies * math.ceil(math.prod(tensor.shape) * tensor.bits / 8)
        if topology.slices > 1:
            into, out = _between_islands(old, new, island_of, topology.slices)
            entering += tensor.copies * tensor.bits / 8 * into
            leaving += tensor.copies * tensor.bits / 8 * out
    chip = topology.chip
    card = chip.network_bytes_per_s_per_chip * load_calibration(chip).network_efficiency
    busiest = float(max(entering.max(), leaving.max()))
    return PlacedReshard(
        whole_bytes=whole,
        received_bytes=tuple(map(int, received)),
        entering_bytes=tuple(map(float, entering)),
        leaving_bytes=tuple(map(float, leaving)),
        link_s=_link_seconds(topology, int(received.max())),
        network_s=busiest / (card * topology.num_chips / topology.slices) if busiest else 0.0,
        broadcast_s=whole / (card / chip.devices_per_chip) if busiest else _link_seconds(topology, whole),
    )


def _link_seconds(topology: Topology, received_bytes: int) -> float:
    """Return the seconds in which each device of an island (or slice) receives that much from the others."""
    inside = topology.num_devices // topology.slices
    if inside == 1:
        return 0.0
    outside = {"island": topology.slices} if topology.slices > 1 else {}
    wires = Collectives(make_mesh(topology, {**outside, "device": inside}))
    # A device gathers all but its own part.
    return (
        float(wires.time("all-gather", ("device",), received_bytes * inside / (inside - 1))) if received_bytes else 0.0
    )


def _between_islands(
    old: np.ndarray, new: np.ndarray, island_of: Sequence[int], islands: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements that enter and that leave each island.

    Each element is counted once in every island that needs it without storing it, and once altogether in islands that
    store it, in equal shares.

    - `old`, `new`: shards as in `shard_bounds`.
    - `island_of`: island of each device.
    """
    # All bounds cut a tensor into cells. Every island stores a cell whole or not.
    cuts = [np.unique(np.concatenate([old[:, dim].ravel(), new[:, dim].ravel()])) for dim in range(old.shape[1])]
    sizes = np.ones((1,) * len(cuts))
    for dim, cut in enumerate(cuts):
        sizes = sizes * np.diff(cut).reshape([-1 if other == dim else 1 for other in range(len(cuts))])
    stored, needed = (_cells(bounds, cuts, island_of, islands) for bounds in (old, new))
    missing = needed & ~stored
    dims = tuple(range(1, 1 + len(cuts)))
    entering = (missing * sizes).sum(axis=dims)
    share = sizes * missing.any(axis=0) / np.maximum(stored.sum(axis=0), 1)
    return entering, (stored * share).sum(axis=dims)


def _cells(bounds: np.ndarray, cuts: list[np.ndarray], island_of: Sequence[int], islands: int) -> np.ndarray:
    """Return [islands, cells of each dim] with True for the cells that a device of the island has."""
    present = np.zeros((islands, *(len(cut) - 1 for cut in cuts)), bool)
    ends = [np.searchsorted(cut, bounds[:, dim]) for dim, cut in enumerate(cuts)]
    seen = set()
    for device in map(int, np.flatnonzero((bounds[1] > bounds[0]).all(axis=0))):
        place = (island_of[device], *(slice(int(end[0, device]), int(end[1, device])) for end in ends))
        key = (place[0], *((part.start, part.stop) for part in place[1:]))
        if key not in seen:
            seen.add(key)
            present[place] = True
    return present
