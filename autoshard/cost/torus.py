"""Rings and twists of tori: neighbours, distances, and walks through a box of devices."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from autoshard.cost.axis_layout import Segment


def in_group(segments: Sequence[Segment], axes: dict[str, int]) -> list[Segment]:
    """Return the segments of a group on a twisted torus, with rings opened that the twist breaks.

    A short axis, the shortest of all, is a ring only in a group with the major digit of every long axis. `axes` maps
    axis name to size.
    """
    short = min(axes.values())
    tops = {s.axis for s in segments if s.size * s.stride == axes.get(s.axis)}
    closed = all(name in tops for name, size in axes.items() if size > short)
    return [s if closed or axes.get(s.axis) != short else dataclasses.replace(s, wrap=False) for s in segments]


def is_whole(segments: Sequence[Segment], axes: dict[str, int]) -> bool:
    """Return True if a group of a twisted torus consists of whole axes: every long axis and at least one short axis.

    `axes` maps axis name to size; the short axes are the shortest.
    """
    short = min(axes.values())
    whole = {s.axis for s in segments if s.size == axes.get(s.axis)}
    long = {name for name, size in axes.items() if size > short}
    return {s.axis for s in segments} == whole and long < whole


@functools.cache
def mean_hops(shape: tuple[int, ...]) -> tuple[tuple[float, ...], int]:
    """Return the mean hops along each axis between two chips of a twisted torus, and the most hops of any two.

    Paths are shortest paths; equally short paths share the traffic equally.
    """
    short = min(shape)
    # Rows are the translations that close each axis; a short axis also moves half-way along every long axis.
    lattice = np.diag(shape)
    for axis, size in enumerate(shape):
        if size == short:
            lattice[axis, [other for other, length in enumerate(shape) if length > short]] = short
    apart = np.array(list(itertools.product(*(range(size) for size in shape))))
    ways = np.array(list(itertools.product((-1, 0, 1, 2), repeat=len(shape)))) @ lattice
    steps = np.abs(apart[:, None, :] - ways[None, :, :])
    total = steps.sum(axis=2)
    best = total == total.min(axis=1, keepdims=True)
    shared = (steps * best[:, :, None]).sum(axis=1) / best.sum(axis=1)[:, None]
    return tuple(float(hops) for hops in shared.mean(axis=0)), int(total.min(axis=1).max())


def snake(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all points of a box, each one step from the one before; a box without dims has one empty point."""
    if not shape:
        return [()]
    rest = snake(shape[1:])
    return [(i, *point) for i in range(shape[0]) for point in (rest if i % 2 == 0 else rest[::-1])]


def ring(shape: Sequence[int], wrap: Sequence[bool]) -> list[tuple[int, ...]]:
    """Return all points of a box in an order whose neighbours, also last and first, are one step apart if possible.

    A box with an even side and another side longer than one has such a cycle. The cycle walks the box as a snake, and
    returns along one column. Any other box is a plain snake. Fully wrapped boxes and boxes of one dim stay row-major,
    the order in which the hardware's torus collectives find whole rings.
    """
    if all(wrap) or len(shape) < 2:
        return list(itertools.product(*(range(size) for size in shape)))
    even = next((i for i, size in enumerate(shape) if size % 2 == 0 and math.prod(shape) > size), None)
    if even is None:
        return snake(shape)
    # `path` walks the other sides. (step, place on the path) is a plain grid with an even number of rows.
    path = snake([*shape[:even], *shape[even + 1 :]])
    cells = [(0, 0)]
    for row in range(shape[even]):
        places = range(1, len(path))
        cells += [(row, place) for place in (places if row % 2 == 0 else reversed(places))]
    cells += [(row, 0) for row in range(shape[even] - 1, 0, -1)]
    return [(*path[place][:even], row, *path[place][even:]) for row, place in cells]
