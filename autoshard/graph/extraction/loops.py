"""Loops and conditionals: their bodies, their carried values, their numbers of trips."""

from typing import Any

from autoshard import mlir
from autoshard.graph.extraction.graph_builder import ReadBlock, UseReading
from autoshard.graph.extraction.opaque_rules import same_rule
from autoshard.graph.records import Carry, Loop, Op, OpClass


BRANCHING = frozenset({"case", "if"})


def read_branches(reading: UseReading, op: Any, kind: str, parent: int, read_block: ReadBlock) -> None:
    """Read a conditional: the ops of every branch, and for each result an op whose operands are the branches' values.

    These ops are pointwise, so branches and results must agree on a spec.
    """
    number, name = reading.number, mlir.location_name(op.location)
    given = []
    for region in op.regions:
        branch, start = len(reading.loops), len(reading.ops)
        reading.loops.append(None)
        given.append(read_block(region.blocks[0], branch))
        reading.loops[branch] = Loop(
            branch, number, parent, 1, True, (), start, len(reading.ops), 0, branches=len(op.regions)
        )
    for r, value in enumerate(op.results):
        sources, op_id = tuple(values[r] for values in given), len(reading.ops)
        result = reading.new_tensor(value, op_id, parent, (number, r), name)
        shape = reading.tensors[result].shape
        op_class = OpClass.POINTWISE
        if all(source in reading.free for source in sources):
            reading.free.add(result)
            op_class = OpClass.FREE
        rule = same_rule([shape] * len(sources), [shape])
        numbers = tuple(range(len(sources)))
        reading.ops.append(
            Op(op_id, number, kind, op_class, sources, (result,), rule, parent, 0, name, numbers,
               manual=reading.manual, line=mlir.code_line(op))
        )  # fmt: skip


def read_while(reading: UseReading, op: Any, parent: int, read_block: ReadBlock) -> None:
    """Read a `while`: its carried values, condition, body and number of trips.

    A carried value that the body returns unchanged is an alias of its initial value.
    """
    number, loop_id = reading.number, len(reading.loops)
    reading.loops.append(None)
    condition, body = (region.blocks[0] for region in op.regions)
    invariant = [body.operations[len(body.operations) - 1].operation.operands[k] == argument
                 for k, argument in enumerate(body.arguments)]  # fmt: skip
    inits = [reading.ids[value] for value in op.operands]
    carried = []
    for k, (argument, init) in enumerate(zip(body.arguments, inits, strict=True)):
        reading.ids[condition.arguments[k]] = init
        if invariant[k]:
            reading.ids[argument] = init
            carried.append(init)
        else:
            carried.append(
                reading.new_tensor(argument, -1, loop_id, (number, len(inits) + k), reading.tensors[init].name)
            )
    bound = _read_condition(reading, condition)
    start = len(reading.ops)
    updates = read_block(body, loop_id)
    stop = len(reading.ops)
    carries = []
    for k, result in enumerate(op.results):
        if invariant[k]:
            reading.ids[result] = inits[k]
            continue
        out = reading.new_tensor(result, -1, parent, (number, k), reading.tensors[inits[k]].name)
        carries.append(Carry(inits[k], carried[k], updates[k], out))
    trips = _count_trips(reading, bound, inits, carried, updates)
    reading.loops[loop_id] = Loop(
        loop_id, number, parent, trips or 1, trips is not None, tuple(carries), start, stop, len(inits)
    )


def _read_condition(reading: UseReading, block: Any) -> tuple[int, int] | None:
    """Return (the counter's tensor in the condition, limit) of a condition `counter < limit`; None for any other."""
    bound = None
    for handle in block.operations:
        op = handle.operation
        reading.number += 1
        kind = op.name.rpartition(".")[2]
        if kind == "constant":
            tensor = reading.new_tensor(op.results[0], -1, -1, (reading.number, 0))
            reading.free.add(tensor)
            reading.note_constant(op, tensor)
        elif kind == "compare" and "LT" in str(op.attributes["comparison_direction"]):
            left, right = (reading.ids.get(value) for value in op.operands)
            if left is not None and right in reading.constants:
                bound = (left, reading.constants[right])
        else:
            for value in op.results:
                reading.ids.setdefault(value, -1)
    return bound


def _count_trips(
    reading: UseReading, bound: tuple[int, int] | None, inits: list[int], carried: list[int], updates: list[int]
) -> int | None:
    """Return the number of trips of a loop with a constant start, step and limit; None for any other loop."""
    if bound is None or bound[0] not in inits:
        return None
    # Several carries may start from one shared zero: the counter is the carry whose update adds a constant.
    for k, init in enumerate(inits):
        if init != bound[0] or init not in reading.constants:
            continue
        producer = reading.tensors[updates[k]].producer
        if producer < 0 or reading.ops[producer].kind != "add":
            continue
        terms = reading.ops[producer].operands
        step = next((reading.constants[t] for t in terms if t in reading.constants), None)
        if carried[k] in terms and step:
            return max(0, -(-(bound[1] - reading.constants[init]) // step))
    return None
