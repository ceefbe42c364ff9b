"""Meshes and shardings that a module states itself, and the devices that its own collectives span."""

import math
import re
from typing import Any

from autoshard.errors import UserError
from autoshard.mlir.module import argument_entries, collect, main_block, main_function, symbol


MESH_NAME = re.compile(r"<@[^,<>]*, \[")
"""Pattern of the beginning of a sharding's text, up to its dims."""
GROUPS_MESH = re.compile(r"<mesh = @(\w+),")
"""Pattern of the beginning of a collective's groups that span axes of a mesh, up to the axes."""
COLLECTIVES_MESH = "stablehlo.mesh"
"""Attribute of a mesh whose axes a collective spans, in addition to Shardy's own attribute."""


def mesh_texts(module: Any) -> dict[str, str]:
    """Return the text of every mesh that the module names, by its symbol."""
    meshes = [op for op in module.body.operations if op.operation.name == "sdy.mesh"]
    return {symbol(op): str(op.operation.attributes["mesh"]) for op in meshes}


def argument_shardings(module: Any) -> dict[int, str]:
    """Return the text of the sharding of every argument of `@main` that has one, by argument number."""
    entries = enumerate(argument_entries(main_function(module).operation, "arg_attrs"))
    return {position: str(entry["sdy.sharding"]) for position, entry in entries if "sdy.sharding" in entry}


def device_groups(op: Any) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices of a collective, or (source, target) pairs of a permute; without fillers of -1.

    jax 0.11 names the axes of a mesh that a collective spans, jax 0.10 the devices themselves. Raises `UserError` for
    groups over a part of an axis.
    """
    import numpy as np

    for name in ("replica_groups", "source_target_pairs"):
        if name in op.attributes:
            text = str(op.attributes[name])
            spanned = GROUPS_MESH.search(text)
            rows = np.asarray(op.attributes[name]) if spanned is None else _along_axes(op, spanned[1], text)
            return tuple(tuple(int(d) for d in row if d >= 0) for row in rows)
    return ()


_AXIS = re.compile(r'axis_ref<name = "([^"]+)"')
_SIZE = re.compile(r'"([^"]+)"=(\d+)')
"""Pattern of an axis with its size in the text of a mesh."""


def _along_axes(op: Any, mesh: str, text: str) -> Any:
    """Return the devices of each group, `[groups, devices]`: devices of a group differ along the axes in `text`
    only.
    """
    import numpy as np

    while op.parent is not None:
        op = op.parent.operation
    sizes = {name: int(size) for name, size in _SIZE.findall(mesh_texts(op.opview).get(mesh, ""))}
    axes = _AXIS.findall(text)
    if "sub_axis" in text or not set(axes) <= sizes.keys():
        raise UserError(f"the module has a collective over `{text}`; only whole axes of a mesh in it are understood.")
    names = list(sizes)
    order = sorted(range(len(names)), key=lambda number: axes.index(names[number]) if names[number] in axes else -1)
    grid = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    return grid.transpose(order).reshape(-1, math.prod(sizes[axis] for axis in axes))


PLACEMENT = "annotate_device_placement"
"""Target of the call in a module that sends a value to the host or fetches it."""

_PLACES = "mhlo.frontend_attributes"


def drop_gspmd(module: Any) -> Any:
    """Remove GSPMD's `@Sharding` custom calls from `@main` (in place), since XLA turns Shardy off if it sees one."""
    return _drop_calls(module, "Sharding")


def drop_layouts(module: Any) -> Any:
    """Remove layout constraints from `@main` (in place): off TPUs XLA's partitioner gathers their operands.

    Evidence: docs/compiler_behaviour.md, "Layout constraints and the partitioner".
    """
    return _drop_calls(module, "LayoutConstraint")


def order_hosted(module: Any) -> Any:
    """Force row-major layout on the values that `@main` sends to the host or fetches (in place).

    A backward loop fetches the stack that a forward loop sends. If their layouts are free the TPU compiler copies the
    stack between them on the device. Evidence: docs/compiler_behaviour.md, "Layout of stacks in host memory".
    """
    from jaxlib.mlir import ir

    for op in collect(main_function(module).operation, {"stablehlo.custom_call"}):
        if str(op.attributes["call_target_name"]).strip('"') != PLACEMENT:
            continue
        with module.context, op.location:
            if "host" in str(op.attributes[_PLACES]):
                with ir.InsertionPoint(op):
                    op.operands[0] = _in_order(op.operands[0])
            else:
                before = op.results[0]
                with ir.InsertionPoint.after(op):
                    ordered = _in_order(before)
                before.replace_all_uses_except(ordered, [ordered.owner.operation])
    return module


def _in_order(value: Any) -> Any:
    """Force row-major layout on the value; needs a current context, location and insertion point."""
    from jaxlib.mlir import ir

    rank = ir.RankedTensorType(value.type).rank
    order = ir.Attribute.parse(f"[dense<{list(range(rank))[::-1]}> : tensor<{rank}xindex>]")
    attributes = {
        "call_target_name": ir.StringAttr.get("LayoutConstraint"),
        "operand_layouts": order,
        "result_layouts": order,
    }
    return ir.Operation.create("stablehlo.custom_call", [value.type], [value], attributes).results[0]


def _drop_calls(module: Any, target: str) -> Any:
    """Replace the results of custom calls to `target` by their operands."""
    for op in collect(main_function(module).operation, {"stablehlo.custom_call"}):
        if str(op.attributes["call_target_name"]).strip('"') == target:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    return module


def drop_sent_arguments(module: Any) -> Any:
    """Remove the transfers of `@main`'s arguments to the host (in place): they are there already."""
    arguments = list(main_block(module).arguments)
    for op in collect(main_function(module).operation, {"stablehlo.custom_call"}):
        target = str(op.attributes["call_target_name"]).strip('"')
        if target == PLACEMENT and "host" in str(op.attributes[_PLACES]) and op.operands[0] in arguments:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    return module


def use_mesh(module: Any, mesh_name: str) -> Any:
    """Rename the mesh of every sharding and collective inside `@main` (in place); axes keep their names."""
    from jaxlib.mlir import ir

    def visit(op: Any) -> Any:
        for name in ("sharding", "in_shardings", "out_shardings", "sdy.sharding", "replica_groups"):
            if name in op.attributes and "@" in (text := str(op.attributes[name])):
                renamed = GROUPS_MESH.sub(f"<mesh = @{mesh_name},", MESH_NAME.sub(f"<@{mesh_name}, [", text))
                if renamed != text:
                    op.attributes[name] = ir.Attribute.parse(renamed)
                if name == "replica_groups":
                    _tell_collectives(module, mesh_name)
        return ir.WalkResult.ADVANCE

    with module.context:
        for op in main_block(module).operations:
            op.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return module


def _tell_collectives(module: Any, mesh_name: str) -> None:
    """Set the attribute of a mesh that collectives over its axes require; needs a current context."""
    from jaxlib.mlir import ir

    (mesh,) = [
        op.operation for op in module.body.operations if op.operation.name == "sdy.mesh" and symbol(op) == mesh_name
    ]
    sizes = _SIZE.findall(str(mesh.attributes["mesh"]))
    axes = ", ".join(f'{{name = "{name}", size = {size} : i64}}' for name, size in sizes)
    mesh.attributes[COLLECTIVES_MESH] = ir.Attribute.parse(f"{{axes = [{axes}]}}")
