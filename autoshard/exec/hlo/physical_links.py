"""Collectives priced on the physical links between the very devices that take part in them."""

import dataclasses
import functools
import math
from collections.abc import Sequence

from autoshard.cost import Calibration, Collectives, Mesh, Segment, Topology


def group_segments(topology: Topology, members: Sequence[int]) -> tuple[Segment, ...] | None:
    """Physical axes that the devices (numbers in the topology) of one group span; None if they form no box.

    A group is a box if it holds every combination of the coordinates that its devices have, evenly spaced. A span of
    a whole ring is a ring; of a part of one, a line.
    """
    axes = topology.physical_axes
    places = [_place(topology, device) for device in members]
    segments = []
    for number, axis in enumerate(axes):
        here = sorted({place[number] for place in places})
        if len(here) == 1:
            continue
        steps = {b - a for a, b in zip(here, here[1:], strict=False)}
        if len(steps) != 1:
            return None
        stride = steps.pop()
        wrap = axis.wrap and len(here) * stride == axis.size
        segments.append(Segment(axis.name, axis.kind, len(here), stride, wrap))
    return tuple(segments) if math.prod(s.size for s in segments) == len(set(places)) else None


def _place(topology: Topology, device: int) -> tuple[int, ...]:
    """A device's coordinate on each of `Topology.physical_axes`."""
    found: list[int] = []
    for axis in reversed(topology.physical_axes):
        device, digit = divmod(device, axis.size)
        found.insert(0, digit)
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """Where a collective runs: its prices, and the physical axes that it occupies, each way by itself (`x+`, `x-`)."""

    prices: Collectives
    group: int
    links: frozenset[str]


@functools.lru_cache(maxsize=4096)
def route(topology: Topology, calibration: Calibration, segments: tuple[Segment, ...]) -> Route:
    """Prices of collectives over one group that spans these physical axes."""
    group = math.prod(s.size for s in segments)
    mesh = Mesh(topology, ("group",), (group,), (segments,), tuple(range(group)))
    links = {s.kind for s in segments if s.kind != "torus"}
    links |= {f"{s.axis}{way}" for s in segments if s.kind == "torus" for way in "+-"}
    return Route(Collectives(mesh, calibration), group, frozenset(links))


def permute_seconds(
    topology: Topology, calibration: Calibration, pairs: Sequence[tuple[int, int]], size: int
) -> tuple[float, frozenset[str]]:
    """Seconds of a collective-permute between devices (numbers in the topology), and the links that it occupies.

    Every pair sends along x, then y, then z, the short way round a ring; the link that most pairs cross binds. Links
    work both ways at once: of an axis, the way that most hops take is occupied (`x+`), so that the two halves of a
    shift in both directions run beside each other.
    """
    axes = topology.physical_axes
    crossings: dict[tuple[int, ...], int] = {}
    farthest, used = 0, set()
    ways: dict[str, int] = {}
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
            if axis.wrap and abs(delta) > axis.size / 2:
                delta -= int(math.copysign(axis.size, delta))
            step = 1 if delta > 0 else -1
            for _ in range(abs(delta)):
                # The devices of a chip share its links.
                link = (*(here[k] for k, other in enumerate(axes) if other.kind != "die"), number, step)
                crossings[link] = crossings.get(link, 0) + 1
                here[number] = (here[number] + step) % axis.size
            hops += abs(delta)
            ways[axis.name] = ways.get(axis.name, 0) + delta
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
        rate /= 1.0 + calibration.network_contention * (topology.slices - 1)
        seconds += max(calibration.network_latency_s, size / rate)
    torus = {f"{axis}{'+' if hops >= 0 else '-'}" for axis, hops in ways.items()}
    # The links between a chip's devices are so much faster that they are free most of the time.
    return seconds, frozenset((used - ways.keys() - {"die"}) | torus) or frozenset(used)
