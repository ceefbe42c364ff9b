"""Specs that a program requests: constraints on values, and regions that it splits by hand (`shard_map`)."""

import dataclasses
from typing import Any

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.graph.extraction.graph_builder import GraphBuilder, ReadBlock
from autoshard.graph.extraction.opaque_rules import IN, OUT, end_rule, same_rule
from autoshard.graph.records import Constraint, Manual


CONSTRAINTS = frozenset({"sharding_constraint", "reshard"})
"""Kinds of ops that constrain a value's spec."""


def read_constraint(builder: GraphBuilder, op: Any, loop: int) -> None:
    """Add a new tensor for a constrained value, so that the value may have another spec before the constraint.

    Three kinds of constraints only alias their operand:

    - open ones, and those on scalars;
    - those on generated values;
    - those on an argument without other uses, which then apply to the argument.

    `loop` is the loop around the op; -1 for none.
    """
    source = builder.ids[op.operands[0]]
    if "sharding" in op.attributes:
        sharding = mlir.stated_sharding(op.attributes["sharding"], builder.meshes)
    else:
        sharding = mlir.tiled_sharding(op, len(builder.tensors[source].shape))
    if sharding.is_free or not sharding.dims or source in builder.free:
        return builder.alias(op)
    where = _place("with_sharding_constraint", op)
    if builder.tensors[source].value[0] == -1 and len(list(op.operands[0].uses)) == 1:
        builder.alias(op)
        builder.constraints.append(Constraint(source, sharding, where))
        return None
    shape = builder.tensors[source].shape
    builder.append_pass_through(
        op, "sharding_constraint", source, op.results[0], (builder.number, 0), loop, same_rule([shape], [shape])
    )
    builder.constraints.append(Constraint(builder.ids[op.results[0]], sharding, where))
    return None


def read_manual(builder: GraphBuilder, op: Any, loop: int, read_block: ReadBlock) -> None:
    """Read a `shard_map` in a loop (-1 for none): an op for each value that enters or leaves, and the ops of the body.

    The region is added to `builder.regions`, and its axes are manual for tensors and ops inside.
    """
    number, outer = builder.number, builder.manual
    sides = [mlir.shardings_of_values(op.attributes[f"{side}_shardings"], builder.meshes) for side in ("in", "out")]
    axes = mlir.manual_axes(op)
    both = tuple(dict.fromkeys((*outer, *axes)))
    mesh = next((s.mesh for side in sides for s in side), ())
    builder.regions.append(Manual(number, axes, mesh, _place("shard_map", op)))
    body = op.regions[0].blocks[0]
    builder.manual = both
    for k, (value, argument, sharding) in enumerate(zip(op.operands, body.arguments, sides[0], strict=True)):
        _read_end(builder, op, IN, builder.ids[value], argument, (number, len(op.results) + k), loop, k, sharding, axes)
    returned = read_block(body, loop)
    builder.manual = outer
    for r, (source, result, sharding) in enumerate(zip(returned, op.results, sides[1], strict=True)):
        _read_end(builder, op, OUT, source, result, (number, r), loop, r, sharding, axes)


def _read_end(
    builder: GraphBuilder,
    op: Any,
    kind: str,
    source: int,
    value: Any,
    where: tuple[int, int],
    loop: int,
    position: int,
    sharding: mlir.Sharding,
    axes: tuple[str, ...],
) -> None:
    """Append the op of one value that enters (`IN`) or leaves (`OUT`) a region; a scalar that is not generated is an
    alias.

    - `source`, `value`: tensor before this end, MLIR value after it.
    - `where`: (op number, position) that becomes `Tensor.value`.
    - `position`: index of the value among the region's operands or results.
    - `sharding`: the value's sharding outside of the region.
    - `axes`: axes that the region splits by hand; only they split the value here.
    """
    shape, _, _ = mlir.tensor_type(value.type)
    mine = builder.tensors[source].shape
    if not shape and source not in builder.free:
        builder.ids[value] = source
        return
    own = dataclasses.replace(sharding, dims=tuple(tuple(a for a in dim if a.name in axes) for dim in sharding.dims))
    rule, fixed = end_rule(*((mine, shape) if kind == IN else (shape, mine)), own, kind)
    manual = tuple(dict.fromkeys((*builder.manual, *axes)))
    builder.append_pass_through(op, kind, source, value, where, loop, rule, position, fixed, manual)


def called(op: Any, kind: str) -> str:
    """Return the target of a custom call, or an empty text for other ops; `kind` is the op's name without its dialect.

    Raises `UserError` for manual regions in GSPMD's form.
    """
    if kind != "custom_call":
        return ""
    target = mlir.target_name(op)
    if target in ("SPMDFullToShardShape", "SPMDShardToFullShape"):
        raise UserError(
            f"the program has a region split by hand in GSPMD's form ({target}), whose axes have no names: export it "
            "with Shardy (jax_use_shardy_partitioner), or before it is split."
        )
    return target


def _place(what: str, op: Any) -> str:
    """Return a spec's origin for display: `what` and the op's source line if known, otherwise its name."""
    name, line = mlir.location_name(op.location), mlir.code_line(op).replace("line:", "line ", 1)
    return f"{what} at {line}" if line else f"{what} {name}".strip()
