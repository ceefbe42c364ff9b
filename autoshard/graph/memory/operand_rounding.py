"""Rounding of float32 operands of matmuls and convolutions to bfloat16, as TPU compilers do at default precision.

The compiler rounds an operand once for all matmuls that read it, so the operand is gathered and stored in half the
bytes. Results and sums stay in float32. The program does not contain these converts; this module inserts them.

Evidence: docs/compiler_behaviour.md, "Rounding of matmul operands".
"""

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Iterator

from autoshard.graph.extraction.opaque_rules import same_rule
from autoshard.graph.flops import is_sum
from autoshard.graph.records import Op, OpClass, OpGraph, Tensor


ROUNDING = frozenset({"dot_general", "convolution"})
"""Kinds of ops that round their operands."""
_MOVES = frozenset({"gather", "concatenate", "reshape", "reverse", "transpose", "slice"})
"""Kinds of ops that only move elements."""
_WIDE, _NARROW, _BYTES = "float32", "bfloat16", 2
INSERTED = -1
"""Number of an op that is not in the module."""


def round_operands(graph: OpGraph) -> OpGraph:
    """Return the graph with a convert to bfloat16 for every float32 value that matmuls read; `graph` itself if there is
    none.

    Generated values are not converted. A value is converted once, after its producer or before its first use. Ops that
    only move elements for matmuls become bfloat16. Tensors keep their ids, and new tensors follow. Ops and the spans of
    loops are renumbered.
    """
    moves = _narrow_moves(graph)
    within = {t for op in moves for t in graph.ops[op].results}
    users: dict[int, list[int]] = defaultdict(list)
    for op in graph.ops:
        if _rounds(op) or op.id in moves:
            for tensor in dict.fromkeys(op.operands):
                if graph.tensors[tensor].dtype == _WIDE and tensor not in graph.generated and tensor not in within:
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
        ops.append(_with_id(op, len(ops), takes))
        for tensor in after[op.id]:
            ops.append(_convert(graph, len(ops), tensor, narrow[tensor], graph.ops[users[tensor][0]]))
    for op in ops:
        for tensor in op.results:
            tensors[tensor] = _with_producer(tensors[tensor], op.id)
    loops = tuple(
        dataclasses.replace(loop, start=start, stop=stop)
        for loop, (start, stop) in zip(graph.loops, _spans(graph, ops, at), strict=True)
    )
    without_rule = tuple(at[op] for op in graph.without_rule)
    return dataclasses.replace(graph, tensors=tuple(tensors), ops=tuple(ops), loops=loops, without_rule=without_rule)


# Functions that return all fields of an `Op` and of a `Tensor`, in order.
_OP_FIELDS, _TENSOR_FIELDS = (
    operator.attrgetter(*(field.name for field in dataclasses.fields(record))) for record in (Op, Tensor)
)
# Positions of `Op.operands` and `Tensor.producer` among the fields.
_OPERANDS, _PRODUCER = (
    [field.name for field in dataclasses.fields(record)].index(name)
    for record, name in ((Op, "operands"), (Tensor, "producer"))
)


def _with_id(op: Op, number: int, operands: tuple[int, ...]) -> Op:
    """Return the op with another id and other operands; `dataclasses.replace` would cost seconds on large graphs."""
    if op.id == number and op.operands == operands:
        return op
    _, *fields = _OP_FIELDS(op)
    fields[_OPERANDS - 1] = operands
    return Op(number, *fields)


def _with_producer(tensor: Tensor, producer: int) -> Tensor:
    """Return the tensor with another producer."""
    if tensor.producer == producer:
        return tensor
    fields = list(_TENSOR_FIELDS(tensor))
    fields[_PRODUCER] = producer
    return Tensor(*fields)


def _rounds(op: Op) -> bool:
    """Return True if an op is a matmul or convolution that runs on the matrix unit in a single bfloat16 pass.

    Dots that XLA computes as sums give False.
    """
    if op.kind == "dot_general" and op.rule is not None and is_sum(op.rule):
        return False
    return op.kind in ROUNDING and op.passes == 1


def _narrowed(tensor: Tensor, number: int) -> Tensor:
    """Return the tensor in bfloat16, with the id `number`."""
    return dataclasses.replace(tensor, id=number, dtype=_NARROW, bytes=tensor.elements * _BYTES)


def _narrow_moves(graph: OpGraph) -> set[int]:
    """Return the ids of ops that only move float32 elements, and whose results only matmuls of the same block read,
    directly or through such ops.

    Their operands are rounded before the move, so that the ops move half the bytes.
    """
    moves: set[int] = set()
    for op in reversed(graph.ops):
        if op.kind not in _MOVES or op.op_class in (OpClass.FREE, OpClass.LAYER):
            continue
        (result,) = op.results
        users = graph.users[result]
        alone = all((_rounds(user) or user.id in moves) and user.loop == op.loop for user in users)
        if users and alone and result not in graph.returned and graph.tensors[result].dtype == _WIDE:
            moves.add(op.id)
    return moves


def source_of(graph: OpGraph, tensor: int) -> int:
    """Return the module's value from which an inserted convert rounds a tensor; the tensor itself if none
    computes it.
    """
    maker = graph.maker(tensor)
    return maker.operands[0] if maker is not None and maker.number == INSERTED else tensor


def dtype_of(graph: OpGraph, tensor: int) -> str:
    """Return the dtype that a tensor has in the module, before `round_operands`."""
    while (maker := graph.maker(tensor)) is not None and maker.kind in _MOVES:
        tensor = maker.operands[0]
    return graph.tensors[source_of(graph, tensor)].dtype


def rounds_rows(graph: OpGraph, op: Op) -> bool:
    """Return True if a gather of rows for matmuls rounds them after it reads them.

    The rows are summed over devices in float32 if the rows of the table are split.

    Evidence: docs/compiler_behaviour.md, "Rounding of matmul operands".
    """
    table = graph.maker(op.operands[0]) if op.kind == "gather" else None
    return table is not None and table.number == INSERTED


def _convert(graph: OpGraph, op_id: int, tensor: int, result: int, user: Op) -> Op:
    """Build the inserted convert `op_id` of `tensor` to `result`, named after the op `user` that needs it."""
    record: Tensor = graph.tensors[tensor]
    rule = same_rule([record.shape], [record.shape])
    return Op(
        op_id, INSERTED, "convert", OpClass.POINTWISE, (tensor,), (result,), rule, record.loop, 0, user.name, (0,),
        manual=record.manual, line=user.line,
    )  # fmt: skip


def _first_uses(graph: OpGraph, users: dict[int, list[int]]) -> dict[int, int]:
    """Map each tensor to the op in its own block before which it is rounded; `users` lists the matmuls by tensor.

    The op is the first matmul, or the first op of the loop that contains the matmul.
    """
    first = {}
    for tensor, ops in users.items():
        loop, at = graph.ops[ops[0]].loop, ops[0]
        while loop != graph.tensors[tensor].loop and loop >= 0:
            at, loop = graph.loops[loop].start, graph.loops[loop].parent
        first[tensor] = at
    return first


def _spans(graph: OpGraph, ops: list[Op], at: list[int]) -> Iterator[tuple[int, int]]:
    """Yield for every loop, in the graph's order, the first op of its body and one past the last, nested loops
    included.

    `ops` are the renumbered ops, `at` their new ids by old id. A loop without ops has an empty span at the new id of
    the op at which it started.
    """
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
