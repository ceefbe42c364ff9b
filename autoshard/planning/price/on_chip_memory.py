"""Buffers that stay in on-chip memory (VMEM) for their whole life, and therefore take no main memory.

Evidence: docs/compiler_behaviour.md, "Tensors in on-chip memory".
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Topology
from autoshard.graph import OpClass
from autoshard.planning.price.device_memory import NEGLIGIBLE_SHARE, LiveBuffer
from autoshard.planning.space.decision_model import Model


TENSORS_SHARE = 0.75
"""Share of on-chip memory that tensors occupy: 96 of 128 MiB on v6e. On v5e it is 112, but the plan must fit."""

COPIES = 8
"""Longest time from one use of a value on the chip to the next, in copies of a core's whole on-chip memory.

This is libtpu's default of `xla_vf_vmem_max_overlap_to_mem_size_async_copy_ratio`.
"""

NOTICED = 0.01
"""Least share of a peak for which on-chip memory counts: large programs are within 1 % without it."""

ARGUMENTS = frozenset({"parameters", "optimizer_state", "batch"})
"""Kinds of the buffers of arguments."""


def on_chip_room(topology: Topology, peak_bytes: int) -> int:
    """Return the most bytes by which on-chip memory lowers a peak; 0 if they are less than `NOTICED` of it.

    On chips with several cores, kernels write nearly all results to main memory, as compiled for v5p and tpu7x.
    """
    chip = topology.chip
    if chip.cores_per_chip > 1:
        return 0
    room = int(TENSORS_SHARE * chip.vmem_bytes)
    return room if room >= NOTICED * peak_bytes else 0


def without_on_chip(
    model: Model, choices: NDArray[np.int64], buffers: Sequence[LiveBuffer], room: int, away: Collection[int] = ()
) -> list[LiveBuffer]:
    """Return the buffers that are in main memory at any time; the others stay within `room` bytes of on-chip memory.

    A value is on the chip if there is room from its first to its last use. The time between two uses is limited too, by
    `COPIES`. Otherwise the value is copied to main memory once it is written, and fetched again for each use.
    Arguments, results and values that a loop carries are in main memory, but are fetched and then take room too. The
    tensors `away` are read and written in main memory.

    The peak errs on the safe side. Compilers place first what saves the most time. The order here is by size instead,
    the smallest first, so that large values find the least room. Values that are written inside of a loop take room,
    but count as in main memory. Loops have their peaks where they copy what they carry, and a third of what fits into
    the chip was there in compiled bodies.
    """
    graph, end = model.graph, len(model.graph.ops)
    elsewhere = {t for loop in graph.loops for carry in loop.carries for t in dataclasses.astuple(carry)}
    elsewhere.update(graph.results, model.liveness.hosted)
    reads, clock = _reads(model), _clock(model, choices, buffers)
    chip = model.mesh.topology.chip
    longest = COPIES * float(model.compute.memory_seconds(chip.vmem_bytes))
    used = np.zeros(end + 1, dtype=np.int64)
    on_chip: set[int] = set()
    for number in sorted(range(len(buffers)), key=lambda number: buffers[number].size):
        each = buffers[number]
        if not NEGLIGIBLE_SHARE * room < each.size <= room or each.start >= end or each.tensor in away:
            continue
        stop = min(each.stop, end)
        uses = [use for use in reads.get(each.tensor, ()) if each.start <= use < stop]
        fetched = each.kind in ARGUMENTS or each.tensor in elsewhere or each.stop > end
        if not fetched:
            uses = [each.start, *uses, stop - 1]
        if not uses:
            continue
        during = used[uses[0] : uses[-1] + 1]
        loop = graph.ops[each.start].loop
        wait = max((clock[b] - clock[a] for a, b in itertools.pairwise(uses)), default=0.0)
        if wait <= longest * graph.trips(loop) and during.max() + each.size <= room:
            during += each.size
            if not fetched and loop < 0:
                on_chip.add(number)
        else:
            used[uses] += np.where(used[uses] + each.size <= room, each.size, 0)
    return [each for number, each in enumerate(buffers) if number not in on_chip]


def _reads(model: Model) -> dict[int, list[int]]:
    """Return in order the ops whose kernels read each tensor, by tensor."""
    reads: dict[int, set[int]] = defaultdict(set)
    for fusion in model.liveness.fusions:
        for tensor in fusion.reads:
            reads[tensor].add(fusion.root)
    for op in model.graph.ops:
        if op.op_class is OpClass.HEAVY:
            for tensor in op.operands:
                reads[tensor].add(op.id)
    return {tensor: sorted(ops) for tensor, ops in reads.items()}


def _clock(model: Model, choices: NDArray[np.int64], buffers: Sequence[LiveBuffer]) -> list[float]:
    """Return the seconds of a step before each op, [ops + 1], over all trips of loops.

    They are those of heavy ops, and of writing all values to main memory.
    """
    graph, byte_seconds = model.graph, float(model.compute.memory_seconds(1.0))
    seconds = np.zeros(len(graph.ops) + 1)
    for op, number in model.op_node.items():
        node = model.nodes[number]
        seconds[op + 1] += sum(float(s[choices[number]]) for (_, what), s in node.time.items() if what == "compute")
    for each in buffers:
        if each.kind not in ARGUMENTS and each.start < len(graph.ops):
            seconds[each.start + 1] += graph.trips(graph.ops[each.start].loop) * each.size * byte_seconds
    return seconds.cumsum().tolist()
