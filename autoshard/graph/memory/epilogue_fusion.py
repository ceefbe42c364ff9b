"""Third stage of the fusion analysis: elementwise ops that other kernels compute before they store their results.

Kernels of matmuls compute epilogues, kernels of reductions and elementwise ops compute sums. Sibling elementwise ops
share one kernel.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from autoshard.graph.flops import is_sum
from autoshard.graph.memory.fusion_analysis import SMALL, Fusion, FusionAnalysis
from autoshard.graph.memory.materialization import MOST_MADE, is_rounded_tanh
from autoshard.graph.records import Op, OpClass, OpGraph


def fuse_epilogues(graph: OpGraph, analysis: FusionAnalysis) -> FusionAnalysis:
    """Fuse pointwise fusions into the matmuls whose results they read, and sums into the kernels of their inputs.

    Return the analysis with changed `fusions`, `stores` and `materialised`. A pointwise fusion that becomes an epilogue
    does not read the matmul's result; its own result is stored instead. If it could join several matmuls, it joins the
    last. Several fusions, at most `MOST_MADE`, join one matmul if only matmuls and sums read their results. A fused sum
    reads only its small operands.
    """
    fusions, matmuls = analysis.fusions, analysis.matmuls
    readers = _readers(analysis)
    made = list(fusions)
    stores: dict[int, int] = {}
    done: set[int] = set()
    able = {number: _epilogue_sources(graph, analysis, fusion) for number, fusion in enumerate(fusions)}
    maker = {tensor: number for number, fusion in enumerate(fusions) for tensor in fusion.writes}

    def takers(source: int, number: int) -> list[int]:
        """Return the numbers of the fusions that read a matmul's result, without the sums that the fusion `number`
        computes in its own kernel.
        """
        return [
            n
            for n in readers[source]
            if n == number
            or not _is_fused_sum(graph, analysis, fusions[n], fusions[number], source)
            or _needs(fusions, maker, number, n)
        ]

    def for_matmuls(number: int) -> bool:
        """Return True if only matmuls and sums read the results of a fusion, and at least one matmul does."""
        ops = [graph.ops[fusions[n].root] for t in fusions[number].writes for n in readers.get(t, ())]
        return any(op.id in matmuls for op in ops) and all(op.id in matmuls or op.kind == "reduce" for op in ops)

    for number, fusion in enumerate(fusions):
        before = [t for t in able[number] if takers(t, number) == [number]]
        if before:
            source = max(before, key=lambda t: graph.tensors[t].producer)
            stores[source] = fusion.writes[0]
            done.add(number)
            reads = tuple(t for t in fusion.reads if t != source)
            matmul = graph.tensors[source].producer
            made[number] = dataclasses.replace(fusion, reads=reads, moved=(), matmul=matmul)
    for number, fusion in enumerate(fusions):
        for source in able[number]:
            together = takers(source, number)
            if number in done or source in stores or not 1 < len(together) <= MOST_MADE:
                continue
            if any(n in done or source not in able[n] or not for_matmuls(n) for n in together):
                continue
            stores[source] = fusion.writes[0]
            done.update(together)
            there, matmul = {source}, graph.tensors[source].producer
            for first, n in enumerate(together):
                left = tuple(t for t in fusions[n].reads if t not in there)
                moved = fusions[n].moved if first else ()
                made[n] = Fusion(fusions[n].root, fusions[n].writes, left, moved, bool(first), matmul)
                there.update(fusions[n].reads)
    kernels = {stored: graph.tensors[source].producer for source, stored in stores.items()}
    _fuse_sums(graph, analysis, made, readers, kernels)
    return _fused(analysis, made, stores)


def _readers(analysis: FusionAnalysis) -> dict[int, list[int]]:
    """Map each stored value to the numbers of the fusions that read it or a slice of it."""
    readers: dict[int, list[int]] = {}
    for number, fusion in enumerate(analysis.fusions):
        for tensor in fusion.reads:
            for source in {tensor, *analysis.stored_sources(tensor)}:
                readers.setdefault(source, []).append(number)
    return readers


def _fused(analysis: FusionAnalysis, fusions: Sequence[Fusion], stores: Mapping[int, int]) -> FusionAnalysis:
    """Return the analysis with other fusions and `stores`; values that `stores` replaces are no longer materialised."""
    materialised = analysis.materialised - stores.keys()
    return dataclasses.replace(analysis, fusions=fusions, stores=stores, materialised=materialised)


def _epilogue_sources(graph: OpGraph, analysis: FusionAnalysis, fusion: Fusion) -> list[int]:
    """Return the matmul results that a fusion reads as a whole, and whose kernels may compute the fusion.

    The fusion must be pointwise and write one value. A result must have as many elements, lie in the same block, and be
    neither pinned nor the base of a slice.
    """
    root = graph.ops[fusion.root]
    if root.op_class is not OpClass.POINTWISE or len(fusion.writes) != 1 or fusion.moved != fusion.writes:
        return []
    elements = graph.tensors[fusion.writes[0]].elements
    sliced = {base for t in fusion.reads for base in analysis.bases.get(t, ())}
    return [
        t
        for t in fusion.reads
        if graph.tensors[t].producer in analysis.matmuls
        and t not in analysis.pinned
        and t not in sliced
        and graph.ops[graph.tensors[t].producer].loop == root.loop
        and graph.tensors[t].elements == elements
    ]


def _is_fused_sum(graph: OpGraph, analysis: FusionAnalysis, fusion: Fusion, other: Fusion, source: int) -> bool:
    """Return True if `fusion` is a sum of values that the fusion `other` reads or writes; one kernel then computes
    both.

    The sum reads `source`. Its small operands must exist before the other's kernel begins, and must not derive from a
    slice of `source`. Otherwise the sum has a kernel of its own, which reads `source` from memory.
    """
    root = graph.ops[fusion.root]
    if root.kind != "reduce" or root.loop != graph.ops[other.root].loop:
        return False
    large = set(_large_reads(graph, fusion))
    small = [t for t in fusion.reads if t not in large]
    return large <= {*other.reads, *other.writes} and all(
        graph.tensors[t].producer < other.root and source not in (t, *analysis.stored_sources(t)) for t in small
    )


def _large_reads(graph: OpGraph, fusion: Fusion) -> list[int]:
    """Return the values read by a sum, without those at least `SMALL` times smaller, in elements, than its largest
    operand.
    """
    elements = max(graph.tensors[t].elements for t in graph.ops[fusion.root].operands)
    return [t for t in fusion.reads if graph.tensors[t].elements * SMALL > elements]


def _fuse_sums(
    graph: OpGraph,
    analysis: FusionAnalysis,
    made: list[Fusion],
    readers: Mapping[int, Sequence[int]],
    epilogues: Mapping[int, int],
) -> None:
    """Drop in `made` the large reads of sums that another kernel of their block computes.

    The kernel of a matmul reads other operands of sums of its result if they exist before. An example are the values
    that a batch normalisation saved (kernels of a convolution and several sums in convolutional steps on v5e).

    A later elementwise kernel computes a sum only if it does not need it, as for the gradient of a norm's scale.

    - `readers`: the numbers of the fusions that read each stored value.
    - `epilogues`: the matmul of each value that a matmul's kernel stores instead of its result.
    """
    fusions = analysis.fusions
    maker = {tensor: number for number, fusion in enumerate(fusions) for tensor in fusion.writes}
    joined = set[int]()
    """Sums that another kernel computes; they have none of their own that others could join."""
    for number, fusion in enumerate(fusions):
        root = graph.ops[fusion.root]
        if root.kind != "reduce":
            continue
        large = set(_large_reads(graph, fusion))
        small = [t for t in fusion.reads if t not in large]
        if not large:
            continue
        latest = max(large, key=lambda t: graph.tensors[t].producer)
        siblings = [
            n
            for n in readers[latest]
            if graph.ops[fusions[n].root].op_class is OpClass.POINTWISE
            or (graph.ops[fusions[n].root].kind == "reduce" and n < number)
        ]
        matmul = epilogues.get(latest, graph.tensors[latest].producer)
        needed = (t for t in fusion.reads if t != latest)
        if matmul in analysis.matmuls and graph.ops[matmul].loop == root.loop and len(large) > 1:
            if all(graph.tensors[t].producer < matmul for t in needed):
                reads = tuple(t for t in fusion.reads if t != latest)
                made[number] = dataclasses.replace(fusion, reads=reads, matmul=matmul)
        hosts = [*([maker[latest]] if latest in maker else ()), *(n for n in siblings if n not in joined)]
        for host in hosts:
            other = graph.ops[fusions[host].root]
            goes_on = other.op_class is OpClass.POINTWISE or other.id in analysis.matmuls or other.kind == "reduce"
            there = {*fusions[host].reads, *fusions[host].writes}
            if not goes_on or other.loop != root.loop or not large <= there or _needs(fusions, maker, host, number):
                continue
            if all(graph.tensors[t].producer < other.id for t in small):
                made[number] = dataclasses.replace(fusion, reads=tuple(small))
                joined.add(number)
                break


def _needs(fusions: Sequence[Fusion], maker: Mapping[int, int], later: int, earlier: int) -> bool:
    """Return True if the fusion `later` needs a result of the fusion `earlier`, directly or through others.

    Both are numbers in `fusions`, and `maker` has the number of the fusion that writes each value.
    """
    seen, left = {later}, [later]
    while left:
        before = {maker.get(tensor, -1) for tensor in fusions[left.pop()].reads} - seen
        if earlier in before:
            return True
        more = {number for number in before if number > earlier}
        seen |= more
        left += more
    return False


def fuse_gpu_epilogues(graph: OpGraph, analysis: FusionAnalysis) -> FusionAnalysis:
    """Fuse chains of elementwise ops into the GPU matmuls whose results they read; return the analysis with these
    changes.

    The chain must be a whole fusion that writes one value. Matmuls that XLA computes as sums, or whose results are
    pinned, fuse nothing.
    """
    fusions, made, stores = analysis.fusions, list(analysis.fusions), dict[int, int]()
    number_of = {fusion.root: number for number, fusion in enumerate(fusions)}
    for fusion in fusions:
        op = graph.ops[fusion.root]
        if op.kind != "dot_general" or op.rule is None or is_sum(op.rule) or op.results[0] in analysis.pinned:
            continue
        root = _end_of_chain(graph, analysis, op.results[0])
        number = number_of.get(root, -1)
        if number < 0 or len(fusions[number].writes) != 1 or fusions[number].moved != fusions[number].writes:
            continue
        stores[op.results[0]] = fusions[number].writes[0]
        reads = tuple(t for t in fusions[number].reads if t != op.results[0])
        made[number] = Fusion(root, fusions[number].writes, reads, (), True)
    _join_rounded(graph, made)
    _fuse_sums(graph, analysis, made, _readers(analysis), {})
    return _fused(analysis, made, stores)


def _join_rounded(graph: OpGraph, made: list[Fusion]) -> None:
    """Let in `made` the first kernel that reads a rounded tanh compute and store it too; it reads its inputs once."""
    tanhs = {fusion.writes[0]: fusion for fusion in made if is_rounded_tanh(graph, graph.ops[fusion.root])}
    for number, fusion in enumerate(made):
        root = graph.ops[fusion.root]
        for tensor in fusion.reads:
            if tensor in tanhs and root.op_class is OpClass.POINTWISE:
                there = {tensor, *tanhs.pop(tensor).reads}
                reads = tuple(t for t in made[number].reads if t not in there)
                made[number] = dataclasses.replace(made[number], reads=reads, is_fused_sibling=True)


def _end_of_chain(graph: OpGraph, analysis: FusionAnalysis, tensor: int) -> int:
    """Return the id of the last elementwise op of a chain from a value, each with one consumer; -1 for none.

    An op of the chain has the value's shape and block, does not widen it, and its other operands are small
    (`_is_small`). A pinned value ends the chain.
    """
    own, last, consumers = graph.tensors[tensor], -1, analysis.consumers
    while len(set(consumers[tensor])) == 1:
        op = graph.ops[consumers[tensor][0]]
        result = graph.tensors[op.results[0]] if op.results else own
        if op.op_class is not OpClass.POINTWISE or op.loop != own.loop or result.shape != own.shape:
            break
        others = [t for t in op.operands if t != tensor]
        if (
            result.bytes > own.bytes
            or op.kind == "transpose"
            or not all(_is_small(graph, t, own.elements) for t in others)
        ):
            break
        tensor, last = op.results[0], op.id
        if tensor in analysis.pinned:
            break
    return last


def _is_small(graph: OpGraph, tensor: int, elements: int) -> bool:
    """Return True if a value has at least `SMALL` times fewer elements than `elements`, or repeats such a value or a
    generated one.
    """
    while graph.tensors[tensor].elements * SMALL > elements:
        maker = graph.maker(tensor)
        if maker is None or maker.op_class not in (OpClass.FREE, OpClass.VIEW):
            return False
        if maker.op_class is OpClass.FREE:
            return True
        tensor = maker.operands[0]
    return True


_MOVES = frozenset({"slice", "dynamic_update_slice"})
"""Ops besides pointwise ones that may share a kernel."""
_MOST = 8
"""Largest number of results of one kernel."""


@dataclasses.dataclass(slots=True)
class _Kernel:
    """A kernel that sibling fusions may join."""

    first: int
    """Root op of its first fusion; all operands of the kernel exist before this op."""
    elements: int
    """Number of elements that each of its fusions writes."""
    seen: set[int]
    """Values that the kernel reads or writes."""
    results: int = 1
    """Number of its fusions."""


def fuse_siblings(graph: OpGraph, fusions: Sequence[Fusion], only: frozenset[int] | None = None) -> list[Fusion]:
    """Return the fusions after sibling elementwise fusions of equal size that read the same values share one kernel.

    With `only`, fusions that write other values stay apart.

    A fusion that joins an earlier kernel is marked `is_fused_sibling`, and no longer reads the values that this kernel
    reads or writes. It joins the first kernel that allows it (`_may_join`); positions in the list do not change.
    """
    merged = list(fusions)
    kernels: dict[int, list[_Kernel]] = defaultdict(list)
    """Maps a value to the kernels that read or write it."""
    for number, fusion in enumerate(fusions):
        root = graph.ops[fusion.root]
        if not fusion.moved or not _is_light(root) or (only is not None and not only.issuperset(fusion.moved)):
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
    """Return True if a fusion can be computed in a kernel.

    It must write `size` elements as the kernel does, and lie in the same block. It may read only what the kernel reads
    or writes, and what exists before the kernel or can be computed before it. The kernel must have fewer than `_MOST`
    results.
    """
    if kernel.results >= _MOST or kernel.elements != size or graph.ops[kernel.first].loop != root.loop:
        return False
    return all(t in kernel.seen or _precedes(graph, t, kernel) for t in fusion.reads)


def _precedes(graph: OpGraph, tensor: int, kernel: _Kernel) -> bool:
    """Return True if a value exists before a kernel, or is a scalar that follows from such values alone.

    The compiler computes such scalars first, as the bias corrections of AdamW, wherever the program has them (embedding
    tables and dense layers on v5e).
    """
    waiting, known = [tensor], {tensor}
    while waiting:
        value = waiting.pop()
        maker = graph.maker(value)
        if maker is None or maker.id < kernel.first:
            continue
        if value in kernel.seen or graph.tensors[value].elements > 1:
            return False
        new = [t for t in maker.operands if t not in known]
        known.update(new)
        waiting.extend(new)
    return True
