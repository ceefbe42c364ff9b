"""Values that kernels store in memory, and the multi-output fusion of sibling elementwise ops."""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from autoshard.graph.memory.epilogue_fusion import SMALL, leads_from_matmul
from autoshard.graph.memory.host_transfers import INTO_STACKS, TO_DEVICE, TO_HOST
from autoshard.graph.records import Fusion, Op, OpClass, OpGraph


CHEAP_INTO_MATMUL = frozenset({"convert", "transpose", "reshape", "broadcast_in_dim"})
_WRITERS = frozenset({"reduce", "case", "if", TO_DEVICE})
_PARTS = frozenset({"slice", "pad"})


def ends_fusion(op: Op, pinned: Collection[int], kernels: Collection[int]) -> bool:
    """True for an op that ends its fusion: what it makes is written in any case."""
    writes = op.kind in _WRITERS or op.kind == "dynamic_update_slice" or any(t in pinned for t in op.results)
    return writes or op.id in kernels


@dataclasses.dataclass(frozen=True, slots=True)
class Writing:
    """Decides of every value of a program whether it is written."""

    graph: OpGraph
    consumers: Sequence[Sequence[int]]
    pinned: Collection[int]
    """Values that are written in any case."""
    sizes: Sequence[int]
    """Bytes of every value, as it would be stored."""
    kernels: Collection[int]
    """Ops with a kernel of their own."""
    inner: Collection[int]
    """Matmuls whose kernels compute what leads to them."""
    fused_matmuls: bool
    latest: Sequence[int]
    """What `latest_makers` gives."""
    gpu_kernels: bool = False
    """True for the kernels of XLA for GPUs.

    A value of several kernels is stored only where that moves fewer bytes than computing it in each. The last cast of a
    chain from a computed value is stored for the matmul that takes it.
    """

    def is_written(self, op: Op, tensor: int, ends: frozenset[int] | None, reads: frozenset[int]) -> bool:
        """`ends`: ops, ends of fusions, that the value leads to; None for many. `reads`: what it follows from in
        memory."""
        if ends_fusion(op, self.pinned, self.kernels):
            return True
        users = self.consumers[tensor]
        if op.kind == TO_HOST and any(self.graph.ops[u].kind not in INTO_STACKS for u in users):
            return True  # else it goes to the host as the stack's slice
        if self.fused_matmuls and self._is_rounded_and_summed(tensor):
            return False
        apart = any(u in self.kernels and not self._inside(op, u) for u in users)
        if self.fused_matmuls and sum(self.graph.ops[u].kind in _PARTS for u in users) > 1:
            apart = True  # computed inside of their kernel it would be computed once for every part
        if apart and op.op_class is not OpClass.LAYER:
            if op.kind not in CHEAP_INTO_MATMUL:
                return True
            if self.gpu_kernels and reads and reads != {self._source(tensor)}:
                return True
        summed = self.fused_matmuls and op.kind == "convert" and self._is_rounded_and_summed(op.operands[0])
        if summed and ends:
            return self._pays(tensor, reads, len(ends), len(ends) + 1)
        if len(users) < 2:
            return False
        if ends is not None and (len(ends) == 1 or all(self._inside(op, end) for end in ends)):
            return len(ends) > 1 and self._pays(tensor, reads, len(ends), len(ends))
        if any(self._inside(op, u) for u in users):
            # Matmuls compute it again, and others do if it follows from one value of its size.
            elements = self.graph.tensors[tensor].elements
            return sum(self.graph.tensors[t].elements >= elements for t in reads) > 1
        before, own = sum(self.sizes[t] for t in reads), self.sizes[tensor]
        if self.gpu_kernels:
            kernels = len(users) if ends is None else len(ends)
            return kernels * before > before + (kernels + 1) * own
        return before > own

    def _source(self, tensor: int) -> int:
        """Return the value that a chain of ops which kernels of matmuls do as they load begins with."""
        while (maker := self.graph.tensors[tensor].producer) >= 0:
            if self.graph.ops[maker].kind not in CHEAP_INTO_MATMUL:
                break
            tensor = self.graph.ops[maker].operands[0]
        return tensor

    def _inside(self, op: Op, user: int) -> bool:
        return user in self.inner and self.graph.ops[user].loop == op.loop

    def _pays(self, tensor: int, reads: frozenset[int], matmuls: int, kernels: int) -> bool:
        """Whether less is moved if a value is stored for so many matmuls, than if so many kernels compute it.

        Stored, it is made once, written, and read by each; or the kernel of the matmul that it follows from makes it.
        """
        own = self.sizes[tensor]
        before = sum(self.sizes[t] for t in reads if self.sizes[t] * SMALL > own)
        if kernels * before > before + (matmuls + 1) * own:
            return True
        return leads_from_matmul(self.graph, tensor, reads, self.consumers, self.inner, self.pinned, self.latest)

    def _is_rounded_and_summed(self, tensor: int) -> bool:
        """Whether a value is rounded to a narrower dtype, and else only summed: sums are made beside what is stored."""
        record = self.graph.tensors[tensor]
        if record.producer < 0 or self.graph.ops[record.producer].op_class is not OpClass.POINTWISE:
            return False
        if tensor in self.pinned:
            return False
        users = [self.graph.ops[user] for user in self.consumers[tensor]]
        rounds = [u for u in users if u.kind == "convert" and self.graph.tensors[u.results[0]].bytes < record.bytes]
        others = [u for u in users if u not in rounds]
        return (
            len(rounds) == 1 and bool(others) and all(u.kind == "reduce" and u.loop == rounds[0].loop for u in others)
        )


def computed_inside(
    graph: OpGraph, matmuls: Collection[int], reach: Mapping[int, frozenset[int]], sizes: Sequence[int]
) -> dict[int, float]:
    """`Liveness.computed`: gated activations read two values for one.

    Weights are left out, which are converted, and gathered, before: what follows from an argument, or from a slice of
    a stack.
    """
    found = {}
    for op_id in matmuls:
        op = graph.ops[op_id]
        for tensor in op.operands:
            reads = reach.get(tensor, frozenset())
            if tensor in reads or not graph.tensors[tensor].bytes:
                continue
            makers = [graph.tensors[t].producer for t in reads]
            if any(maker < 0 or graph.ops[maker].op_class is OpClass.LAYER for maker in makers):
                continue
            if any(graph.tensors[t].loop != op.loop for t in reads):
                continue
            ratio = sum(sizes[t] for t in reads) / graph.tensors[tensor].bytes
            if ratio > 1.0:
                found[tensor] = ratio
    return found


_MOVES = frozenset({"slice", "dynamic_update_slice"})
_MOST = 8
"""Results of one kernel, at most."""


@dataclasses.dataclass(slots=True)
class _Kernel:
    first: int
    """The op that ends its first fusion: what it takes is there before."""
    elements: int
    seen: set[int]
    """What it reads and writes."""
    results: int = 1


def joined(graph: OpGraph, fusions: Sequence[Fusion]) -> list[Fusion]:
    """The same fusions; those that another's kernel does beside its own work do not read again what it reads or makes,
    and are `beside`."""
    found = list(fusions)
    kernels: dict[int, list[_Kernel]] = defaultdict(list)
    """By value the kernels that read or write it."""
    for number, fusion in enumerate(fusions):
        root = graph.ops[fusion.root]
        if not fusion.moved or not _is_light(root):
            continue
        size = sum(graph.tensors[t].elements for t in fusion.moved)
        host = next((k for t in fusion.reads for k in kernels[t] if _may_join(graph, k, fusion, root, size)), None)
        if host is None:
            host = _Kernel(root.id, size, set())
        else:
            host.results += 1
            found[number] = dataclasses.replace(
                fusion, reads=tuple(t for t in fusion.reads if t not in host.seen), beside=True
            )
        for tensor in {*fusion.reads, *fusion.writes} - host.seen:
            host.seen.add(tensor)
            kernels[tensor].append(host)
    return found


def _is_light(op: Op) -> bool:
    return op.op_class is OpClass.POINTWISE or op.kind in _MOVES


def _may_join(graph: OpGraph, kernel: _Kernel, fusion: Fusion, root: Op, size: int) -> bool:
    if kernel.results >= _MOST or kernel.elements != size or graph.ops[kernel.first].loop != root.loop:
        return False
    return all(t in kernel.seen or graph.tensors[t].producer < kernel.first for t in fusion.reads)
