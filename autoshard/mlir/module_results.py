"""Cutting a module's last results off, and handing it to XLA."""

import importlib
from typing import Any

from autoshard.mlir.module import main_block, main_function, to_bytes
from autoshard.mlir.numbering import number_ops


def cut_results(module: Any, keep: int) -> list[tuple[int, int] | None]:
    """Drop all but the first `keep` results of `@main` (in place), and ops that only they need.

    Returns where each dropped value is made: `(op, result)` in the numbers of `number_ops`, `(-1, i)` for argument `i`,
    and None for what is not made any more. Call `inline_calls` first.
    """
    from jaxlib.mlir import ir

    block = main_block(module)
    end = list(block.operations)[-1].operation
    dropped = list(end.operands)[keep:]
    kept = list(end.operands)[:keep]
    function = main_function(module).operation
    with module.context, end.location:
        new = ir.Operation.create(end.name, operands=kept, ip=ir.InsertionPoint(end))
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
    # Only now: an op that is erased takes along those of its regions, which have numbers too.
    numbers = {op: number for number, op in enumerate(number_ops(module))}
    return [None if value is None else place_of(value, numbers) for value in dropped]


def _unused(block: Any) -> dict[Any, None]:
    """Ops whose results nobody uses, and those that only such ops use, in the block's order."""
    found: set[Any] = set()
    ops = [view.operation for view in block.operations]
    for op in reversed(ops):
        users = (use.owner.operation for result in op.results for use in result.uses)
        if op.results and op.name != "stablehlo.custom_call" and all(user in found for user in users):
            found.add(op)
    return {op: None for op in ops if op in found}


def is_idle_call(op: Any) -> bool:
    """Whether it is a custom call that does nothing but give values, and nobody uses any: compilers leave it out."""
    if op.name != "stablehlo.custom_call" or any(True for result in op.results for _ in result.uses):
        return False
    effect = str(op.attributes["has_side_effect"]) if "has_side_effect" in op.attributes else "false"
    return len(op.results) > 0 and effect == "false"


def place_of(value: Any, numbers: dict[Any, int]) -> tuple[int, int] | None:
    """Where a value is made, by the numbers of ops; None for what a region is given, and for ops without a number."""
    from jaxlib.mlir import ir

    if isinstance(value.owner, ir.Block):
        whole = value.owner.owner.operation.name == "func.func"
        return (-1, ir.BlockArgument(value).arg_number) if whole else None
    number = numbers.get(value.owner.operation)
    return None if number is None else (number, ir.OpResult(value).result_number)


def to_hlo_proto(module: Any) -> bytes:
    """The module as a serialised HLO module, whose root is a tuple of `@main`'s results.

    Equal modules give equal bytes: the number that XLA counts the modules of a process with is left out.
    """
    convert = importlib.import_module("jaxlib._jax").mlir.mlir_module_to_xla_computation
    made = convert(to_bytes(module), use_tuple_args=False, return_tuple=True).as_serialized_hlo_module_proto()
    return _without_field(made, _MODULE_NUMBER)


_MODULE_NUMBER = 5
"""The field `id` of `HloModuleProto`, in xla/service/hlo.proto."""


def _without_field(message: bytes, number: int) -> bytes:
    """A message in protobuf's wire format without one of its fields."""
    kept, place = [], 0
    while place < len(message):
        began = place
        tag, place = _varint(message, place)
        if tag & 7 == 2:
            size, place = _varint(message, place)
            place += size
        elif tag & 7 == 0:
            _, place = _varint(message, place)
        else:
            place += 8 if tag & 7 == 1 else 4
        if tag >> 3 != number:
            kept.append(message[began:place])
    return b"".join(kept)


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
