"""Epilogue fusion: elementwise ops that kernels of matmuls and reductions compute before they store their results."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from autoshard.graph.flops import is_sum
from autoshard.graph.records import Fusion, OpClass, OpGraph


_FEW = 64
"""Largest number of values that are followed from a matmul's result."""
_MOST_MADE = 4
"""Largest number of values that a matmul's kernel stores instead of its result."""
SMALL = 8
"""Factor by which a value must be smaller to be ignored.

An operand with so many times fewer elements than a sum's input does not decide which kernel computes the sum. Bytes
that are so many times smaller than a value do not decide if the value is stored.
"""


def post_dominators(graph: OpGraph, consumers: Sequence[Sequence[int]], apart: Collection[int]) -> dict[int, int]:
    """Map each value with several users to its immediate post-dominator: the pointwise op where all paths from it join.

    All users up to that op are parts of one kernel, which computes the value once. Paths stay in one block, and lead
    over pointwise ops only. `apart` are ops that end a kernel; no path leads through them.
    """
    after = [-1] * len(graph.ops)
    """Next op to which all paths from each op lead; -1 for none, [ops]."""
    joins: dict[int, int] = {}

    def first_common_op(users: Sequence[int], loop: int) -> int:
        """Return the first op common to all paths from `users`; -1 if there is none."""
        at = -1
        for number, user in enumerate(sorted(set(users))):
            other = graph.ops[user]
            if other.loop != loop or other.op_class is not OpClass.POINTWISE or user in apart:
                return -1
            if not number:
                at = user
                continue
            mine, theirs = at, user
            while mine != theirs:  # ids follow program order, so the smaller one moves on
                if mine < theirs:
                    mine = after[mine]
                else:
                    theirs = after[theirs]
                if mine < 0 or theirs < 0:
                    return -1
            at = mine
        return at

    for op in reversed(graph.ops):
        users = [user for tensor in op.results for user in consumers[tensor]]
        if not users or op.id in apart:
            continue
        after[op.id] = first_common_op(users, op.loop)
        if len(op.results) == 1 and len(set(users)) > 1 and after[op.id] >= 0:
            joins[op.results[0]] = after[op.id]
    return joins


def latest_makers(graph: OpGraph) -> list[int]:
    """Return for every value the latest op with a kernel of its own from which it is computed; -1 for none."""
    latest = [tensor.producer for tensor in graph.tensors]
    for op in graph.ops:
        if op.op_class is OpClass.FREE or (op.op_class is OpClass.POINTWISE and op.operands):
            before = -1 if op.op_class is OpClass.FREE else max(latest[t] for t in op.operands)
            for tensor in op.results:
                latest[tensor] = before
    return latest


def leads_from_matmul(
    graph: OpGraph,
    tensor: int,
    reads: Collection[int],
    consumers: Sequence[Sequence[int]],
    matmuls: Collection[int],
    pinned: Collection[int],
    latest: Sequence[int],
) -> bool:
    """Return True if the kernel of a matmul in `reads` also computes and stores `tensor`, which other matmuls read.

    The kernel does so if all values computed from its result are pointwise, and are read by matmuls. The gradient of a
    gated activation has two such values. The same kernel also computes sums of them.

    - `tensor`: the value in question.
    - `reads`: stored values from which it is computed.
    - `matmuls`: matmuls that fuse pointwise ops.
    - `pinned`: values that are stored in any case.
    - `latest`: the result of `latest_makers`.
    """
    last = graph.ops[graph.tensors[tensor].producer]
    if last.op_class is not OpClass.POINTWISE:
        return False
    for source in reads:
        maker = graph.tensors[source].producer
        if maker not in matmuls or source in pinned or graph.ops[maker].loop != last.loop:
            continue
        if graph.tensors[source].elements != graph.tensors[tensor].elements:
            continue
        if tensor in _epilogue_values(graph, source, consumers, matmuls, pinned, latest):
            return True
    return False


def _epilogue_values(
    graph: OpGraph,
    source: int,
    consumers: Sequence[Sequence[int]],
    matmuls: Collection[int],
    pinned: Collection[int],
    latest: Sequence[int],
) -> set[int]:
    """Return the values that matmuls read and that only pointwise ops compute from the matmul result `source`.

    The result is empty if other ops also read such a value, or if one depends on a kernel later than the matmul.
    """
    loop, maker, values = graph.tensors[source].loop, graph.tensors[source].producer, set[int]()
    left, seen = [source], {source}
    while left:
        tensor = left.pop()
        users = [graph.ops[user] for user in consumers[tensor] if graph.ops[user].kind != "reduce"]
        matmul_users = [user for user in users if user.id in matmuls and user.loop == loop]
        if tensor in pinned or (matmul_users and (tensor == source or len(matmul_users) < len(users))):
            return set()
        if matmul_users:
            values.add(tensor)
            continue
        if any(user.loop != loop or user.op_class is not OpClass.POINTWISE for user in users):
            return set()
        if any(latest[t] > maker for user in users for t in user.operands):
            return set()
        more = {t for user in users for t in user.results} - seen
        left += more
        seen |= more
        if len(seen) > _FEW:
            return set()
    return values if len(values) <= _MOST_MADE else set()


@dataclasses.dataclass(frozen=True, slots=True)
class EpilogueFusion:
    """Fusions after epilogue fusion, some of them part of others' kernels."""

    fusions: list[Fusion]
    stores: Mapping[int, int]
    """Maps the unstored result of a matmul or convolution to the value that its kernel stores instead."""


def fuse_epilogues(
    graph: OpGraph,
    fusions: Sequence[Fusion],
    matmuls: Collection[int],
    pinned: Collection[int],
    bases: Mapping[int, Collection[int]],
) -> EpilogueFusion:
    """Fuse pointwise fusions into the matmuls whose results they read, and sums into the kernels of their inputs.

    A pointwise fusion that becomes an epilogue does not read the matmul's result; its own result is stored instead.
    Several fusions join one matmul if only matmuls and sums read their results. A fused sum reads only its small
    operands.

    - `matmuls`: matmuls that fuse pointwise ops.
    - `pinned`: values that are stored in any case.
    - `bases`: maps each slice to the stored values of which it is a part.
    """
    readers: dict[int, list[int]] = {}
    for number, fusion in enumerate(fusions):
        for tensor in fusion.reads:
            for source in {tensor, *bases.get(tensor, ())}:
                readers.setdefault(source, []).append(number)
    made = list(fusions)
    stores: dict[int, int] = {}
    done: set[int] = set()
    able = {number: _epilogue_sources(graph, fusion, matmuls, pinned, bases) for number, fusion in enumerate(fusions)}

    def takers(source: int, fusion: Fusion) -> list[int]:
        """Return the fusions that read a matmul's result, without the sums that `fusion` computes in its own kernel."""
        return [
            n
            for n in readers[source]
            if fusions[n] is fusion or not _is_fused_sum(graph, fusions[n], fusion, source, bases)
        ]

    def for_matmuls(number: int) -> bool:
        """Return True if only matmuls and sums read the results of a fusion, and at least one matmul does."""
        ops = [graph.ops[fusions[n].root] for t in fusions[number].writes for n in readers.get(t, ())]
        return any(op.id in matmuls for op in ops) and all(op.id in matmuls or op.kind == "reduce" for op in ops)

    for number, fusion in enumerate(fusions):
        before = [t for t in able[number] if takers(t, fusion) == [number]]
        if before:
            source = max(before, key=lambda t: graph.tensors[t].producer)
            stores[source] = fusion.writes[0]
            done.add(number)
            made[number] = dataclasses.replace(fusion, reads=tuple(t for t in fusion.reads if t != source), moved=())
    for number, fusion in enumerate(fusions):
        for source in able[number]:
            together = takers(source, fusion)
            if number in done or source in stores or not 1 < len(together) <= _MOST_MADE:
                continue
            if any(n in done or source not in able[n] or not for_matmuls(n) for n in together):
                continue
            stores[source] = fusion.writes[0]
            done.update(together)
            there = {source}
            for first, n in enumerate(together):
                left = tuple(t for t in fusions[n].reads if t not in there)
                moved = fusions[n].moved if first else ()
                made[n] = dataclasses.replace(fusions[n], reads=left, moved=moved, is_fused_sibling=bool(first))
                there.update(fusions[n].reads)
    _fuse_sums(graph, fusions, made, matmuls, readers)
    return EpilogueFusion(made, stores)


def _epilogue_sources(
    graph: OpGraph,
    fusion: Fusion,
    matmuls: Collection[int],
    pinned: Collection[int],
    bases: Mapping[int, Collection[int]],
) -> list[int]:
    """Return the matmul results that a fusion reads as a whole, and whose kernels may compute the fusion."""
    root = graph.ops[fusion.root]
    if root.op_class is not OpClass.POINTWISE or len(fusion.writes) != 1 or fusion.moved != fusion.writes:
        return []
    elements = graph.tensors[fusion.writes[0]].elements
    sliced = {base for t in fusion.reads for base in bases.get(t, ())}
    return [
        t
        for t in fusion.reads
        if graph.tensors[t].producer in matmuls
        and t not in pinned
        and t not in sliced
        and graph.ops[graph.tensors[t].producer].loop == root.loop
        and graph.tensors[t].elements == elements
    ]


def _is_fused_sum(
    graph: OpGraph, fusion: Fusion, other: Fusion, source: int, bases: Mapping[int, Collection[int]]
) -> bool:
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
        graph.tensors[t].producer < other.root and source not in (t, *bases.get(t, ())) for t in small
    )


def _large_reads(graph: OpGraph, fusion: Fusion) -> list[int]:
    """Return the values read by a sum, without those at least `SMALL` times smaller than its input."""
    elements = max(graph.tensors[t].elements for t in graph.ops[fusion.root].operands)
    return [t for t in fusion.reads if graph.tensors[t].elements * SMALL > elements]


def _fuse_sums(
    graph: OpGraph,
    fusions: Sequence[Fusion],
    made: list[Fusion],
    matmuls: Collection[int],
    readers: Mapping[int, Sequence[int]],
) -> None:
    """Drop the large reads of sums that another kernel of their block computes."""
    maker = {tensor: number for number, fusion in enumerate(fusions) for tensor in fusion.writes}
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
        hosts = [*([maker[latest]] if latest in maker else ()), *siblings]
        for host in hosts:
            other = graph.ops[fusions[host].root]
            goes_on = other.op_class is OpClass.POINTWISE or other.id in matmuls or other.kind == "reduce"
            there = {*fusions[host].reads, *fusions[host].writes}
            if not goes_on or other.loop != root.loop or not large <= there:
                continue
            if all(graph.tensors[t].producer < other.id for t in small):
                made[number] = dataclasses.replace(fusion, reads=tuple(small))
                break


def fuse_gpu_epilogues(
    graph: OpGraph, fusions: Sequence[Fusion], consumers: Sequence[Sequence[int]], pinned: Collection[int]
) -> EpilogueFusion:
    """Return the fusions that remain after GPU matmuls compute their epilogues, and the values stored instead."""
    made, stores = list(fusions), {}
    number_of = {fusion.root: number for number, fusion in enumerate(fusions)}
    for fusion in fusions:
        op = graph.ops[fusion.root]
        if op.kind != "dot_general" or op.rule is None or is_sum(op.rule) or op.results[0] in pinned:
            continue
        root = _end_of_chain(graph, op.results[0], consumers, pinned)
        number = number_of.get(root, -1)
        if number < 0 or len(fusions[number].writes) != 1 or fusions[number].moved != fusions[number].writes:
            continue
        stores[op.results[0]] = fusions[number].writes[0]
        reads = tuple(t for t in fusions[number].reads if t != op.results[0])
        made[number] = Fusion(root, fusions[number].writes, reads, (), True)
    return EpilogueFusion(made, stores)


def _end_of_chain(graph: OpGraph, tensor: int, consumers: Sequence[Sequence[int]], pinned: Collection[int]) -> int:
    """Return the last elementwise op of a chain from a value, each with one consumer; -1 for none."""
    own, last = graph.tensors[tensor], -1
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
        if tensor in pinned:
            break
    return last


def _is_small(graph: OpGraph, tensor: int, elements: int) -> bool:
    """Return True if a value is small, or repeats a small one."""
    while graph.tensors[tensor].elements * SMALL > elements:
        producer = graph.tensors[tensor].producer
        if producer < 0 or graph.ops[producer].op_class not in (OpClass.FREE, OpClass.VIEW):
            return False
        if graph.ops[producer].op_class is OpClass.FREE:
            return True
        tensor = graph.ops[producer].operands[0]
    return True
