"""Buffers that stay in on-chip memory (VMEM), for their whole life or for its end, and take no main memory then.

Evidence: docs/compiler_behaviour.md, "Tensors in on-chip memory".
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Topology
from autoshard.planning.price.device_memory import NEGLIGIBLE_SHARE, LiveBuffer
from autoshard.planning.space.decision_model import RESERVED, SCOPED, Model


_TAKEN = {chip: scoped + (64 << 10) for chip, scoped in SCOPED.items()}
"""Bytes of on-chip memory that values do not get, by chip, where they are not `RESERVED`."""

_RATE = {"v6e": 0.28}
"""Share of the peak rate at which the compiler's cost model has matmuls, by chip, where it is not 1."""

COPIES = 8
"""Longest time from one use of a value on the chip to the next, in copies of all on-chip memory for values.

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
    room = max(0, chip.vmem_bytes - _TAKEN.get(chip.name, RESERVED))
    return room if room >= NOTICED * peak_bytes else 0


def without_on_chip(
    model: Model, choices: NDArray[np.int64], buffers: Sequence[LiveBuffer], room: int, away: Collection[int] = ()
) -> list[LiveBuffer]:
    """Return the buffers in main memory while they are there; at most `room` bytes are in on-chip memory at a time.

    Values are placed one after the other, in the order of `_Kernels.worth`. A value stays on the chip from one use to
    the next if there is room, and if the time between is within `COPIES`. Otherwise it is copied to main memory once
    it is written. It is fetched before a later use if there are time and room. It leaves main memory if it then stays
    on the chip. Arguments, results and values that a loop carries are always in main memory too. The tensors `away`
    are read and written there.

    Values that are written inside of a loop take room, but count as in main memory. Loops have their peaks where they
    copy what they carry, and a third of what fits into the chip was there in compiled bodies.
    """
    graph, end = model.graph, len(model.graph.ops)
    elsewhere = {t for loop in graph.loops for carry in loop.carries for t in dataclasses.astuple(carry)}
    elsewhere.update(graph.results, model.liveness.hosted)
    kernels = _Kernels(model, choices, buffers)
    longest = COPIES * float(model.compute.memory_seconds(room))
    used = np.zeros(end + 1, dtype=np.int64)
    worth: list[tuple[float, int, list[int]]] = []
    for number, each in enumerate(buffers):
        if NEGLIGIBLE_SHARE * room < each.size <= room and each.start < end and each.tensor not in away:
            uses = kernels.uses(each, end)
            stored = each.kind in ARGUMENTS or each.tensor in elsewhere or each.stop > end
            worth.append((-kernels.worth(each, uses, stored), number, uses))
    left = list(buffers)
    for _, number, uses in sorted(worth):
        each = buffers[number]
        stored = each.kind in ARGUMENTS or each.tensor in elsewhere or each.stop > end
        loop = graph.ops[each.start].loop
        needed = kernels.place(each, uses, used, room, longest * graph.trips(loop), stored)
        if not stored and loop < 0:
            left[number] = each._replace(stop=needed)
    return [each for each in left if each.stop > each.start]


def kernel_clock(model: Model, choices: NDArray[np.int64], buffers: Sequence[LiveBuffer]) -> NDArray[np.float64]:
    """Return the seconds of compute in a step before each op, [ops + 1]; `buffers` are all values of the step."""
    return _Kernels(model, choices, buffers).clock


class _Kernels:
    """Kernels of a step as the compiler's cost model for on-chip memory has them: FLOPs at a share of the peak rate,
    and bytes at the bandwidth of main memory.
    """

    def __init__(self, model: Model, choices: NDArray[np.int64], buffers: Sequence[LiveBuffer]) -> None:
        """Compute the times of all kernels; `buffers` are all values that are read and written."""
        graph, self.byte_seconds = model.graph, float(model.compute.memory_seconds(1.0))
        self.reads: dict[int, set[int]] = defaultdict(set)
        """Ops whose kernels read each tensor."""
        compute, moved = np.zeros(len(graph.ops)), np.zeros(len(graph.ops))
        size_of = {each.tensor: each.size for each in buffers}
        for fusion in model.liveness.fusions:
            for tensor in fusion.reads:
                self.reads[tensor].add(fusion.kernel)
                moved[fusion.kernel] += size_of.get(tensor, 0)
        for each in buffers:
            if each.start < len(graph.ops) and each.kind not in ARGUMENTS:
                moved[each.start] += each.size
        sizes, chip = np.array(model.axis_sizes), model.mesh.topology.chip.name
        for number, node in model.op_node.items():
            op, state = graph.ops[number], model.nodes[node].states[int(choices[node])]
            for tensor in op.operands:
                self.reads[tensor].add(number)
            if op.flops:
                parts = math.prod(sizes[state >= 0].tolist())
                rate = model.mesh.topology.peak_flops(graph.multiplied_dtype(op)) * _RATE.get(chip, 1.0)
                compute[number] = op.flops / parts / rate
        self.spare = moved * self.byte_seconds - compute
        """Seconds by which memory traffic takes longer than compute in each op; negative where it does not."""
        trips = np.array([graph.trips(op.loop) for op in graph.ops])
        self.clock = np.concatenate([[0.0], np.cumsum(np.maximum(compute, moved * self.byte_seconds) * trips)])
        """Seconds of a step before each op, [ops + 1]."""

    def uses(self, each: LiveBuffer, end: int) -> list[int]:
        """Return in order the ops that read a buffer; the last op of its life counts as one.

        An op that writes over a buffer in main memory reads it too. On the chip it writes its result elsewhere.
        """
        last = min(each.stop, end) - 1
        reads = {op for op in self.reads.get(each.tensor, ()) if each.start < op <= min(each.stop, end - 1)}
        if each.kind not in ARGUMENTS:
            reads.add(last)
        return sorted(reads)

    def worth(self, each: LiveBuffer, uses: Sequence[int], stored: bool) -> float:
        """Return the seconds that a value saves on the chip, over the root of its bytes: XLA's order of placement.

        A use saves the transfer if memory traffic bounds its kernel. A value without such uses has a negative worth.
        """
        saved = 0.0 if stored else self._saved(each, each.start)
        for use in uses:
            more = self._saved(each, use)
            saved = saved + more if saved > 0.0 and more > 0.0 else max(saved, more)
        return saved / math.sqrt(each.size)

    def _saved(self, each: LiveBuffer, op: int) -> float:
        """Return the seconds that an op saves if a value is on the chip; negative for a kernel that compute bounds."""
        return each.size * self.byte_seconds if self.spare[op] > 0.0 else float(self.spare[op])

    def place(
        self, each: LiveBuffer, uses: Sequence[int], used: NDArray[np.int64], room: int, longest: float, stored: bool
    ) -> int:
        """Place a value on the chip where it can be, and return the op from which main memory no longer has it.

        This is the value's start if it never is in main memory. The bytes are added to `used`, [ops + 1] (in place).
        A value that is `stored` is in main memory from its start to its stop, and only fetched.
        """
        here, needed, before = not stored, each.start if not stored else each.stop, each.start
        for use in uses:
            waits = self.clock[use] - self.clock[before + 1]
            during = used[before : use + 1] if here and before == each.start else used[before + 1 : use + 1]
            if here and waits <= longest and during.max(initial=0) + each.size <= room:
                during += each.size
            else:
                first = self._fetched_from(each, use, used, room)
                here = first < use
                needed = max(needed, use if here else use + 1)
                used[first : use + 1] += each.size * here
            before = use
        return min(needed, each.stop)

    def _fetched_from(self, each: LiveBuffer, use: int, used: NDArray[np.int64], room: int) -> int:
        """Return the op from which a value that is fetched for a use has its place; the use itself if it has none.

        XLA prefers a start so that the kernels before the use take the time of one copy, and starts later if there is
        no room. A copy in slices begins during the kernel before. Time that the use saves may be missing.
        """
        copy = each.size * self.byte_seconds
        full = np.flatnonzero(used[each.start + 1 : use + 1] + each.size > room)
        earliest = each.start + 1 + (int(full[-1]) + 1 if len(full) else 0)
        begins = self.clock[earliest + 1 : use + 1]
        begins = begins[begins <= self.clock[use] - copy + max(0.0, self._saved(each, use))]
        if not len(begins):
            return use
        apart = np.abs(self.clock[use] - copy - begins)
        # Kernels of a few numbers take no time.
        best = begins[np.argmax(apart <= apart.min() + 0.01 * copy)]
        return max(earliest, int(np.searchsorted(self.clock, best)) - 1)
