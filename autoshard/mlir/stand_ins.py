"""Arguments that stand for larger ones: what is spread out of them becomes what is given."""

from collections.abc import Mapping
from typing import Any

from autoshard.mlir.module import main_block, main_function
from autoshard.mlir.sharding_constraints import sharding_calls


_SPREAD = ("stablehlo.reshape", "stablehlo.broadcast_in_dim")


def give_whole(module: Any, shapes: Mapping[int, tuple[int, ...]]) -> None:
    """Let arguments of `@main` have the given shapes, instead of being spread to them inside (in place).

    `shapes` are by argument number. What is replaced are the custom calls to `Sharding` that take what reshapes and
    broadcasts make of the argument, and give the wanted shape. Raises `ValueError` where an argument has none.
    """
    from jaxlib.mlir import ir

    block = main_block(module)
    calls = {op.operation for op, _ in sharding_calls(module)}
    with module.context, main_function(module).operation.location:
        for number, shape in shapes.items():
            argument = block.arguments[number]
            ends, dead = _ends(argument, calls)
            wanted = ir.RankedTensorType.get(list(shape), ir.RankedTensorType(argument.type).element_type)
            if not ends or any(op.results[0].type != wanted for op in ends):
                raise ValueError(f"argument {number} is not spread to {list(shape)}")
            argument.set_type(wanted)
            for op in ends:
                op.results[0].replace_all_uses_with(argument)
                op.erase()
            for op in reversed(dead):
                if not any(True for _ in op.results[0].uses):
                    op.erase()
        function = main_function(module).operation
        kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
        inputs = [argument.type for argument in block.arguments]
        function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, kind.results))


def _ends(argument: Any, calls: set[Any]) -> tuple[list[Any], list[Any]]:
    """Custom calls that an argument reaches through what only spreads it, and the ops on the way, users last."""
    ends: list[Any] = []
    between: list[Any] = []
    values = [argument]
    while values:
        for use in list(values.pop().uses):
            op = use.owner.operation
            if op in calls:
                ends.append(op)
            elif op.name in _SPREAD and op not in between:
                between.append(op)
                values.append(op.results[0])
    return ends, between
