"""Removal of a module's last results, and conversion of the module to an HLO proto."""

import importlib
from typing import Any

from autoshard.mlir.module import main_block, main_function, to_bytes
from autoshard.mlir.numbering import number_ops


def cut_results(module: Any, keep: int) -> list[tuple[int, int] | None]:
    """Drop all but the first `keep` results of `@main` (in place), and ops that only they need.

    Return the place that computes each dropped value: `(op, result)` in the numbers of `number_ops` after the cut,
    `(-1, i)` for argument `i`. The place is None for a value that is no longer computed. Call `inline_calls` first.
    """
    from jaxlib.mlir import ir

    block = main_block(module)
    end = list(block.operations)[-1].operation
    dropped = list(end.operands)[keep:]
    retained = list(end.operands)[:keep]
    function = main_function(module).operation
    with module.context, end.location:
        new = ir.Operation.create(end.name, operands=retained, ip=ir.InsertionPoint(end))
        end.erase()
        inputs = [argument.type for argument in block.arguments]
        kind = ir.FunctionType.get(inputs, [value.type for value in new.operands])
        function.attributes["function_type"] = ir.TypeAttr.get(kind)
        if "res_attrs" in function.attributes:
            entries = list(ir.ArrayAttr(function.attributes["res_attrs"]))[:keep]
            function.attributes["res_attrs"] = ir.ArrayAttr.get(entries)
    unused = _unused(block)
    dropped = [None if value.owner in unused else value for value in dropped]
    for op in reversed(list(unused)):
        op.erase()
    # Number the ops after erasing: an erased op also removes the ops of its regions, which have numbers too.
    numbers = {op: number for number, op in enumerate(number_ops(module))}
    return [None if value is None else place_of(value, numbers) for value in dropped]


def _unused(block: Any) -> dict[Any, None]:
    """Return the ops of a block whose results are unused or only used by such ops, in the block's order.

    Custom calls and ops without results are never among them.
    """
    unused: set[Any] = set()
    ops = [view.operation for view in block.operations]
    for op in reversed(ops):
        users = (use.owner.operation for result in op.results for use in result.uses)
        if op.results and op.name != "stablehlo.custom_call" and all(user in unused for user in users):
            unused.add(op)
    return {op: None for op in ops if op in unused}


def is_idle_call(op: Any) -> bool:
    """Return True for a custom call without side effects that has results, all unused: compilers remove it."""
    if op.name != "stablehlo.custom_call" or any(True for result in op.results for _ in result.uses):
        return False
    return len(op.results) > 0 and not ("has_side_effect" in op.attributes and op.attributes["has_side_effect"].value)


def place_of(value: Any, numbers: dict[Any, int]) -> tuple[int, int] | None:
    """Return the op number and result number of a value, by the ops' `numbers`; `(-1, i)` for a function's argument
    `i`.

    None for a region's argument, and for ops without a number.
    """
    from jaxlib.mlir import ir

    if isinstance(value.owner, ir.Block):
        of_function = value.owner.owner.operation.name == "func.func"
        return (-1, ir.BlockArgument(value).arg_number) if of_function else None
    number = numbers.get(value.owner.operation)
    return None if number is None else (number, ir.OpResult(value).result_number)


def to_hlo_proto(module: Any) -> bytes:
    """Serialise the module as an HLO module whose root is a tuple of `@main`'s results.

    Equal modules give equal bytes: the number by which XLA counts a process's modules is removed.
    """
    convert = importlib.import_module("jaxlib._jax").mlir.mlir_module_to_xla_computation
    proto = convert(to_bytes(module), use_tuple_args=False, return_tuple=True).as_serialized_hlo_module_proto()
    return _without_field(proto, _MODULE_NUMBER)


_MODULE_NUMBER = 5
"""Number of the field `id` of `HloModuleProto`, in xla/service/hlo.proto."""


def _without_field(message: bytes, number: int) -> bytes:
    """Return a message in protobuf's wire format without one of its top-level fields."""
    fields, place = [], 0
    while place < len(message):
        began = place
        tag, place = _varint(message, place)
        # Wire types: 2 has a length, 0 is a varint, 1 has eight bytes, 5 has four.
        if tag & 7 == 2:
            size, place = _varint(message, place)
            place += size
        elif tag & 7 == 0:
            _, place = _varint(message, place)
        else:
            place += 8 if tag & 7 == 1 else 4
        if tag >> 3 != number:
            fields.append(message[began:place])
    return b"".join(fields)


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Read the varint at a place of the message; return its value and the place after it."""
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
