"""Places of buffers in the heap of a TPU's compiler, and the bytes that holes between them add to a peak.

Evidence: docs/compiler_behaviour.md, "Holes of the heap".
"""

import bisect
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.planning.price.device_memory import LiveBuffer
from autoshard.planning.price.on_chip_memory import ARGUMENTS
from autoshard.planning.price.reshard_times import reshard_time
from autoshard.planning.space.decision_model import Model


SMALL_SHARE = 1e-5
"""Share of a peak up to which buffers make no holes. A gradient of 281 KiB made one of 1,568 MiB."""


def heap_holes(buffers: Sequence[LiveBuffer], end: int, peak_bytes: int, later: Collection[int] = ()) -> int:
    """Return the bytes by which the heap of a program exceeds the most bytes that are live in it.

    Arguments and results have allocations of their own. Small buffers are left out.

    - `end`: number of the program's ops.
    - `peak_bytes`: peak of all buffers.
    - `later`: tensors whose buffers a collective writes; they are allocated once the operands of their op are freed.
    """
    least = SMALL_SHARE * peak_bytes
    members = [
        (each.start + (each.tensor in later), each.stop, each.size)
        for each in buffers
        if each.size > least and each.stop < end and not (each.start <= 0 and each.kind in ARGUMENTS)
    ]
    members = sorted(each for each in members if each[0] < each[1])
    if len({size for *_, size in members}) < 2:
        return 0
    return _heap_bytes(members) - _live_bytes(members)


def _live_bytes(members: Sequence[tuple[int, int, int]]) -> int:
    """Return the most bytes that are live at once; members are (start, stop, bytes)."""
    changes = sorted([(stop, -size) for _, stop, size in members] + [(start, size) for start, _, size in members])
    live = most = 0
    for _, change in changes:
        live += change
        most = max(most, live)
    return most


def _heap_bytes(members: Sequence[tuple[int, int, int]]) -> int:
    """Return the bytes of a heap in which members, (start, stop, bytes) in order, are placed one after the other.

    Each takes the smallest hole that has room for it, else the end of the heap. A place is never changed.
    """
    placed: list[tuple[int, int, int]] = []  # (offset, end of the place, stop), by offset
    heap = 0
    for start, stop, size in members:
        placed = [each for each in placed if each[2] > start]
        at, holes = 0, list[tuple[int, int]]()
        for offset, beyond, _ in placed:
            if offset - at >= size:
                holes.append((offset - at, at))
            at = beyond
        place = min(holes)[1] if holes else at
        bisect.insort(placed, (place, place + size, stop))
        heap = max(heap, place + size)
    return heap


def written_by_collectives(model: Model, choices: NDArray[np.int64]) -> set[int]:
    """Return the results of heavy ops that a collective brings to the spec of their cluster."""
    found = set[int]()
    for reshard in model.reshards:
        ends = model.nodes[reshard.source].kind, model.nodes[reshard.target].kind
        if ends == ("op", "cluster") and reshard_time(model, reshard, choices).steps:
            found.add(reshard.tensor)
    return found
