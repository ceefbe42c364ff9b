"""What a TPU compiler rounds: float32 operands of matmuls and convolutions at the default precision.

The matrix unit multiplies in bfloat16. The compiler rounds an operand where it is made, once for all matmuls that take
it, so it is gathered and kept in half the bytes; results and their sums stay in float32 (every program in float32 that
was compiled for v4 to v6e, libtpu 0.0.51). The program says nothing of this; here it is written down as converts.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

from autoshard.graph.extraction.opaque_rules import same_rule
from autoshard.graph.flops import is_sum
from autoshard.graph.records import Op, OpClass, OpGraph, Tensor, made_by, renumbered


ROUNDING = frozenset({"dot_general", "convolution"})
"""Kinds of ops that round what they take."""
_MOVES = frozenset({"gather", "concatenate", "reshape", "transpose", "slice"})
_WIDE, _NARROW, _BYTES = "float32", "bfloat16", 2
INSERTED = -1
"""The number of an op that the module does not have."""


def rounded(graph: OpGraph) -> OpGraph:
    """The same graph with a convert to bfloat16 before the matmuls that take a float32 value.

    Tensors keep their numbers, new ones follow; ops and the spans of loops are counted anew.
    """
    generated = {t for op in graph.ops if op.op_class is OpClass.FREE for t in op.results}
    moves = _narrow_moves(graph)
    within = {t for op in moves for t in graph.ops[op].results}
    users: dict[int, list[int]] = defaultdict(list)
    for op in graph.ops:
        if _rounds(op) or op.id in moves:
            for tensor in dict.fromkeys(op.operands):
                if graph.tensors[tensor].dtype == _WIDE and tensor not in generated and tensor not in within:
                    users[tensor].append(op.id)
    if not users:
        return graph
    first = _first_uses(graph, users)
    before, after = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for tensor in sorted(users):
        producer = graph.tensors[tensor].producer
        if producer >= 0:
            after[producer].append(tensor)
        else:
            before[first[tensor]].append(tensor)
    tensors = list(graph.tensors)
    for tensor in within:
        tensors[tensor] = _narrowed(graph.tensors[tensor], tensor)
    narrow: dict[int, int] = {}
    for tensor in sorted(users):
        narrow[tensor] = len(tensors)
        tensors.append(_narrowed(graph.tensors[tensor], len(tensors)))
    ops: list[Op] = []
    at: list[int] = []
    for op in graph.ops:
        for tensor in before[op.id]:
            ops.append(_convert(graph, len(ops), tensor, narrow[tensor], graph.ops[users[tensor][0]]))
        at.append(len(ops))
        takes = op.operands
        if _rounds(op) or op.id in moves:
            takes = tuple(narrow.get(t, t) for t in takes)
        ops.append(renumbered(op, len(ops), takes))
        for tensor in after[op.id]:
            ops.append(_convert(graph, len(ops), tensor, narrow[tensor], graph.ops[users[tensor][0]]))
    for op in ops:
        for tensor in op.results:
            tensors[tensor] = made_by(tensors[tensor], op.id)
    loops = tuple(
        dataclasses.replace(loop, start=start, stop=stop)
        for loop, (start, stop) in zip(graph.loops, _spans(graph, ops, at), strict=True)
    )
    without_rule = tuple(at[op] for op in graph.without_rule)
    return dataclasses.replace(graph, tensors=tuple(tensors), ops=tuple(ops), loops=loops, without_rule=without_rule)


def _rounds(op: Op) -> bool:
    if op.kind == "dot_general" and op.rule is not None and is_sum(op.rule):
        return False
    return op.kind in ROUNDING and op.passes == 1


def _narrowed(tensor: Tensor, number: int) -> Tensor:
    return dataclasses.replace(tensor, id=number, dtype=_NARROW, bytes=tensor.elements * _BYTES)


def _narrow_moves(graph: OpGraph) -> set[int]:
    """Ops that only put elements elsewhere, for matmuls alone: what they take is rounded, so that they move half."""
    kept = {*graph.results, *(t for loop in graph.loops for c in loop.carries for t in (c.init, c.update))}
    users: dict[int, list[Op]] = defaultdict(list)
    for op in graph.ops:
        for tensor in set(op.operands):
            users[tensor].append(op)
    found: set[int] = set()
    for op in reversed(graph.ops):
        if op.kind not in _MOVES or op.op_class in (OpClass.FREE, OpClass.LAYER):
            continue
        (result,) = op.results
        taken = users[result]
        alone = all((_rounds(user) or user.id in found) and user.loop == op.loop for user in taken)
        if taken and alone and result not in kept and graph.tensors[result].dtype == _WIDE:
            found.add(op.id)
    return found


def source_of(graph: OpGraph, tensor: int) -> int:
    """The value of the module that a tensor is, or is rounded from."""
    producer = graph.tensors[tensor].producer
    if producer >= 0 and graph.ops[producer].number == INSERTED:
        return graph.ops[producer].operands[0]
    return tensor


def _convert(graph: OpGraph, op_id: int, tensor: int, result: int, user: Op) -> Op:
    record: Tensor = graph.tensors[tensor]
    rule = same_rule([record.shape], [record.shape])
    return Op(
        op_id, INSERTED, "convert", OpClass.POINTWISE, (tensor,), (result,), rule, record.loop, 0, user.name, (0,),
        manual=record.manual, line=user.line,
    )  # fmt: skip


def _first_uses(graph: OpGraph, users: dict[int, list[int]]) -> dict[int, int]:
    """By tensor the op before which it is rounded, in its own block: the first matmul, or the first op of the loop that
    it is in."""
    found = {}
    for tensor, ops in users.items():
        loop, at = graph.ops[ops[0]].loop, ops[0]
        while loop != graph.tensors[tensor].loop and loop >= 0:
            at, loop = graph.loops[loop].start, graph.loops[loop].parent
        found[tensor] = at
    return found


def _spans(graph: OpGraph, ops: list[Op], at: list[int]) -> Iterator[tuple[int, int]]:
    """The first op of every loop's body and one past its last, loops within it included."""
    spans: dict[int, tuple[int, int]] = {}
    for op in ops:
        loop = op.loop
        while loop >= 0:
            start, _ = spans.get(loop, (op.id, op.id))
            spans[loop] = (start, op.id + 1)
            loop = graph.loops[loop].parent
    for loop in graph.loops:
        empty = at[loop.start] if loop.start < len(at) else len(ops)
        yield spans.get(loop.id, (empty, empty))
