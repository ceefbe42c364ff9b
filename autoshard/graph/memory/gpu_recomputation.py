"""Values that XLA's GPU compiler stores because kernels that compute them again would read more bytes."""

import dataclasses
from collections.abc import Collection

from autoshard.graph.memory.fusion_analysis import CHEAP_INTO_MATMUL, SMALL, FusionAnalysis
from autoshard.graph.records import Op, OpClass, OpGraph


_FEW = 64
"""Largest number of values that are followed from a value to the kernels that need it."""
_DEEP = 3
"""Largest number of values, each computed from the one before, whose storage is foreseen together."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuRecomputation:
    """Comparison of the bytes that kernels move if a value is stored, and if each computes it again.

    XLA decides in the order of the program, before kernels with the same operands become one (`PriorityFusion` runs
    before `MultiOutputFusion`). Seen in the sums of residual gradients and in the masked gradients of convolutional
    steps on h100, and in the states of state-space models.
    """

    graph: OpGraph
    analysis: FusionAnalysis
    stored: Collection[int]
    """Values that are known to be stored; grows as values are decided."""
    _known: dict[tuple[int, frozenset[int], int], bool] = dataclasses.field(default_factory=dict)
    """Answers of `_stores` for the present `stored`; residual branches join again, so many paths ask for one value."""
    _besides: dict[tuple[int, int], frozenset[int]] = dataclasses.field(default_factory=dict)
    """Results of `_read_besides` for the present `stored`."""
    _inputs: dict[int, tuple[int, ...] | None] = dataclasses.field(default_factory=dict)
    """Values from which a kernel computes a value that it does not read, for the present `stored`; None if it reads."""

    _ending: dict[int, bool] = dataclasses.field(default_factory=dict)
    """Results of `_ends_kernel`, which `stored` does not change."""
    _joining: dict[tuple[int, int], bool] = dataclasses.field(default_factory=dict)
    """Results of `_joins` by op and elements, which `stored` does not change."""

    def stores(self, tensor: int, sources: Collection[int]) -> bool:
        """Return True if storing the value `tensor`, computed from the stored values `sources`, moves no more bytes."""
        self._known.clear()
        self._besides.clear()
        self._inputs.clear()
        return self._stores(tensor, frozenset(sources), 0)

    def _stores(self, tensor: int, sources: frozenset[int], depth: int) -> bool:
        """Return the answer of `stores`; `depth` is the number of values before that are assumed not to be stored."""
        key = tensor, sources, depth
        if key not in self._known:
            self._known[key] = self._moves_no_more(*key)
        return self._known[key]

    def _moves_no_more(self, tensor: int, sources: frozenset[int], depth: int) -> bool:
        """Compare the bytes for `_stores`, which calls this once for each set of arguments."""
        sizes = self.analysis.sizes
        own, before = sizes[tensor], sum(sizes[t] for t in sources)
        # However many kernels there are, each then reads as much in place of the value as the value has, or less.
        if before <= own and own:
            return False
        kernels = self._kernels(tensor, sources, depth)
        if kernels is None:
            users = len(self.analysis.consumers[tensor])
            return users * before > before + (users + 1) * own
        # Recompute: every kernel reads the sources that it does not read for other values. Store: read them once, write
        # the value, read it in every kernel.
        moved = before + (len(kernels) + 1) * own
        if len(kernels) * before < moved:
            return False
        again = sum(sizes[t] for end in kernels for t in sources - self._read_besides(end, tensor))
        return again >= moved

    def _kernels(self, tensor: int, sources: frozenset[int], depth: int) -> set[int] | None:
        """Return the last ops of the kernels that read a value or compute it again; None for too many values.

        A kernel ends where a fusion does (`ends_fusion`), and with a value that a kernel of a library reads. It also
        ends with a value that is itself stored if `tensor` is not.
        """
        graph, ends = self.graph, set[int]()
        loop, left, seen = graph.tensors[tensor].loop, [tensor], {tensor}
        while left:
            for user in self.analysis.consumers[left.pop()]:
                if user in ends:
                    continue
                other = graph.ops[user]
                if other.loop != loop or self._ends_kernel(other):
                    ends.add(user)
                elif self._joins(other, tensor) and self._is_stored_then(other, tensor, sources, depth):
                    ends.add(user)
                else:
                    left += (t for t in other.results if t not in seen)
                    seen.update(other.results)
            if len(seen) > _FEW:
                return None
        return ends

    def _ends_kernel(self, op: Op) -> bool:
        """Return True if an op ends a fusion, or a kernel of a library reads its result."""
        if op.id not in self._ending:
            self._ending[op.id] = self.analysis.ends_fusion(op) or self._is_read_apart(op)
        return self._ending[op.id]

    def _is_read_apart(self, op: Op) -> bool:
        """Return True if a kernel of a library reads a result of an op that it cannot apply on load."""
        ops, analysis = self.graph.ops, self.analysis
        return op.kind not in CHEAP_INTO_MATMUL and any(
            analysis.reads_apart(ops[user], t) for t in op.results for user in analysis.consumers[t]
        )

    def _is_stored_then(self, op: Op, tensor: int, sources: frozenset[int], depth: int) -> bool:
        """Return True if the result of an op that joins `tensor` with other values is stored and `tensor` is not."""
        if depth >= _DEEP:
            return True
        sizes = self.analysis.sizes
        others = {t for t in self._read_besides(op.id, tensor) if sizes[t] * SMALL > sizes[op.results[0]]}
        return self._stores(op.results[0], sources.union(others), depth + 1)

    def _joins(self, op: Op, tensor: int) -> bool:
        """Return True if an op reads several values as large as `tensor`, and several ops read its result."""
        elements = self.graph.tensors[tensor].elements
        if (op.id, elements) not in self._joining:
            several = len(op.results) == 1 and len(set(self.analysis.consumers[op.results[0]])) > 1
            operands = [self.graph.tensors[t] for t in op.operands] if several else []
            large = sum(each.elements >= elements and not self._is_repeated(each.id) for each in operands)
            self._joining[op.id, elements] = large > 1
        return self._joining[op.id, elements]

    def _is_repeated(self, tensor: int) -> bool:
        """Return True if a value is generated, or repeats a smaller one."""
        maker = self.graph.maker(tensor)
        if maker is None or maker.op_class is OpClass.FREE:
            return maker is not None
        source = self.graph.tensors[maker.operands[0]]
        return maker.kind == "broadcast_in_dim" and source.elements * SMALL < self.graph.tensors[tensor].elements

    def _read_besides(self, end: int, tensor: int) -> frozenset[int]:
        """Return the stored values from which the op `end` is computed, other than through the value `tensor`."""
        if (known := self._besides.get((end, tensor))) is not None:
            return known
        read, inputs = set[int](), self._inputs
        left, seen = list(self.graph.ops[end].operands), {tensor}
        while left and len(seen) <= _FEW:
            value = left.pop()
            if value in seen:
                continue
            seen.add(value)
            if value not in inputs:
                inputs[value] = self._computed_from(value)
            if (operands := inputs[value]) is None:
                read.add(value)
            else:
                left += operands
        self._besides[end, tensor] = frozenset(read)
        return self._besides[end, tensor]

    def _computed_from(self, value: int) -> tuple[int, ...] | None:
        """Return the operands of a value that kernels compute again; None for a value that they read."""
        maker = self.graph.maker(value)
        if maker is None or value in self.stored or self.analysis.ends_fusion(maker):
            return None
        return tuple(maker.operands)
