"""Twisted tori: what a group of chips has of its rings, and how far its chips are from each other.

In a torus of k x k x 2k or k x 2k x 2k chips the links that would close a short axis (k) may instead lead to the
chip half-way along every long axis (2k). All axes then carry the same load when every chip talks to every other
(Jouppi et al., "TPU v4", ISCA 2023: all-to-all 1.63 times as fast on 4x4x8, 1.31 times on 4x8x8, where the shortest
paths counted here allow 1.75 and 1.39). A short axis alone is only a line: its last link leaves the group.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from autoshard.cost._layout import Segment


def in_group(segments: Sequence[Segment], axes: dict[str, int]) -> list[Segment]:
    """Segments of a group on a twisted torus (axis name -> size): a short axis is a ring only within one that holds
    the major half of every long axis too."""
    short = min(axes.values())
    tops = {s.axis for s in segments if s.size * s.stride == axes.get(s.axis)}
    closed = all(name in tops for name, size in axes.items() if size > short)
    return [s if closed or axes.get(s.axis) != short else dataclasses.replace(s, wrap=False) for s in segments]


def is_whole(segments: Sequence[Segment], axes: dict[str, int]) -> bool:
    """Whether a group is whole axes, every long one and at least one short one among them."""
    short = min(axes.values())
    whole = {s.axis for s in segments if s.size == axes.get(s.axis)}
    long = {name for name, size in axes.items() if size > short}
    return {s.axis for s in segments} == whole and long < whole


@functools.cache
def mean_hops(shape: tuple[int, ...]) -> tuple[tuple[float, ...], int]:
    """Mean hops along each axis of a twisted torus between two of its chips, and the most hops of any two.

    By shortest paths; of several equally short ones each takes its share.
    """
    short = min(shape)
    closing = np.diag(shape)
    for axis, size in enumerate(shape):
        if size == short:
            closing[axis, [other for other, length in enumerate(shape) if length > short]] = short
    apart = np.array(list(itertools.product(*(range(size) for size in shape))))
    ways = np.array(list(itertools.product((-1, 0, 1, 2), repeat=len(shape)))) @ closing
    steps = np.abs(apart[:, None, :] - ways[None, :, :])
    total = steps.sum(axis=2)
    best = total == total.min(axis=1, keepdims=True)
    shared = (steps * best[:, :, None]).sum(axis=1) / best.sum(axis=1)[:, None]
    return tuple(float(hops) for hops in shared.mean(axis=0)), int(total.min(axis=1).max())
