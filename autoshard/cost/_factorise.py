"""Every mesh worth a look on a topology: its devices as a product of one to four axes, each laid on physical axes."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from autoshard.cost._layout import Segment, least_cuts
from autoshard.cost._mesh import Mesh, default_axis_names, make_mesh
from autoshard.cost._topology import Topology


MOST_AXES = 4


@functools.lru_cache(maxsize=16)
def candidate_meshes(topology: Topology, most_axes: int = MOST_AXES) -> tuple[Mesh, ...]:
    """Meshes of 1 to `most_axes` axes over all devices, axes named as by `default_axis_names`.

    Fewer axes come first, and of equally many those on whole physical axes.

    Every way to write the number of devices as a product of sizes from 2 up is laid on the physical axes; of its
    orders those that cut physical axes the least are kept (so slices, chips of two devices and the rings of an
    unequal torus become axes of their own where the sizes allow), and of those with the same sizes and kinds of links
    the one with the largest axes first. A mesh that cuts physical axes more than once, and more than its number of
    axes asks for, is left out.
    """
    if topology.num_devices == 1:
        return (make_mesh(topology, {default_axis_names(1)[0]: 1}),)
    found = []
    for count in range(1, most_axes + 1):
        laid = [pair for sizes in _factorisations(topology.num_devices, count, 2) for pair in _laid(topology, sizes)]
        found.extend(mesh for _, mesh in sorted(laid, key=lambda pair: pair[0]))
    return tuple(found)


def _factorisations(number: int, count: int, least: int) -> Iterator[tuple[int, ...]]:
    """Ascending tuples of `count` numbers from `least` up whose product is `number`."""
    if count == 1:
        if number >= least:
            yield (number,)
        return
    for first in range(least, math.isqrt(number) + 1):
        if number % first == 0 and first**count <= number:
            for rest in _factorisations(number // first, count - 1, first):
                yield (first, *rest)


def _laid(topology: Topology, sizes: tuple[int, ...]) -> list[tuple[int, Mesh]]:
    """Meshes of these sizes, each with how often it cuts a physical axis."""
    physical = topology.physical_axes
    fewest = least_cuts(sizes, physical, max(1, len(sizes) - sum(axis.size > 1 for axis in physical)))
    if fewest is None:
        return []
    names = default_axis_names(len(sizes))
    distinct: dict[tuple[object, ...], Mesh] = {}
    for order in sorted(set(itertools.permutations(sizes)), reverse=True):
        mesh = make_mesh(topology, dict(zip(names, order, strict=True)))
        if _cuts(mesh.layout) == fewest:
            distinct.setdefault(tuple(sorted(map(_kinds, mesh.layout))), mesh)
    return [(fewest, mesh) for mesh in distinct.values()]


def _cuts(layout: Sequence[Sequence[Segment]]) -> int:
    """How often a physical axis is cut between two axes of the mesh."""
    pieces = [segment.axis for segments in layout for segment in segments]
    return len(pieces) - len(set(pieces))


def _kinds(segments: Sequence[Segment]) -> tuple[tuple[str, int], ...]:
    """Devices by kind of link."""
    products: dict[str, int] = {}
    for segment in segments:
        products[segment.kind] = products.get(segment.kind, 1) * segment.size
    return tuple(sorted(products.items()))
