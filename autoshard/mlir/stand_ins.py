"""Arguments that represent larger ones: the broadcast of such an argument is replaced by an argument of full shape."""

from collections.abc import Mapping
from typing import Any

from autoshard.mlir.module import main_block, main_function
from autoshard.mlir.sharding_constraints import sharding_calls


_SPREAD = ("stablehlo.reshape", "stablehlo.broadcast_in_dim")


def give_whole(module: Any, shapes: Mapping[int, tuple[int, ...]]) -> None:
    """Give arguments of `@main` these shapes, by argument number, in place of a broadcast inside (in place).

    The argument replaces each custom call to `Sharding` on its reshapes and broadcasts. Reshapes and broadcasts that
    are then unused are erased, and the function type is updated. Raises `ValueError` if an argument has no such call,
    or if any of its calls has another shape than the wanted one.
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
    """Return the custom calls of `calls` that an argument reaches through reshapes and broadcasts, and these reshapes
    and broadcasts.

    The second list has each op before its users. A call on the argument itself counts; any other op ends the search.
    """
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
