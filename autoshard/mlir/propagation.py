"""Shardy's propagation, and the reshards it finds necessary."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.mlir.annotations import CONSTRAINT, SpecLike, axes_of, read_shardings, set_shardings
from autoshard.mlir.inline import inline_calls
from autoshard.mlir.module import argument_entries, location_name, main_function, parse_module, source_line
from autoshard.mlir.numbering import number_ops


_NUMBER = "autoshard.number"
"""Attribute that keeps an op's number while passes add and remove others."""

Dims = tuple[tuple[str, ...], ...]


def run_propagation(module: Any) -> Any:
    """Run Shardy's whole propagation pipeline over the module (in place): every op gets `sdy.sharding`."""
    from jaxlib.mlir import passmanager

    with module.context:
        passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(module.operation)
    return module


def propagated_specs(
    module: bytes, sizes: Mapping[str, int], arguments: Sequence[SpecLike | None], results: Sequence[SpecLike | None]
) -> dict[tuple[int, int], Dims | None]:
    """What Shardy's propagation makes of specs of arguments and results alone; None leaves one open.

    The axes of every dim by (number of the op, result), `(-1, i)` for argument `i`, None where nothing splits it; the
    `k`-th value that a loop carries also under (number of the loop, number of its results + k). A value whose op the
    passes replaced by another is missing.
    """
    from jaxlib.mlir import ir

    parsed = inline_calls(parse_module(module))
    set_shardings(parsed, "mesh", sizes, arguments, results)
    with parsed.context:
        integer = ir.IntegerType.get_signless(64)
        for number, op in enumerate(number_ops(parsed)):
            op.attributes[_NUMBER] = ir.IntegerAttr.get(integer, number)
    run_propagation(parsed)
    found: dict[tuple[int, int], Dims | None] = {(-1, i): dims for i, dims in enumerate(_argument_specs(parsed))}
    for op in number_ops(parsed):
        if _NUMBER not in op.attributes:
            continue
        number, width = ir.IntegerAttr(op.attributes[_NUMBER]).value, len(op.results)
        for index, dims in enumerate(read_shardings(op)):
            found[(number, index)] = dims
            if op.name == "stablehlo.while":
                found[(number, width + index)] = dims
    return found


def explicit_reshards(module: Any) -> list[dict[str, Any]]:
    """Where Shardy must change a spec in an inlined module with shardings and pins: one record for each place.

    Runs propagation and inserts reshards (in place). A record has `names` (JAX name stacks of the ops that make and
    take the value), `line` (file:line of one of them), `shape`, and the specs `before` and `after`.
    """
    from jaxlib.mlir import ir, passmanager

    run_propagation(module)
    with module.context:
        # Without the option the pass leaves all but a few kinds of ops to the partitioner.
        passmanager.PassManager.parse(
            "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))"
        ).run(module.operation)
    arguments = _argument_specs(module)
    found = []
    for op in number_ops(module):
        if op.name not in ("sdy.reshard", CONSTRAINT):
            continue
        value = op.operands[0]
        before, after = _spec_of(value, arguments), _reshard_spec(op)
        rank = len(after)
        if before is None:
            before = ((),) * rank
        if before == after:
            continue
        users = [use.owner for use in op.results[0].uses]
        named = [op, *users, *([value.owner] if isinstance(value.owner, ir.Operation) else [])]
        names = [location_name(each.location) for each in named]
        lines = [source_line(each) for each in named]
        found.append(
            {
                "names": sorted({name for name in names if name}),
                "line": next((line for line in lines if line), ""),
                "shape": tuple(ir.RankedTensorType(value.type).shape),
                "before": before,
                "after": after,
            }
        )
    return found


def explicit_sums(module: Any) -> list[dict[str, Any]]:
    """The sums over mesh axes in a module that `explicit_reshards` has changed: the same records, with `summed` axes.

    `before` and `after` are the spec of the value; before the sum, each device along `summed` has a part of it.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    found = []
    for op in number_ops(module):
        if op.name != "sdy.all_reduce":
            continue
        value = op.operands[0]
        users = [use.owner for use in op.results[0].uses]
        named = [*([value.owner] if isinstance(value.owner, ir.Operation) else []), op, *users]
        names = [location_name(each.location) for each in named]
        spec = axes_of(sdy.TensorShardingAttr(op.attributes["out_sharding"]))
        found.append(
            {
                "names": sorted({name for name in names if name}),
                "line": next((line for line in map(source_line, named) if line), ""),
                "shape": tuple(ir.RankedTensorType(value.type).shape),
                "before": spec,
                "after": spec,
                "summed": tuple(re.findall(r'"([^"]+)"', str(op.attributes["reduction_axes"]))),
            }
        )
    return found


def _reshard_spec(op: Any) -> tuple[tuple[str, ...], ...]:
    from jaxlib.mlir.dialects import sdy

    return axes_of(sdy.TensorShardingAttr(op.attributes["sharding"]))


def _argument_specs(module: Any) -> list[tuple[tuple[str, ...], ...] | None]:
    from jaxlib.mlir.dialects import sdy

    entries = argument_entries(main_function(module).operation, "arg_attrs")
    return [
        axes_of(sdy.TensorShardingAttr(entry["sdy.sharding"])) if "sdy.sharding" in entry else None for entry in entries
    ]


def _spec_of(value: Any, arguments: list[Any]) -> tuple[tuple[str, ...], ...] | None:
    """The spec of any value after propagation; None if it is whole."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    owner = value.owner
    if isinstance(owner, ir.Block):
        number = ir.BlockArgument(value).arg_number
        parent = owner.owner.operation
        if parent.name == "func.func":
            return arguments[number] if number < len(arguments) else None
        shardings = read_shardings(parent)
        return shardings[number] if number < len(shardings) else None
    operation = owner.operation
    if operation.name in ("sdy.reshard", CONSTRAINT):
        return _reshard_spec(operation)
    if "out_sharding" in operation.attributes:  # Shardy's own collectives
        return axes_of(sdy.TensorShardingAttr(operation.attributes["out_sharding"]))
    return read_shardings(operation)[ir.OpResult(value).result_number]
