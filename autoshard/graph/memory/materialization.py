"""Second stage of the fusion analysis: values that kernels store in memory, and the fusions that store them.

Heavy ops write their results and read their operands. Pointwise values stay inside the fusion of their consumer. They
are stored if recomputing them for several consumers would read more bytes than storing them.

On TPUs, matmuls without batch dims also fuse the pointwise ops that lead to their operands (`_StoreDecision`). The
stored form of attention scores there depends on the spec (`Softmax`).

Evidence: docs/compiler_behaviour.md, "Elementwise ops inside matmul kernels".
"""

import dataclasses
from collections.abc import Collection, Sequence

from autoshard.graph.memory.fusion_analysis import CHEAP_INTO_MATMUL, MANY, SMALL, Fusion, FusionAnalysis
from autoshard.graph.memory.gpu_recomputation import GpuRecomputation
from autoshard.graph.memory.host_transfers import INTO_STACKS, TO_HOST
from autoshard.graph.memory.operand_rounding import INSERTED
from autoshard.graph.records import Op, OpClass, OpGraph, is_batched


MOST_MADE = 4
"""Largest number of values that a matmul's kernel stores instead of its result."""
_FEW = 64
"""Largest number of values that are followed from a matmul's result."""
_COSTLY = frozenset({"exponential", "exponential_minus_one", "log", "log_plus_one", "logistic", "power", "tanh"})
"""Elementwise ops that take many instructions for each element."""
_PARTS = frozenset({"slice", "pad"})
"""Kinds of ops that read a part of a value."""


def is_rounded_tanh(graph: OpGraph, op: Op) -> bool:
    """Return True for a tanh in a dtype narrower than float32, which GPUs compute in float32 and round.

    XLA's cost model of fusions counts 467 cycles for it, 79 for an exponential and 7 for a sum
    (`xla/service/gpu/model/hlo_op_profiles_data.h`, sm_90). Half the bytes of float32 are worth less than that: the
    rounded value is stored where a forward and a backward kernel read it. In float32 both compute it.
    """
    return op.kind == "tanh" and graph.tensors[op.results[0]].itemsize < _WIDE


_WIDE = 4
"""Bytes of a float32 number."""


def store_values(graph: OpGraph, analysis: FusionAnalysis) -> FusionAnalysis:
    """Return the analysis with `materialised`, `fusions`, `reach`, `bases` and `overwritten` filled in.

    Values without a producer are stored. A layer's slice, a slice of one stored value, and gathered rows that are not
    stored, count as a part of it. An update in place moves only the inserted slice.
    """
    materialised = {tensor.id for tensor in graph.tensors if tensor.producer < 0}
    deciding = _StoreDecision(graph, analysis, _latest_makers(graph), GpuRecomputation(graph, analysis, materialised))
    reach = {tensor: frozenset((tensor,)) for tensor in materialised}
    bases: dict[int, frozenset[int]] = {}
    fusions: list[Fusion] = []
    overwritten: list[tuple[int, int]] = []
    for op in graph.ops:
        if op.op_class is OpClass.FREE:
            reach |= dict.fromkeys(op.results, frozenset())
            continue
        if op.kind == "dynamic_slice" and op.op_class is OpClass.LAYER:
            whole = reach.get(op.operands[0], frozenset())
            bases[op.results[0]] = frozenset().union(*(bases.get(t, (t,)) for t in whole))  # a slice of a slice
            reach[op.results[0]] = frozenset(op.results)
            continue
        if op.id in analysis.passing:
            reach[op.results[0]] = reach.get(op.operands[0], frozenset())
            continue
        in_place = op.kind == "dynamic_update_slice" and _is_overwritten(graph, analysis, op, materialised)
        if in_place:
            overwritten.append((op.operands[0], op.results[0]))
        sources = op.operands[1:2] if in_place else op.operands
        reads = frozenset().union(*(reach.get(t, frozenset()) for t in sources))
        writes = []
        # A kernel that fetches the rows reads them, and the indices, but not the whole table.
        fetched = frozenset(op.results).union(*(reach.get(t, frozenset()) for t in op.operands[1:]))
        gathers = op.id in analysis.fused_gathers
        for tensor in op.results:
            if tensor not in analysis.joins and deciding.is_stored(op, tensor, fetched if gathers else reads):
                materialised.add(tensor)
                reach[tensor] = frozenset((tensor,))
                writes.append(tensor)
            elif op.kind == "slice" and reads == frozenset(op.operands):
                bases[tensor] = frozenset().union(*(bases.get(t, (t,)) for t in reads))
                reach[tensor] = frozenset((tensor,))
            elif gathers:
                table = reach.get(op.operands[0], frozenset())
                bases[tensor] = frozenset().union(*(bases.get(t, (t,)) for t in table))
                reach[tensor] = fetched
            else:
                reach[tensor] = reads
        if writes:
            moved = op.operands[1:2] if in_place else tuple(writes)
            fusions.append(Fusion(op.id, tuple(writes), tuple(sorted(reads)), moved))
    return dataclasses.replace(
        analysis,
        reach=reach,
        bases=bases,
        materialised=frozenset(materialised),
        fusions=fusions,
        overwritten=overwritten,
    )


def _is_overwritten(graph: OpGraph, analysis: FusionAnalysis, op: Op, materialised: Collection[int]) -> bool:
    """Return True if an update is written in place: its stored operand belongs to the same block and has no later use.

    The operand is no result of the program, and an argument only if it is donated and updated. A layer sliced from a
    stack, or a value inside a fusion, is not overwritten: the updated value is written to new memory.
    """
    value = op.operands[0]
    if value not in materialised or graph.tensors[value].loop != op.loop or value in graph.results:
        return False
    if any(user > op.id for user in analysis.consumers[value]):
        return False
    return value not in graph.arguments or (value in analysis.updates and value not in analysis.kept)


def _latest_makers(graph: OpGraph) -> list[int]:
    """Return for every value the id of the latest op with a kernel of its own from which it is computed; -1 for none.

    Generated values have none. Pointwise ops and layout ops have no kernel of their own.
    """
    latest = [tensor.producer for tensor in graph.tensors]
    for op in graph.ops:
        light = op.op_class is OpClass.POINTWISE or op.kind in CHEAP_INTO_MATMUL
        if op.op_class is OpClass.FREE or (light and op.operands):
            before = -1 if op.op_class is OpClass.FREE else max(latest[t] for t in op.operands)
            for tensor in op.results:
                latest[tensor] = before
    return latest


@dataclasses.dataclass(frozen=True, slots=True)
class _StoreDecision:
    """Decision for every value of a program: stored in memory, or recomputed in its consumers."""

    graph: OpGraph
    analysis: FusionAnalysis
    latest: Sequence[int]
    """Result of `_latest_makers`: for every value its latest kernel."""
    again: GpuRecomputation
    """Comparison of storing and computing again on GPUs."""
    epilogues: dict[int, int] = dataclasses.field(default_factory=dict)
    """Maps each value that a matmul's kernel stores instead of its result to that matmul."""

    def is_stored(self, op: Op, tensor: int, reads: frozenset[int]) -> bool:
        """Return True if the result `tensor` of `op`, which is computed from the stored values `reads`, is stored in
        memory.

        Stored are results of ops that end a fusion, and values that a separate kernel reads, apart from casts and
        layout ops. So are values with several consumers that would read more bytes to recompute them than storing
        moves. On TPUs, values that are rounded and summed (`_is_rounded_and_summed`) are not stored.
        """
        if self.analysis.ends_fusion(op):
            return True
        users, ends = self.analysis.consumers[tensor], self.analysis.ends[tensor]
        rules, sizes = self.analysis.rules, self.analysis.sizes
        if op.kind == TO_HOST and any(self.graph.ops[u].kind not in INTO_STACKS for u in users):
            return True  # otherwise it goes to the host as the stack's slice
        if rules.fused_matmuls and self._is_rounded_and_summed(tensor):
            return False
        kernels_apart = [
            user
            for user, read in self._readers(tensor)
            if self.analysis.reads_apart(self.graph.ops[user], read) and not self._inside(op, user)
        ]
        apart = bool(kernels_apart)
        if rules.fused_matmuls and sum(self.graph.ops[u].kind in _PARTS for u in users) > 1:
            apart = True  # inside their kernel it would be computed once for every part
        if apart and op.op_class is not OpClass.LAYER:
            on_load = self._rectifies(op) and all(self.graph.ops[u].kind == "dot_general" for u in kernels_apart)
            if op.kind not in CHEAP_INTO_MATMUL and not on_load:
                return True
            if rules.gpu_kernels and reads and reads != {self._source(tensor)}:
                return True
        if rules.fused_matmuls and (self._ends_epilogue(tensor) or self._is_costly_in_windows(tensor)):
            return True
        if len(users) < 2 and not (rules.fused_matmuls and self._rounds_summed(tensor)):
            return False
        if rules.fused_matmuls and tensor in self.analysis.scores:
            return sum(sizes[t] for t in reads) > sizes[tensor]
        if rules.fused_matmuls and not apart:
            return self._saves_traffic(tensor, reads)
        if ends is not None and len(ends) == 1:
            return False
        own = sizes[tensor]
        large = [t for t in reads if sizes[t] * SMALL > own]
        # Statistics of a norm are read in any case, and are too small to decide. `Softmax` covers scores of attention.
        scores = any((maker := self.graph.maker(t)) is not None and is_batched(maker) for t in large)
        before = sum(sizes[t] for t in (reads if scores else large))
        if rules.gpu_kernels:
            if is_rounded_tanh(self.graph, op):
                return True
            return self.again.stores(tensor, reads if scores else large)
        return before > own

    def _rectifies(self, op: Op) -> bool:
        """Return True for a maximum with a generated value, which kernels of GPU matmuls apply on load."""
        return (
            self.analysis.rules.gpu_kernels
            and op.kind == "maximum"
            and any(tensor in self.graph.generated for tensor in op.operands)
        )

    def _readers(self, tensor: int) -> list[tuple[int, int]]:
        """Return the ops, by id, that read a value, each with the tensor that it reads.

        Matmuls that read its maximum on load (`_rectifies`) are among them. Convolutions read a stored maximum.
        """
        ops = self.graph.ops
        readers = [(user, tensor) for user in self.analysis.consumers[tensor]]
        for user in self.analysis.consumers[tensor]:
            if self._rectifies(ops[user]):
                result = ops[user].results[0]
                matmuls = (each for each in self.analysis.consumers[result] if ops[each].kind == "dot_general")
                readers += ((each, result) for each in matmuls)
        return readers

    def _source(self, tensor: int) -> int:
        """Return the value at the start of the chain of casts and layout ops that ends with `tensor`; matmuls apply
        them on load.
        """
        while (maker := self.graph.maker(tensor)) is not None:
            if maker.kind not in CHEAP_INTO_MATMUL and not self._rectifies(maker):
                break
            tensor = next((t for t in maker.operands if t not in self.graph.generated), maker.operands[0])
        return tensor

    def _inside(self, op: Op, user: int) -> bool:
        """Return True if the op `user` is a matmul of the op's block that computes the op inside its kernel."""
        return user in self.analysis.matmuls and self.graph.ops[user].loop == op.loop

    def _saves_traffic(self, tensor: int, reads: frozenset[int]) -> bool:
        """Return True if storing a value moves fewer bytes than the kernels that would compute it again on TPUs.

        Recomputation reads `reads` in every kernel. A stored value is computed once, written, and read by each kernel.
        A value that is rounded for matmuls counts as unrounded: the compiler inserts the rounding later. Storing also
        pays if the preceding matmul's kernel computes the value. Several matmuls must read it, or the gradient of a
        bias be its sum.
        """
        kernels = self._kernels(tensor, reads)
        maker, sizes = self.graph.maker(tensor), self.analysis.sizes
        rounds = maker is not None and maker.number == INSERTED
        own = sizes[maker.operands[0] if maker is not None and rounds else tensor]
        before = sum(sizes[t] for t in reads)
        if kernels > 1 and kernels * before > before + (kernels + 1) * own:
            return True
        ends = self.analysis.ends[tensor]
        # Bodies of loops were not examined for sums.
        outside = self.graph.tensors[tensor].loop < 0
        sums = [end for end in ends or () if outside and self.graph.ops[end].kind == "reduce"]
        matmuls = [end for end in ends or () if maker is not None and self._inside(maker, end)]
        alone = bool(matmuls) and len(matmuls) + len(sums) == len(ends or ())
        return alone and (kernels > 1 or bool(sums)) and self._leads_from_matmul(tensor, reads)

    def _kernels(self, tensor: int, reads: frozenset[int]) -> int:
        """Return the number of kernels that read or recompute a value; one more than `MANY` if they are not known.

        One kernel computes sums that do not need each other's results. The kernel of the matmul that makes the latest
        of `reads` computes sums too.
        """
        ends, latest = self.analysis.ends[tensor], self.latest
        if ends is None:
            return MANY + 1
        sums = sorted(end for end in ends if self.graph.ops[end].kind == "reduce")
        kernels, first = len(ends) - len(sums), -1
        maker = max((self.epilogues.get(t, self.graph.tensors[t].producer) for t in reads), default=-1)
        for end in sums:
            needed = max(latest[t] for t in self.graph.ops[end].operands)
            if first < 0 and needed <= maker in self.analysis.matmuls:
                first = end
            elif first < 0 or needed >= first:
                kernels, first = kernels + 1, end
        return kernels

    def _ends_epilogue(self, tensor: int) -> bool:
        """Return True if the kernel of a matmul stores a value instead of its own result.

        All ops from that result to the value are pointwise. Each value between is read on the way alone, besides sums
        of a value that is then rounded. Several ops read the last value. Other operands exist before the matmul.
        """
        graph, analysis = self.graph, self.analysis
        value, record = tensor, graph.tensors[tensor]
        if len(set(analysis.consumers[tensor])) < 2 and not self._rounds_summed(tensor):
            return False
        while (maker := graph.maker(value)) is not None and maker.loop == record.loop:
            several = len(set(analysis.consumers[value])) > 1 and value not in analysis.joins
            if value != tensor and several and not self._is_rounded_and_summed(value):
                return False
            if maker.id in analysis.matmuls:
                later = self._epilogue_values(value) - {tensor}
                if value == tensor or value in analysis.pinned or (later and not self._is_summed_beside(tensor)):
                    return False
                self.epilogues[tensor] = maker.id
                return True
            if maker.op_class is not OpClass.POINTWISE or maker.kind == "transpose":
                return False
            value = max(maker.operands, key=lambda t: self.latest[t], default=-1)
            if value < 0 or graph.tensors[value].shape != record.shape:
                return False
        return False

    def _is_summed_beside(self, tensor: int) -> bool:
        """Return True if the value of a matmul's kernel is also an operand of elementwise ops that only sums read.

        An example are squared errors, whose gradient is the scaled error. The kernel adds them up and stores the error
        itself; the kernels that multiply it scale and round it.
        """
        graph, ends = self.graph, self.analysis.ends
        for user in self.analysis.consumers[tensor]:
            op = graph.ops[user]
            after = ends[op.results[0]] if op.op_class is OpClass.POINTWISE and op.kind != "convert" else None
            if after and all(graph.ops[end].kind == "reduce" and self._is_needed(end) for end in after):
                return True
        return False

    def _is_needed(self, op_id: int) -> bool:
        """Return True if an op leads to a result; compilers drop the loss of a program that returns gradients alone."""
        graph, needed = self.graph, set(self.graph.returned)
        for op in reversed(graph.ops[op_id + 1 :]):
            if not needed.isdisjoint(op.results):
                needed.update(op.operands)
        return not needed.isdisjoint(graph.ops[op_id].results)

    def _is_costly_in_windows(self, tensor: int) -> bool:
        """Return True if windows of a convolution share the elements of a value, and it needs an op of `_COSTLY`.

        TPU compilers do not compute such a value inside the convolution's kernel.
        """
        graph = self.graph
        readers = (graph.ops[user] for user in self.analysis.consumers[tensor])
        dims = [halo.dim for each in readers if each.kind == "convolution" for halo in each.halos]
        if not any(dim.partner is None and dim.window.size > 1 for dim in dims):
            return False
        elements, left, seen = graph.tensors[tensor].elements, [tensor], {tensor}
        while left and len(seen) <= _FEW:
            maker = graph.maker(left.pop())
            if maker is None or maker.op_class is not OpClass.POINTWISE:
                continue
            if maker.kind in _COSTLY:
                return True
            left += (t for t in maker.operands if t not in seen and graph.tensors[t].elements == elements)
            seen.update(maker.operands)
        return False

    def _rounds_summed(self, tensor: int) -> bool:
        """Return True for the cast of a value that is otherwise only summed (`_is_rounded_and_summed`)."""
        maker = self.graph.maker(tensor)
        return maker is not None and maker.kind == "convert" and self._is_rounded_and_summed(maker.operands[0])

    def _is_rounded_and_summed(self, tensor: int) -> bool:
        """Return True if a value is read by one cast to a narrower dtype, and otherwise only by sums in the same block.

        The kernel that stores the cast also computes the sums, so the value need not be stored.
        """
        record, maker = self.graph.tensors[tensor], self.graph.maker(tensor)
        if maker is None or maker.op_class is not OpClass.POINTWISE or tensor in self.analysis.pinned:
            return False
        users = [self.graph.ops[user] for user in self.analysis.consumers[tensor]]
        rounds = [u for u in users if u.kind == "convert" and self.graph.tensors[u.results[0]].bytes < record.bytes]
        others = [u for u in users if u not in rounds]
        return (
            len(rounds) == 1 and bool(others) and all(u.kind == "reduce" and u.loop == rounds[0].loop for u in others)
        )

    def _leads_from_matmul(self, tensor: int, reads: frozenset[int]) -> bool:
        """Return True if the kernel of a matmul in `reads` also computes and stores `tensor`, which other matmuls read.

        The kernel does so if all values computed from its result are pointwise, of its size, and read by matmuls. The
        gradient of a gated activation has two such values. The same kernel also computes sums of them.
        """
        graph, last = self.graph, self.graph.ops[self.graph.tensors[tensor].producer]
        if last.op_class is not OpClass.POINTWISE:
            return False
        for source in reads:
            maker = graph.tensors[source].producer
            if maker not in self.analysis.matmuls or source in self.analysis.pinned:
                continue
            if graph.ops[maker].loop != last.loop or graph.tensors[source].elements != graph.tensors[tensor].elements:
                continue
            if tensor in self._epilogue_values(source):
                return True
        return False

    def _epilogue_values(self, source: int) -> set[int]:
        """Return the values that matmuls read and that only pointwise ops compute from the matmul result `source`.

        The result is empty in three cases:

        - other ops also read such a value;
        - one depends on a kernel later than the matmul;
        - there are more than `MOST_MADE`, or more than `_FEW` values in between.
        """
        graph, matmuls = self.graph, self.analysis.matmuls
        loop, maker, values = graph.tensors[source].loop, graph.tensors[source].producer, set[int]()
        left, seen = [source], {source}
        while left:
            tensor = left.pop()
            consumers = (graph.ops[user] for user in self.analysis.consumers[tensor])
            users = [user for user in consumers if user.kind != "reduce"]
            matmul_users = [user for user in users if user.id in matmuls and user.loop == loop]
            if tensor in self.analysis.pinned or (
                matmul_users and (tensor == source or len(matmul_users) < len(users))
            ):
                return set()
            if matmul_users:
                values.add(tensor)
                continue
            if any(user.loop != loop or user.op_class is not OpClass.POINTWISE for user in users):
                return set()
            if any(self.latest[t] > maker for user in users for t in user.operands):
                return set()
            more = {t for user in users for t in user.results} - seen
            left += more
            seen |= more
            if len(seen) > _FEW:
                return set()
        return values if len(values) <= MOST_MADE else set()


def fused_operand_ratios(graph: OpGraph, analysis: FusionAnalysis, fetched: Collection[int] = ()) -> dict[int, float]:
    """Return `Liveness.fused_operand_ratios` by operand.

    An example is a gated activation: its matmul reads two values for one operand. On TPUs only ratios above 1 count.
    Weights (arguments and slices of stacks) are left out: they are converted and gathered beforehand. So are operands
    computed from another block. Kernels on GPUs read what their operands are computed from, be it more or less, and
    rows (`fetched`) that their gather is charged for.
    """
    ratios = {}
    for op_id, values in analysis.inside.items():
        for tensor in values.intersection(graph.ops[op_id].operands):
            if tensor not in analysis.materialised and graph.tensors[tensor].bytes:
                read = sum(analysis.sizes[t] for t in analysis.reach.get(tensor, ()) if t not in fetched)
                ratios[tensor] = read / graph.tensors[tensor].bytes
    for op_id in analysis.matmuls:
        op = graph.ops[op_id]
        for tensor in op.operands:
            reads = analysis.reach.get(tensor, frozenset())
            if tensor in reads or not graph.tensors[tensor].bytes:
                continue
            makers = [graph.maker(t) for t in reads]
            if any(maker is None or maker.op_class is OpClass.LAYER for maker in makers):
                continue
            if any(graph.tensors[t].loop != op.loop for t in reads):
                continue
            ratio = sum(analysis.sizes[t] for t in reads) / graph.tensors[tensor].bytes
            if ratio > 1.0:
                ratios[tensor] = ratio
    return ratios
