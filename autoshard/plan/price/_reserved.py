"""Memory of results that replace no donated argument: there from the start, and used by others until it is written.

XLA gives every buffer a place from the largest down (`BufferAssigner`): the memory of a result holds one smaller buffer
after another that is done before the result is written.
"""

import bisect
from collections.abc import Collection, Sequence
from typing import NamedTuple

from autoshard.graph import OpClass, OpGraph


NEGLIGIBLE_SHARE = 1e-4
"""Buffers below this share of all reserved memory keep their own place: they change no peak."""


class HeldBuffer(NamedTuple):
    """Bytes that every device holds during [start, stop), in op ids."""

    start: int
    stop: int
    size: int
    kind: str
    tensor: int
    """The tensor that they are of, or that they are held to make; -1 if none is known."""


def reserve(graph: OpGraph, buffers: Sequence[HeldBuffer], results: Collection[int]) -> list[HeldBuffer]:
    """Return a program's buffers with its `results` held from the start.

    A buffer that is placed in the memory of a result keeps its own bytes, and the result holds the rest meanwhile. An
    elementwise op may write its result over an operand of the same size.
    """
    end = len(graph.ops)
    homes = sorted(
        (each for each in buffers if each.tensor in results and each.stop > end and each.start > 0 and each.size),
        key=lambda each: (each.size, each.start),
    )
    sizes = [home.size for home in homes]
    least = NEGLIGIBLE_SHARE * sum(sizes)
    tenants: list[list[HeldBuffer]] = [[] for _ in homes]
    placed: list[HeldBuffer] = []
    for each in sorted(buffers, key=lambda each: (-each.size, each.start, each.stop)):
        for number in range(bisect.bisect_left(sizes, each.size), len(homes)):
            if not 0 < each.start < each.stop <= end or each.size <= least:
                break
            home = homes[number]
            over = each.size == home.size and graph.ops[home.start].op_class is OpClass.POINTWISE
            done = each._replace(stop=min(each.stop, home.start))
            apart = (each.stop <= other.start or other.stop <= each.start for other in tenants[number])
            if each.stop <= home.start + over and done.start < done.stop and all(apart):
                tenants[number].append(done)
                each = done
                break
        placed.append(each)
    for home, inside in zip(homes, tenants, strict=True):
        at = 0
        for tenant in sorted(inside):
            placed.append(home._replace(start=at, stop=tenant.start))
            placed.append(home._replace(start=tenant.start, stop=tenant.stop, size=home.size - tenant.size))
            at = tenant.stop
        placed.append(home._replace(start=at, stop=home.start))
    return [each for each in placed if each.size and each.start < each.stop]
