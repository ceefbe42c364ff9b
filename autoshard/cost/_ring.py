"""Walks through a box of devices in which neighbours are one hop apart."""

import itertools
import math
from collections.abc import Sequence


def snake(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """All points of a box, each one step from the one before (boustrophedon order)."""
    if not shape:
        return [()]
    rest = snake(shape[1:])
    return [(i, *point) for i in range(shape[0]) for point in (rest if i % 2 == 0 else rest[::-1])]


def ring(shape: Sequence[int], wrap: Sequence[bool]) -> list[tuple[int, ...]]:
    """All points of a box so that neighbours, also last and first, are one step apart where the box allows it.

    A box with an even side and another side longer than one has such a cycle: walk one column of it down at the end,
    the rest as a snake. Fully wrapped boxes keep row-major order, in which the hardware's own
    torus collectives find whole rings.
    """
    if all(wrap) or len(shape) < 2:
        return list(itertools.product(*(range(size) for size in shape)))
    even = next((i for i, size in enumerate(shape) if size % 2 == 0 and math.prod(shape) > size), None)
    if even is None:
        return snake(shape)
    # `path` walks the other sides; (step, place on the path) is a plain grid with an even number of rows.
    path = snake([*shape[:even], *shape[even + 1 :]])
    cells = [(0, 0)]
    for row in range(shape[even]):
        places = range(1, len(path))
        cells += [(row, place) for place in (places if row % 2 == 0 else reversed(places))]
    cells += [(row, 0) for row in range(shape[even] - 1, 0, -1)]
    return [(*path[place][:even], row, *path[place][even:]) for row, place in cells]
