"""Cutting a module's last results off, and handing it to XLA."""

import importlib
from typing import Any

from autoshard.mlir._module import main_block, main_function, to_bytes
from autoshard.mlir._number import number_ops


def cut_results(module: Any, keep: int) -> list[tuple[int, int]]:
    """Drop all but the first `keep` results of `@main` (in place); where each dropped value is made.

    A place is `(op, result)` in the numbers of `number_ops`, and `(-1, i)` for argument `i`. Call `inline_calls`
    first: what made a dropped value stays, so no number changes.
    """
    from jaxlib.mlir import ir

    numbers = {op: number for number, op in enumerate(number_ops(module))}
    block = main_block(module)
    end = list(block.operations)[-1].operation
    dropped = [_place(value, numbers) for value in list(end.operands)[keep:]]
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
    return dropped


def _place(value: Any, numbers: dict[Any, int]) -> tuple[int, int]:
    from jaxlib.mlir import ir

    if isinstance(value.owner, ir.Block):
        return -1, ir.BlockArgument(value).arg_number
    return numbers[value.owner.operation], ir.OpResult(value).result_number


def to_hlo_proto(module: Any) -> bytes:
    """The module as a serialised HLO module, whose root is a tuple of `@main`'s results."""
    convert = importlib.import_module("jaxlib._jax").mlir.mlir_module_to_xla_computation
    return convert(to_bytes(module), use_tuple_args=False, return_tuple=True).as_serialized_hlo_module_proto()
