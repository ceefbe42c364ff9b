"""Sharding constraints of a module, as ops of Shardy and as custom calls of GSPMD."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.mlir.annotations import CONSTRAINT, axes_of, ensure_mesh, sharding_attribute
from autoshard.mlir.module import argument_entries, collect, main_function, mesh_ops, target_name
from autoshard.mlir.numbering import strip
from autoshard.mlir.stated_shardings import argument_shardings, is_idle, mesh_of, meshes_of


_NAMES = frozenset({"sdy.sharding_constraint", "sdy.reshard"})
_CALL = "stablehlo.custom_call"
_REGION = "sdy.manual_computation"


def drop_idle_constraints(module: Any) -> Any:
    """Remove constraints on a mesh of one device (in place), which split nothing; return the module.

    A program that is traced for one device names all its axes and splits nothing. JAX also adds such a constraint, on a
    mesh without axes, where it converts arrays of PRNG keys to words and back. Custom calls to `Sharding` name no mesh
    and stay, as does everything in a module that defines no mesh.
    """
    meshes = meshes_of(module)
    if not meshes:
        return module
    return _drop(module, [op for op in _constraints(module) if is_idle(_stated(op), meshes)])


def drop_constraints(module: Any) -> Any:
    """Remove all constraints, and the shardings of arguments and results of `@main` (in place); return the module.

    Constraints are `sdy.sharding_constraint`, `sdy.reshard` and custom calls to `Sharding`. Manual regions and meshes
    stay.
    """
    from jaxlib.mlir import ir

    function = main_function(module).operation
    with module.context:
        for key in ("arg_attrs", "res_attrs"):
            entries = argument_entries(function, key)
            for entry in entries:
                for name in ("sdy.sharding", "mhlo.sharding"):
                    entry.pop(name, None)
            if entries:
                function.attributes[key] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in entries])
    return _drop(module, _constraints(module))


@dataclasses.dataclass(frozen=True, slots=True)
class ConstraintCounts:
    """Counts of the shardings that a module states itself."""

    constraints: int
    """Constraints of the program, except those on a mesh of one device; custom calls to `Sharding` count."""
    arguments: int
    """Arguments of the program with an `sdy.sharding`, except those on a mesh of one device."""
    regions: int
    """Manual regions of the program (`shard_map`), nested ones included."""
    idle: int
    """Constraints and arguments on a mesh of one device, which the other counts exclude. JAX's own constraints on a
    mesh without axes, for PRNG keys, are not counted.
    """


def count_constraints(module: Any) -> ConstraintCounts:
    """Count the shardings that a module states; custom calls to `Sharding` count as constraints."""
    meshes = meshes_of(module)
    ops = collect(module.operation, {*_NAMES, _CALL, _REGION})
    constraints = [_stated(op) for op in ops if _constrains(op)]
    arguments = list(argument_shardings(module).values())
    idle = [each for each in (*constraints, *arguments) if is_idle(each, meshes)]
    return ConstraintCounts(
        sum(not is_idle(each, meshes) for each in constraints),
        sum(not is_idle(each, meshes) for each in arguments),
        sum(op.name == _REGION for op in ops),
        sum(bool(mesh_of(each, meshes)) for each in idle),
    )


def _constraints(module: Any) -> list[Any]:
    """Return the ops of the module that constrain a value, in pre-order."""
    return [op for op in collect(module.operation, {*_NAMES, _CALL}) if _constrains(op)]


def _constrains(op: Any) -> bool:
    """Return True for `sdy.sharding_constraint`, `sdy.reshard`, and a custom call to `Sharding`."""
    return op.name in _NAMES or (op.name == _CALL and target_name(op) == "Sharding")


def _stated(op: Any) -> Any | None:
    """Return the sharding attribute of a constraint (`sdy.sharding` or GSPMD's string); None for one without."""
    name = "mhlo.sharding" if op.name == _CALL else "sharding"
    return op.attributes[name] if name in op.attributes else None


def _drop(module: Any, ops: list[Any]) -> Any:
    """Remove constraints after users of their results read the operands instead (in place); return the module."""
    for op in ops:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()
    return module


def custom_call_pins(module: Any, write: Callable[[Sequence[Sequence[str]]], str]) -> int:
    """Replace every `sdy.sharding_constraint` by a custom call to `Sharding`, and erase meshes (in place); return the
    number of replaced constraints.

    `write` returns the HLO sharding string for the mesh axes of each dim. Compilers that partition with GSPMD read
    these calls. Other attributes that name a mesh stay.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    constraints = collect(module.operation, {CONSTRAINT})
    with module.context:
        for op in constraints:
            value = op.operands[0]
            attributes: dict[str, Any] = {
                "call_target_name": ir.StringAttr.get("Sharding"),
                "mhlo.sharding": ir.StringAttr.get(write(axes_of(sdy.TensorShardingAttr(op.attributes["sharding"])))),
            }
            with op.location:
                call = ir.Operation.create(
                    "stablehlo.custom_call",
                    results=[value.type],
                    operands=[value],
                    attributes=attributes,
                    ip=ir.InsertionPoint(op),
                )
            op.results[0].replace_all_uses_with(call.results[0])
            op.erase()
        for mesh in mesh_ops(module).values():
            mesh.erase()
    return len(constraints)


def constrain_custom_calls(
    module: Any,
    mesh_name: str,
    sizes: Mapping[str, int],
    read: Callable[[str, tuple[int, ...]], Sequence[Sequence[str]] | None],
) -> int:
    """Strip a module (see `strip`), and convert its custom calls to `Sharding` to Shardy constraints (in place).

    - `mesh_name`: name for the mesh if the module has none with these axes.
    - `sizes`: mesh axes with their sizes, major first.
    - `read`: returns the mesh axes of each dim for an HLO sharding string and the value's shape, or None to drop the
      constraint.

    Returns the number of calls that were dropped, because `read` returned None. Their users read the operand directly.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    calls = sharding_calls(module)
    strip(module)
    dropped = 0
    for op, text in calls:
        value = op.operands[0]
        dims = read(text, tuple(ir.RankedTensorType(value.type).shape))
        if dims is None:
            dropped += 1
        else:
            name = ensure_mesh(module, mesh_name, sizes)
            with module.context, ir.InsertionPoint(op), op.location:
                value = sdy.ShardingConstraintOp(value, sharding_attribute(name, dims)).operation.results[0]
        op.results[0].replace_all_uses_with(value)
        op.erase()
    return dropped


def sharding_calls(module: Any) -> list[tuple[Any, str]]:
    """Return the custom calls to `Sharding` that have a sharding, each with its HLO sharding string, in pre-order."""
    from jaxlib.mlir import ir

    return [
        (op, ir.StringAttr(op.attributes["mhlo.sharding"]).value)
        for op in collect(module.operation, {"stablehlo.custom_call"})
        if target_name(op) == "Sharding" and "mhlo.sharding" in op.attributes
    ]
