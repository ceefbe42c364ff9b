"""Which values reach memory, which are recomputed inside fusions, and how long each lives.

The rule: heavy ops write what they make and read what they take; pointwise values stay inside the fusion of
whoever consumes them, unless recomputing them for several consumers would read more than keeping them costs.
"""

import dataclasses

from autoshard.graph._records import OpClass, OpGraph


_CHEAP_INTO_MATMUL = frozenset({"convert", "transpose", "reshape", "broadcast_in_dim"})
_WRITERS = frozenset({"reduce"})
_FUSED_MOVES = frozenset({"slice", "concatenate", "pad", "reverse"})


@dataclasses.dataclass(frozen=True, slots=True)
class Fusion:
    """One kernel: the op that ends it, the values it writes and the values in memory that it reads."""

    root: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]
    """A slice taken of a stack stands for itself: only the slice is read."""
    moved: tuple[int, ...]
    """Values whose bytes are written: `writes`, or the slice that is put into a stack in place."""


@dataclasses.dataclass(frozen=True, slots=True)
class Liveness:
    """When each value that reaches memory is held, in op ids, half open."""

    fusions: tuple[Fusion, ...]
    materialised: frozenset[int]
    buffers: tuple[tuple[int, int, int], ...]
    """(tensor, start, stop); a loop's carried value has one buffer, named by the tensor inside the body."""


def analyse(graph: OpGraph) -> Liveness:
    """Fusions, and the lifetime of every value that reaches memory."""
    free = {t for op in graph.ops if op.op_class is OpClass.FREE for t in op.results}
    consumers: list[list[int]] = [[] for _ in graph.tensors]
    for op in graph.ops:
        for tensor in set(op.operands):
            consumers[tensor].append(op.id)
    pinned = set(graph.results)
    for loop in graph.loops:
        for carry in loop.carries:
            pinned.update((carry.init, carry.update))
    reach: dict[int, frozenset[int]] = {}
    bases: dict[int, frozenset[int]] = {}
    materialised: set[int] = set()
    for tensor in graph.tensors:
        if tensor.producer < 0:
            materialised.add(tensor.id)
            reach[tensor.id] = frozenset((tensor.id,))
    fusions = []
    for op in graph.ops:
        if op.op_class is OpClass.FREE:
            for tensor in op.results:
                reach[tensor] = frozenset()
            continue
        if op.kind == "dynamic_slice" and op.op_class is OpClass.LAYER:
            bases[op.results[0]] = reach.get(op.operands[0], frozenset())
            reach[op.results[0]] = frozenset(op.results)
            continue
        in_place = op.kind == "dynamic_update_slice"
        sources = op.operands[1:2] if in_place else op.operands
        reads = frozenset().union(*(reach.get(t, frozenset()) for t in sources))
        writes = []
        for tensor in op.results:
            if _is_written(graph, op.id, tensor, consumers[tensor], reads, pinned):
                materialised.add(tensor)
                reach[tensor] = frozenset((tensor,))
                writes.append(tensor)
            else:
                reach[tensor] = reads
        if writes:
            moved = op.operands[1:2] if in_place else tuple(writes)
            fusions.append(Fusion(op.id, tuple(writes), tuple(sorted(reads)), moved))
    buffers = _buffers(graph, fusions, materialised, free, reach, bases)
    return Liveness(tuple(fusions), frozenset(materialised), buffers)


def _is_written(
    graph: OpGraph, op_id: int, tensor: int, users: list[int], reads: frozenset[int], pinned: set[int]
) -> bool:
    op = graph.ops[op_id]
    if (op.op_class is OpClass.HEAVY and op.kind not in _FUSED_MOVES) or op.kind in _WRITERS or op.kind == "dynamic_update_slice" or tensor in pinned:
        return True
    heavy = any(graph.ops[u].op_class is OpClass.HEAVY and graph.ops[u].kind not in _FUSED_MOVES for u in users)
    if heavy and op.kind not in _CHEAP_INTO_MATMUL and op.op_class is not OpClass.LAYER:
        return True
    size = graph.tensors[tensor].bytes
    return len(users) > 1 and sum(graph.tensors[t].bytes for t in reads) > size


def _buffers(
    graph: OpGraph,
    fusions: list[Fusion],
    materialised: set[int],
    free: set[int],
    reach: dict[int, frozenset[int]],
    bases: dict[int, frozenset[int]],
) -> tuple[tuple[int, int, int], ...]:
    end = len(graph.ops)
    start = {t.id: (t.producer if t.producer >= 0 else 0) for t in graph.tensors}
    last = dict.fromkeys(materialised, -1)
    for fusion in fusions:
        for read in fusion.reads:
            for tensor in bases.get(read, (read,)):
                last[tensor] = max(last[tensor], _outlast(graph, tensor, fusion.root))
    for tensor in graph.results:
        for read in reach.get(tensor, ()):
            for source in bases.get(read, (read,)):
                last[source] = end
        if tensor in last:
            last[tensor] = end
    merged: dict[int, int] = {}
    for loop in reversed(graph.loops):
        for carry in loop.carries:
            begin = loop.start if graph.tensors[carry.init].producer < 0 or carry.init in free else start[carry.init]
            start[carry.body] = min(begin, loop.start)
            last[carry.body] = max(last.get(carry.body, -1), loop.stop, last.get(carry.result, -1))
            for tensor in (carry.init, carry.update, carry.result):
                if tensor != carry.body and tensor not in graph.arguments:
                    merged[tensor] = carry.body
    buffers = []
    for tensor in sorted(materialised):
        if tensor in merged:
            continue
        stop = last[tensor] + 1 if last[tensor] < end else end + 1
        if tensor in graph.arguments:
            buffers.append((tensor, 0, max(1, stop)))
        elif stop > start[tensor]:
            buffers.append((tensor, start[tensor], stop))
    return tuple(buffers)


def _outlast(graph: OpGraph, tensor: int, user: int) -> int:
    """Last moment a value is needed by an op: the end of the outermost loop that runs the op but not the value."""
    home, loop, moment = graph.tensors[tensor].loop, graph.ops[user].loop, user
    while loop != home and loop >= 0:
        moment = max(moment, graph.loops[loop].stop - 1)
        loop = graph.loops[loop].parent
    return moment
