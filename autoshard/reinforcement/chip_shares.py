"""Ways to divide the chips of a topology between a sampler and a trainer, each on a topology of its own."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from autoshard.cost import Topology
from autoshard.errors import UserError


MOST_SHARES = 16
"""Most numbers of whole islands, or slices, that are tried as a sampler's share; they are spread evenly."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChipPart:
    """Some devices of a topology that form a topology themselves."""

    topology: Topology
    devices: Sequence[int]
    """Their numbers in the whole topology, in the order of their own."""


def whole_part(topology: Topology) -> ChipPart:
    """Return all devices of a topology."""
    return ChipPart(topology, range(topology.num_devices))


def share_chips(topology: Topology) -> Iterator[tuple[ChipPart, ChipPart]]:
    """Yield pairs of a sampler's and a trainer's part, which together are all devices.

    - Whole islands or slices, if there are several.
    - Of GPUs, equally many of every island.
    - Of a TPU's only slice, the two blocks of a cut, if the chip comes in both shapes.
    """
    yield from _whole_slices(topology)
    if topology.traits.torus:
        yield from _cuts(topology) if topology.slices == 1 else ()
    else:
        yield from _inside_islands(topology)


def _whole_slices(topology: Topology) -> Iterator[tuple[ChipPart, ChipPart]]:
    """Yield the shares of whole slices or islands; the trainer has the first ones."""
    slices, each = topology.slices, topology.num_devices // topology.slices
    stride = max(1, -(-(slices - 1) // MOST_SHARES))
    for sampling in range(stride, slices, stride):
        training = slices - sampling
        trainer, sampler = (Topology.make(topology.chip, topology.shape, count) for count in (training, sampling))
        yield (
            ChipPart(sampler, range(training * each, topology.num_devices)),
            ChipPart(trainer, range(training * each)),
        )


def _inside_islands(topology: Topology) -> Iterator[tuple[ChipPart, ChipPart]]:
    """Yield the shares of equally many GPUs of every island; the trainer has the first ones of each."""
    (size,) = topology.shape
    starts = range(0, topology.num_devices, size)
    for sampling in range(1, size):
        training = size - sampling
        trainer, sampler = (Topology.make(topology.chip, (n,), topology.slices) for n in (training, sampling))
        yield (
            ChipPart(sampler, [start + training + n for start in starts for n in range(sampling)]),
            ChipPart(trainer, [start + n for start in starts for n in range(training)]),
        )


def _cuts(topology: Topology) -> Iterator[tuple[ChipPart, ChipPart]]:
    """Yield the blocks of each cut of a slice across an axis, if the chip comes in both shapes; equal pairs once."""
    seen = set()
    for axis, size in enumerate(topology.shape):
        for sampling in range(1, size):
            training = size - sampling
            pair = _block(topology, axis, training, size), _block(topology, axis, 0, training)
            if pair[0] is None or pair[1] is None:
                continue
            names = pair[0].topology.name, pair[1].topology.name
            if names not in seen:
                seen.add(names)
                yield pair[0], pair[1]


def _block(topology: Topology, axis: int, start: int, end: int) -> ChipPart | None:
    """Return the chips from `start` to `end` along an axis; None if the chip does not come in their shape."""
    ranges = [range(start, end) if place == axis else range(size) for place, size in enumerate(topology.shape)]
    # A topology has its sizes in ascending order.
    order = sorted(range(len(ranges)), key=lambda place: len(ranges[place]))
    try:
        own = Topology.make(topology.chip, tuple(len(ranges[place]) for place in order))
    except UserError:
        return None
    if own.shape != tuple(len(ranges[place]) for place in order)[: len(own.shape)]:
        return None
    devices = []
    for chosen in itertools.product(*(ranges[place] for place in order)):
        coords = [0] * len(ranges)
        for place, coordinate in zip(order, chosen, strict=True):
            coords[place] = coordinate
        devices += [topology.device_at(0, tuple(coords), core) for core in range(topology.devices_per_chip)]
    return ChipPart(own, devices)
