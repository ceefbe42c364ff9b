"""Shardy's propagation, and the reshards that it requires."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.mlir.annotations import CONSTRAINT, SpecLike, axes_of, read_shardings, set_shardings
from autoshard.mlir.inline import inline_calls
from autoshard.mlir.module import (
    argument_entries,
    code_line,
    collect,
    location_name,
    main_function,
    maker_of,
    parse_module,
)
from autoshard.mlir.numbering import number_ops
from autoshard.mlir.stated_shardings import manual_axes


_REGION = "sdy.manual_computation"
_NUMBER = "autoshard.number"
"""Attribute with an op's number, which passes that add and remove ops do not change."""

Dims = tuple[tuple[str, ...], ...]
"""Mesh axes that split each dim."""


def run_propagation(module: Any) -> Any:
    """Run Shardy's whole propagation pipeline on the module (in place), and return the module.

    Ops have `sdy.sharding` afterwards, except those for which Shardy finds no split. Shardy may add and remove ops.
    Broadcasts and loops get the form in which XLA propagates them.
    """
    from jaxlib.mlir import passmanager

    with module.context:
        _lower_broadcasts(module)
        for loop in collect(main_function(module).operation, {"stablehlo.while"}):
            _capture_unchanged(loop)
        _open_captured(module)
        passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(module.operation)
    return module


def _lower_broadcasts(module: Any) -> None:
    """Replace broadcasts that only add dims of one by reshapes, as XLA's HLO has them (in place).

    A reshape keeps the broadcast's attributes and location.
    """
    from jaxlib.mlir import ir

    # Shardy propagates through a reshape both ways at once, yet forward through a broadcast only after all else. The
    # form thus decides which of two conflicting splits wins, such as that of token ids or of what a lookup's rows meet.
    for op in collect(main_function(module).operation, {"stablehlo.broadcast_in_dim"}):
        shapes = [list(ir.RankedTensorType(value.type).shape) for value in (op.operands[0], op.results[0])]
        dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
        if not dims or math.prod(shapes[0]) != math.prod(shapes[1]) or dims != sorted(dims):
            continue
        named = [op.attributes[i] for i in range(len(op.attributes))]
        attributes = {each.name: each.attr for each in named if each.name != "broadcast_dimensions"}
        with op.location, ir.InsertionPoint(op):
            reshape = ir.Operation.create("stablehlo.reshape", [op.results[0].type], [op.operands[0]], attributes)
        op.results[0].replace_all_uses_with(reshape.results[0])
        op.erase()


def _capture_unchanged(loop: Any) -> None:
    """Let a loop capture the values that it carries and returns as they are, as XLA's import of HLO does (in place).

    The loop still carries them, but its regions and the ops after it use the value before the loop.
    """
    bodies = [region.blocks[0] for region in loop.regions]
    last = bodies[1].operations[len(bodies[1].operations) - 1]
    for number, argument in enumerate(bodies[1].arguments):
        if last.operands[number] == argument:
            for value in (*(body.arguments[number] for body in bodies), loop.results[number]):
                value.replace_all_uses_with(loop.operands[number])


def _open_captured(module: Any) -> None:
    """Let Shardy split values with given shardings further inside of loops that capture them (in place).

    XLA puts the same constraint, with open dims, before each outermost loop that captures such a value.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    main = main_function(module).operation
    entries = argument_entries(main, "arg_attrs")
    arguments = zip(main.regions[0].blocks[0].arguments, entries, strict=False)
    given = [(value, entry["sdy.sharding"]) for value, entry in arguments if "sdy.sharding" in entry]
    given += [(op.results[0], op.attributes["sharding"]) for op in collect(main, {CONSTRAINT})]
    for value, attribute in given:
        sharding, opened = sdy.TensorShardingAttr(attribute), dict[Any, Any]()
        for use in list(value.uses):
            loop = _outermost_capture(value, use.owner)
            if loop is not None and loop not in opened:
                dims = [sdy.DimensionShardingAttr.get([], is_closed=False) for _ in sharding.dimension_shardings]
                free = sdy.TensorShardingAttr.get(sharding.mesh_or_ref, dims)
                with ir.InsertionPoint(loop), loop.location:
                    opened[loop] = sdy.ShardingConstraintOp(value, free).operation.results[0]
            if loop is not None:
                use.owner.operands[use.operand_number] = opened[loop]


def _outermost_capture(value: Any, user: Any) -> Any | None:
    """Return the outermost loop around `user` that does not contain the value's definition; None without one."""
    maker, loop = maker_of(value), None
    home = maker.parent if maker is not None else value.owner.owner
    while (parent := user.parent) is not None and parent.operation != home.operation:
        user = parent.operation
        loop = user if user.name == "stablehlo.while" else loop
    return loop


def propagated_specs(
    module: bytes, sizes: Mapping[str, int], arguments: Sequence[SpecLike | None], results: Sequence[SpecLike | None]
) -> dict[tuple[int, int], Dims | None]:
    """Propagate specs of arguments and results through a module with Shardy; None leaves a spec open.

    - `module`: lowered module. It is parsed, and its calls are inlined.
    - `sizes`: mesh axes with their sizes.
    - `arguments`, `results`: specs that replace the module's own shardings; its constraints are not removed.

    Return the axes of every dim by (number of the op, number of the result), and by `(-1, i)` for argument `i`. The
    axes are None if Shardy gives the value no sharding, thus no split. The `k`-th value that a loop carries is also
    under (number of the loop, number of its results + k). Values whose op the passes replaced are missing.
    """
    from jaxlib.mlir import ir

    parsed = inline_calls(parse_module(module))
    set_shardings(parsed, "mesh", sizes, arguments, results)
    with parsed.context:
        integer = ir.IntegerType.get_signless(64)
        for number, op in enumerate(number_ops(parsed)):
            op.attributes[_NUMBER] = ir.IntegerAttr.get(integer, number)
    run_propagation(parsed)
    given = _argument_specs(parsed)
    specs: dict[tuple[int, int], Dims | None] = {(-1, i): dims for i, dims in enumerate(given)}
    for op in number_ops(parsed):
        if _NUMBER not in op.attributes:
            continue
        number, width = ir.IntegerAttr(op.attributes[_NUMBER]).value, len(op.results)
        for index, dims in enumerate(read_shardings(op)):
            if op.name == "stablehlo.while":
                last = op.regions[1].blocks[0].operations
                if last[len(last) - 1].operands[index] == op.operands[index]:  # the loop leaves it unchanged
                    dims = _spec_of(op.operands[index], given)
                specs[(number, width + index)] = dims
            specs[(number, index)] = dims
    return specs


def explicit_reshards(module: Any) -> list[dict[str, Any]]:
    """List the reshards that Shardy inserts into an inlined module with shardings and pins: one record for each.

    Runs propagation and inserts reshards (in place). A record has the `shape` of the value and the specs `before` and
    `after`; constraints and reshards that change no spec are left out. Its `names` are JAX name stacks of the reshard,
    the producer and the users, sorted; `line` is file:line of one of them, or empty.
    """
    from jaxlib.mlir import ir, passmanager

    run_propagation(module)
    with module.context:
        # Without the option the pass leaves all but a few kinds of ops to the partitioner.
        passmanager.PassManager.parse(
            "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))"
        ).run(module.operation)
    arguments = _argument_specs(module)
    reshards = []
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
        lines = [code_line(each) for each in named]
        reshards.append(
            {
                "names": sorted({name for name in names if name}),
                "line": next((line for line in lines if line), ""),
                "shape": tuple(ir.RankedTensorType(value.type).shape),
                "before": before,
                "after": after,
            }
        )
    return reshards


def explicit_sums(module: Any) -> list[dict[str, Any]]:
    """List the all-reduces in a module that `explicit_reshards` has changed: the same records, with `summed` axes.

    `before` and `after` are both the spec of the value. Before the sum each device along `summed` has a partial value.
    The module does not change.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    sums = []
    for op in number_ops(module):
        if op.name != "sdy.all_reduce":
            continue
        value = op.operands[0]
        users = [use.owner for use in op.results[0].uses]
        named = [*([value.owner] if isinstance(value.owner, ir.Operation) else []), op, *users]
        names = [location_name(each.location) for each in named]
        spec = axes_of(sdy.TensorShardingAttr(op.attributes["out_sharding"]))
        sums.append(
            {
                "names": sorted({name for name in names if name}),
                "line": next((line for line in map(code_line, named) if line), ""),
                "shape": tuple(ir.RankedTensorType(value.type).shape),
                "before": spec,
                "after": spec,
                "summed": _axis_names(op.attributes["reduction_axes"]),
            }
        )
    return sums


def _axis_names(axes: Any) -> tuple[str, ...]:
    """Return the names of the axes of an `sdy.axis_ref_list`.

    It has no binding, and is parsed again as the sharding of a dim.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    listed = str(axes).partition("{")[2].rpartition("}")[0]
    sharding = ir.Attribute.parse(f"#sdy.sharding<@mesh, [{{{listed}}}]>", axes.context)
    (names,) = axes_of(sdy.TensorShardingAttr(sharding))
    return names


def _reshard_spec(op: Any) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes per dim that a reshard or constraint gives its operand."""
    from jaxlib.mlir.dialects import sdy

    return axes_of(sdy.TensorShardingAttr(op.attributes["sharding"]))


def _argument_specs(module: Any) -> list[tuple[tuple[str, ...], ...] | None]:
    """Return the spec of every argument of `@main`, None if it has none; an empty list if no argument has
    attributes.
    """
    from jaxlib.mlir.dialects import sdy

    entries = argument_entries(main_function(module).operation, "arg_attrs")
    return [
        axes_of(sdy.TensorShardingAttr(entry["sdy.sharding"])) if "sdy.sharding" in entry else None for entry in entries
    ]


def _spec_of(value: Any, arguments: list[Any]) -> tuple[tuple[str, ...], ...] | None:
    """Return the mesh axes per dim of any value after propagation; None if it has no sharding, thus no split.

    `arguments` are the specs of `@main`'s arguments. A manual computation's arguments are split inside of it by the
    axes that are not split by hand.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    owner = value.owner
    if isinstance(owner, ir.Block):
        number = ir.BlockArgument(value).arg_number
        parent = owner.owner.operation
        if parent.name == "func.func":
            return arguments[number] if number < len(arguments) else None
        if parent.name == _REGION:
            by_hand = manual_axes(parent)
            whole = _region_spec(parent, "in_shardings", number)
            return tuple(tuple(axis for axis in axes if axis not in by_hand) for axes in whole)
        shardings = read_shardings(parent)
        return shardings[number] if number < len(shardings) else None
    operation = owner.operation
    if operation.name == _REGION:
        return _region_spec(operation, "out_shardings", ir.OpResult(value).result_number)
    if operation.name in ("sdy.reshard", CONSTRAINT):
        return _reshard_spec(operation)
    if "out_sharding" in operation.attributes:  # Shardy's own collectives
        return axes_of(sdy.TensorShardingAttr(operation.attributes["out_sharding"]))
    return read_shardings(operation)[ir.OpResult(value).result_number]


def _region_spec(region: Any, side: str, number: int) -> Dims:
    """Return the mesh axes per dim of a whole operand or result of a manual computation.

    `side` is `in_shardings` for the operand `number`, `out_shardings` for the result.
    """
    from jaxlib.mlir.dialects import sdy

    return axes_of(sdy.TensorShardingAttr(sdy.TensorShardingPerValueAttr(region.attributes[side]).shardings[number]))
