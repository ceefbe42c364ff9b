"""Prices of collectives on the physical links between the devices of their groups."""

import dataclasses
import functools
import math
from collections.abc import Sequence

from autoshard.cost import Calibration, Collectives, Mesh, Segment, Topology


def group_segments(topology: Topology, members: Sequence[int]) -> tuple[Segment, ...] | None:
    """Return the physical axes that the devices of one group span; None if the devices form no box.

    `members` are numbers in the topology. A group is a box if it contains every combination of its devices'
    coordinates, evenly spaced. A span of a whole ring is a ring, a span of a part of it a line. One device spans no
    axis.
    """
    axes = topology.physical_axes
    places = [_place(topology, device) for device in members]
    segments = []
    for number, axis in enumerate(axes):
        coordinates = sorted({place[number] for place in places})
        if len(coordinates) == 1:
            continue
        steps = {b - a for a, b in zip(coordinates, coordinates[1:], strict=False)}
        if len(steps) != 1:
            return None
        stride = steps.pop()
        wrap = axis.wrap and len(coordinates) * stride == axis.size
        segments.append(Segment(axis.name, axis.kind, len(coordinates), stride, wrap))
    return tuple(segments) if math.prod(s.size for s in segments) == len(set(places)) else None


def _place(topology: Topology, device: int) -> tuple[int, ...]:
    """Return a device's coordinate on each of `Topology.physical_axes`."""
    coordinates: list[int] = []
    for axis in reversed(topology.physical_axes):
        device, digit = divmod(device, axis.size)
        coordinates.insert(0, digit)
    return tuple(coordinates)


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """Prices of a group's collectives, and the links that they occupy."""

    prices: Collectives
    """Prices over a mesh with the single axis `group`."""
    group: int
    """Number of devices in the group."""
    links: frozenset[str]
    """Torus axes, each direction apart (`x+`, `x-`), and kinds of other axes (`die`, `network`)."""


@functools.lru_cache(maxsize=4096)
def route(topology: Topology, calibration: Calibration, segments: tuple[Segment, ...]) -> Route:
    """Return the prices of collectives over one group that spans these physical axes, which form its mesh; cached."""
    group = math.prod(s.size for s in segments)
    mesh = Mesh(topology, ("group",), (group,), (segments,), tuple(range(group)))
    links = {s.kind for s in segments if s.kind != "torus"}
    links |= {f"{s.axis}{way}" for s in segments if s.kind == "torus" for way in "+-"}
    return Route(Collectives(mesh, calibration), group, frozenset(links))


def permute_seconds(
    topology: Topology, calibration: Calibration, pairs: Sequence[tuple[int, int]], size: int
) -> tuple[float, frozenset[str]]:
    """Return the seconds of a collective-permute, and the links that it occupies (as in `Route`).

    Every pair sends along x, then y, then z, the short way round a ring; the link that most pairs cross binds. Links
    carry both directions at once. The direction of an axis with most hops is occupied (`x+`), so that the two halves of
    a shift in both directions overlap. Times on the torus, between the devices of a chip and on the network add up,
    after the launch. Without a pair of different devices the result is 0 and no links.

    - `pairs`: source and target of each transfer, as numbers in the topology.
    - `size`: bytes that each source sends.
    """
    axes = topology.physical_axes
    crossings: dict[tuple[int, ...], int] = {}
    farthest, used = 0, set()
    net_hops: dict[str, int] = {}
    for source, target in pairs:
        here, there = list(_place(topology, source)), _place(topology, target)
        hops = 0
        for number, axis in enumerate(axes):
            delta = there[number] - here[number]
            if not delta:
                continue
            if axis.kind != "torus":
                hops += 1
                used.add(axis.kind)
                here[number] = there[number]
                continue
            used.add(axis.name)
            # The other way round the ring is shorter.
            if axis.wrap and abs(delta) > axis.size / 2:
                delta -= int(math.copysign(axis.size, delta))
            step = 1 if delta > 0 else -1
            for _ in range(abs(delta)):
                # The devices of a chip share its links.
                link = (*(here[k] for k, other in enumerate(axes) if other.kind != "die"), number, step)
                crossings[link] = crossings.get(link, 0) + 1
                here[number] = (here[number] + step) % axis.size
            hops += abs(delta)
            net_hops[axis.name] = net_hops.get(axis.name, 0) + delta
        farthest = max(farthest, hops)
    if not used:
        return 0.0, frozenset()
    chip = topology.chip
    seconds = calibration.collective_launch_s
    if used - {"die", "network"}:
        rate = chip.link_oneway_bytes_per_s * calibration.link_efficiency
        seconds += max(farthest * calibration.hop_s, max(crossings.values(), default=0) * size / rate)
    if "die" in used:
        seconds += size / (chip.die_link_oneway_bytes_per_s * calibration.link_efficiency)
    if "network" in used:
        rate = chip.network_bytes_per_s_per_chip * calibration.network_efficiency / topology.devices_per_chip
        # All slices send at once, and each further slice slows the network down.
        rate /= 1.0 + calibration.network_contention * (topology.slices - 1)
        seconds += max(calibration.network_latency_s, size / rate)
    torus = {f"{axis}{'+' if hops >= 0 else '-'}" for axis, hops in net_hops.items()}
    # Links between a chip's devices are so fast that they are free most of the time. They are occupied only if no other
    # link is.
    return seconds, frozenset((used - net_hops.keys() - {"die"}) | torus) or frozenset(used)
