"""Loops and conditionals: their bodies, their carried values, their numbers of trips."""

from typing import Any

from autoshard import mlir
from autoshard.graph.extraction.graph_builder import GraphBuilder, ReadBlock
from autoshard.graph.extraction.opaque_rules import same_rule
from autoshard.graph.records import Carry, Loop, Op, OpClass


BRANCHING = frozenset({"case", "if"})
"""Kinds of conditionals."""


def read_branches(builder: GraphBuilder, op: Any, kind: str, parent: int, read_block: ReadBlock) -> None:
    """Read a conditional: the ops of every branch, and for each result an op whose operands are the branches' values.

    Each branch becomes a `Loop` of one trip. The ops of the results are pointwise, so branches and results must agree
    on a spec; an op is free if all its operands are.

    - `kind`: kind of the ops of results.
    - `parent`: loop around the conditional; -1 for none.
    """
    number, name = builder.number, mlir.location_name(op.location)
    given = []
    for region in op.regions:
        branch, start = len(builder.loops), len(builder.ops)
        builder.loops.append(None)
        given.append(read_block(region.blocks[0], branch))
        builder.loops[branch] = Loop(
            branch, number, parent, 1, True, (), start, len(builder.ops), 0, branches=len(op.regions)
        )
    for r, value in enumerate(op.results):
        sources, op_id = tuple(values[r] for values in given), len(builder.ops)
        result = builder.new_tensor(value, op_id, parent, (number, r), name)
        shape = builder.tensors[result].shape
        op_class = OpClass.POINTWISE
        if all(source in builder.free for source in sources):
            builder.free.add(result)
            op_class = OpClass.FREE
        rule = same_rule([shape] * len(sources), [shape])
        numbers = tuple(range(len(sources)))
        builder.ops.append(
            Op(op_id, number, kind, op_class, sources, (result,), rule, parent, 0, name, numbers,
               manual=builder.manual, line=mlir.code_line(op))
        )  # fmt: skip


def read_while(builder: GraphBuilder, op: Any, parent: int, read_block: ReadBlock) -> None:
    """Read a `while`: its carried values, condition, body and number of trips, in a loop inside `parent` (-1 for none).

    A carried value that the body returns unchanged is an alias of its initial value. Trips that cannot be counted, or
    that are zero, count as 1; `Loop` records if they were counted.
    """
    number, loop_id = builder.number, len(builder.loops)
    builder.loops.append(None)
    condition, body = (region.blocks[0] for region in op.regions)
    invariant = [body.operations[len(body.operations) - 1].operation.operands[k] == argument
                 for k, argument in enumerate(body.arguments)]  # fmt: skip
    inits = [builder.ids[value] for value in op.operands]
    carried = []
    for k, (argument, init) in enumerate(zip(body.arguments, inits, strict=True)):
        builder.ids[condition.arguments[k]] = init
        if invariant[k]:
            builder.ids[argument] = init
            carried.append(init)
        else:
            carried.append(
                builder.new_tensor(argument, -1, loop_id, (number, len(inits) + k), builder.tensors[init].name)
            )
    bound = _read_condition(builder, condition)
    start = len(builder.ops)
    updates = read_block(body, loop_id)
    stop = len(builder.ops)
    carries = []
    for k, result in enumerate(op.results):
        if invariant[k]:
            builder.ids[result] = inits[k]
            continue
        out = builder.new_tensor(result, -1, parent, (number, k), builder.tensors[inits[k]].name)
        carries.append(Carry(inits[k], carried[k], updates[k], out))
    trips = _count_trips(builder, bound, inits, carried, updates)
    builder.loops[loop_id] = Loop(
        loop_id, number, parent, trips or 1, trips is not None, tuple(carries), start, stop, len(inits)
    )


def _read_condition(builder: GraphBuilder, block: Any) -> tuple[int, int] | None:
    """Return (the counter's tensor in the condition, limit) of a condition `counter < constant`; None for any other.

    Ops of the condition advance `builder.number`, and constants get tensors; other ops get none.
    """
    bound = None
    for handle in block.operations:
        op = handle.operation
        builder.number += 1
        kind = op.name.rpartition(".")[2]
        if kind == "constant":
            tensor = builder.new_tensor(op.results[0], -1, -1, (builder.number, 0))
            builder.free.add(tensor)
            builder.note_constant(op, tensor)
        elif kind == "compare" and mlir.compared(op) == "LT":
            left, right = (builder.ids.get(value) for value in op.operands)
            if left is not None and right in builder.constants:
                bound = (left, builder.constants[right])
        else:
            for value in op.results:
                builder.ids.setdefault(value, -1)
    return bound


def _count_trips(
    builder: GraphBuilder, bound: tuple[int, int] | None, inits: list[int], carried: list[int], updates: list[int]
) -> int | None:
    """Return the number of trips of a loop with a constant start, step and limit; None for any other loop.

    - `bound`: result of `_read_condition`.
    - `inits`, `carried`, `updates`: tensors of each carried value before the loop, at the start of a trip and at its
      end.
    """
    if bound is None or bound[0] not in inits:
        return None
    # Several carries may start from one shared zero: the counter is the carry whose update adds a constant.
    for k, init in enumerate(inits):
        if init != bound[0] or init not in builder.constants:
            continue
        producer = builder.tensors[updates[k]].producer
        if producer < 0 or builder.ops[producer].kind != "add":
            continue
        terms = builder.ops[producer].operands
        step = next((builder.constants[t] for t in terms if t in builder.constants), None)
        if carried[k] in terms and step:
            return max(0, -(-(bound[1] - builder.constants[init]) // step))
    return None
