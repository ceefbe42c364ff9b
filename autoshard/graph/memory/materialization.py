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
    """Return True for an op that ends its fusion: its result is stored in any case."""
    writes = op.kind in _WRITERS or op.kind == "dynamic_update_slice" or any(t in pinned for t in op.results)
    return writes or op.id in kernels


@dataclasses.dataclass(frozen=True, slots=True)
class StoreDecision:
    """Decision for every value of a program: stored in memory, or recomputed in its consumers."""

    graph: OpGraph
    consumers: Sequence[Sequence[int]]
    pinned: Collection[int]
    """Values that are stored in any case."""
    sizes: Sequence[int]
    """Bytes of every value in its stored dtype."""
    kernels: Collection[int]
    """Ops that are separate kernels."""
    inner: Collection[int]
    """Matmuls whose kernels compute the pointwise ops before them."""
    fused_matmuls: bool
    latest: Sequence[int]
    """Result of `latest_makers`: for every value its latest kernel."""
    gpu_kernels: bool = False
    """True for the rules of XLA's GPU compiler.

    A value that several kernels read is stored only if that moves fewer bytes than recomputing it in each. The last
    cast in a chain from a computed value is stored for the matmul that reads it.
    """

    def is_stored(self, op: Op, tensor: int, ends: frozenset[int] | None, reads: frozenset[int]) -> bool:
        """Return True if a result of `op` is stored in memory.

        - `ends`: fusion-ending ops that the value leads to; None for many.
        - `reads`: stored values from which the value is computed.
        """
        if ends_fusion(op, self.pinned, self.kernels):
            return True
        users = self.consumers[tensor]
        if op.kind == TO_HOST and any(self.graph.ops[u].kind not in INTO_STACKS for u in users):
            return True  # otherwise it goes to the host as the stack's slice
        if self.fused_matmuls and self._is_rounded_and_summed(tensor):
            return False
        apart = any(u in self.kernels and not self._inside(op, u) for u in users)
        if self.fused_matmuls and sum(self.graph.ops[u].kind in _PARTS for u in users) > 1:
            apart = True  # inside their kernel it would be computed once for every part
        if apart and op.op_class is not OpClass.LAYER:
            if op.kind not in CHEAP_INTO_MATMUL:
                return True
            if self.gpu_kernels and reads and reads != {self._source(tensor)}:
                return True
        summed = self.fused_matmuls and op.kind == "convert" and self._is_rounded_and_summed(op.operands[0])
        if summed and ends:
            return self._saves_traffic(tensor, reads, len(ends), len(ends) + 1)
        if len(users) < 2:
            return False
        if ends is not None and (len(ends) == 1 or all(self._inside(op, end) for end in ends)):
            return len(ends) > 1 and self._saves_traffic(tensor, reads, len(ends), len(ends))
        if any(self._inside(op, u) for u in users):
            # Matmuls recompute the value. Other consumers recompute it if it depends on at most one stored value of its
            # size.
            elements = self.graph.tensors[tensor].elements
            return sum(self.graph.tensors[t].elements >= elements for t in reads) > 1
        before, own = sum(self.sizes[t] for t in reads), self.sizes[tensor]
        if self.gpu_kernels:
            kernels = len(users) if ends is None else len(ends)
            # Recompute: every kernel reads the sources. Store: read them once, write the value, read it in every
            # kernel.
            return kernels * before > before + (kernels + 1) * own
        return before > own

    def _source(self, tensor: int) -> int:
        """Return the value at the start of a chain of casts and layout ops, which matmul kernels apply on load."""
        while (maker := self.graph.tensors[tensor].producer) >= 0:
            if self.graph.ops[maker].kind not in CHEAP_INTO_MATMUL:
                break
            tensor = self.graph.ops[maker].operands[0]
        return tensor

    def _inside(self, op: Op, user: int) -> bool:
        """Return True if `user` is a matmul of the op's block that computes the op inside its kernel."""
        return user in self.inner and self.graph.ops[user].loop == op.loop

    def _saves_traffic(self, tensor: int, reads: frozenset[int], matmuls: int, kernels: int) -> bool:
        """Return True if storing a value for `matmuls` readers moves fewer bytes than `kernels` kernels that recompute
        it.

        A stored value is computed once, written, and read by each reader. Storing also pays if the preceding matmul's
        kernel computes the value.
        """
        own = self.sizes[tensor]
        before = sum(self.sizes[t] for t in reads if self.sizes[t] * SMALL > own)
        # Recompute: every kernel reads the sources. Store: read them once, write the value, read it in every matmul.
        if kernels * before > before + (matmuls + 1) * own:
            return True
        return leads_from_matmul(self.graph, tensor, reads, self.consumers, self.inner, self.pinned, self.latest)

    def _is_rounded_and_summed(self, tensor: int) -> bool:
        """Return True if a value is read by one cast to a narrower dtype, and otherwise only by sums in the same block.

        The kernel that stores the cast also computes the sums, so the value need not be stored.
        """
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


def fused_operand_ratios(
    graph: OpGraph, matmuls: Collection[int], reach: Mapping[int, frozenset[int]], sizes: Sequence[int]
) -> dict[int, float]:
    """Return `Liveness.fused_operand_ratios`, for example for a gated activation: its matmul reads two values for one
    operand.

    Weights (arguments and slices of stacks) are left out: they are converted and gathered beforehand.
    """
    ratios = {}
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
                ratios[tensor] = ratio
    return ratios


_MOVES = frozenset({"slice", "dynamic_update_slice"})
_MOST = 8
"""Largest number of results of one kernel."""


@dataclasses.dataclass(slots=True)
class _Kernel:
    """A kernel that sibling fusions may join."""

    first: int
    """Root op of its first fusion; all operands of the kernel exist before this op."""
    elements: int
    seen: set[int]
    """Values that the kernel reads or writes."""
    results: int = 1


def fuse_siblings(graph: OpGraph, fusions: Sequence[Fusion]) -> list[Fusion]:
    """Fuse sibling elementwise fusions of equal size that read the same values into one kernel.

    A fusion that joins an earlier kernel is marked `is_fused_sibling`, and no longer reads the values that this kernel
    reads or writes.
    """
    merged = list(fusions)
    kernels: dict[int, list[_Kernel]] = defaultdict(list)
    """Maps a value to the kernels that read or write it."""
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
            merged[number] = dataclasses.replace(
                fusion, reads=tuple(t for t in fusion.reads if t not in host.seen), is_fused_sibling=True
            )
        for tensor in {*fusion.reads, *fusion.writes} - host.seen:
            host.seen.add(tensor)
            kernels[tensor].append(host)
    return merged


def _is_light(op: Op) -> bool:
    """Return True for ops that may share a kernel: pointwise ops, slices and updates of a slice."""
    return op.op_class is OpClass.POINTWISE or op.kind in _MOVES


def _may_join(graph: OpGraph, kernel: _Kernel, fusion: Fusion, root: Op, size: int) -> bool:
    """Return True if a fusion can be computed in a kernel: equal size and block, and all its operands available."""
    if kernel.results >= _MOST or kernel.elements != size or graph.ops[kernel.first].loop != root.loop:
        return False
    return all(t in kernel.seen or graph.tensors[t].producer < kernel.first for t in fusion.reads)
