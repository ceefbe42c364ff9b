"""Devices that a module's own collectives span, layouts that it states, and the mesh that it refers to."""

import math
from typing import Any

from autoshard.errors import UserError
from autoshard.mlir.module import collect, main_block, main_function, mesh_ops, target_name
from autoshard.mlir.stated_shardings import meshes_of, rename_meshes


COLLECTIVES_MESH = "stablehlo.mesh"
"""Attribute of a mesh whose axes a collective spans, in addition to Shardy's own attribute."""


def device_groups(op: Any) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices of a collective, or (source, target) pairs of a permute; without fillers of -1.

    Empty for an op without groups. jax 0.11 names the axes of a mesh that a collective spans, jax 0.10 the devices.
    Raises `UserError` for groups over a part of an axis, or over axes that the module's mesh lacks.
    """
    import numpy as np
    from jaxlib.mlir.dialects import stablehlo

    for name in ("replica_groups", "source_target_pairs"):
        if name in op.attributes:
            groups = op.attributes[name]
            spanned = stablehlo.ReplicaGroupMeshAxesAttr.isinstance(groups)
            rows = _along_axes(op, groups) if spanned else np.asarray(groups)
            return tuple(tuple(int(d) for d in row if d >= 0) for row in rows)
    return ()


def _along_axes(op: Any, groups: Any) -> Any:
    """Return the devices of each group, `[groups, devices]`, in mesh order: devices of a group differ along named axes
    only.
    """
    import numpy as np
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    while op.parent is not None:
        op = op.parent.operation
    spanned = stablehlo.ReplicaGroupMeshAxesAttr(groups)
    mesh = spanned.mesh
    sizes = dict(meshes_of(op.opview).get(mesh.value, ())) if isinstance(mesh, ir.FlatSymbolRefAttr) else {}
    uses = [stablehlo.AxisRefAttr(axis) for axis in ir.ArrayAttr(spanned.axes)]
    axes = [use.name for use in uses]
    if any(use.sub_axis_info is not None for use in uses) or not set(axes) <= sizes.keys():
        raise UserError(f"the module has a collective over `{groups}`; only whole axes of a mesh in it are understood.")
    names = list(sizes)
    order = sorted(range(len(names)), key=lambda number: axes.index(names[number]) if names[number] in axes else -1)
    grid = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    return grid.transpose(order).reshape(-1, math.prod(sizes[axis] for axis in axes))


PLACEMENT = "annotate_device_placement"
"""Target of the call in a module that sends a value to the host or fetches it."""

# Dictionary of a call's attributes, and its entry that names the memory.
_PLACES, _PLACE = "mhlo.frontend_attributes", "_xla_buffer_placement"


def is_sent_to_host(call: Any) -> bool:
    """Return True for a call to `PLACEMENT` that sends its operand to the host, False for one that fetches it.

    A call without a place gives False.
    """
    from jaxlib.mlir import ir

    places = ir.DictAttr(call.attributes[_PLACES]) if _PLACES in call.attributes else {}
    return _PLACE in places and ir.StringAttr(places[_PLACE]).value.endswith("host")


def drop_gspmd(module: Any) -> Any:
    """Remove GSPMD's `@Sharding` custom calls from `@main` (in place), since XLA turns Shardy off if it sees one.

    Return `module`.
    """
    return _drop_calls(module, "Sharding")


def drop_layouts(module: Any) -> Any:
    """Remove layout constraints from `@main` (in place), and return `module`.

    Off TPUs XLA's partitioner gathers their operands. Evidence: docs/compiler_behaviour.md, "Layout constraints and the
    partitioner".
    """
    return _drop_calls(module, "LayoutConstraint")


def order_hosted(module: Any) -> Any:
    """Force row-major layout on the values that `@main` sends to the host or fetches (in place), and return `module`.

    A backward loop fetches the stack that a forward loop sends. If their layouts are free the TPU compiler copies the
    stack between them on the device. Evidence: docs/compiler_behaviour.md, "Layout of stacks in host memory".
    """
    from jaxlib.mlir import ir

    for op in collect(main_function(module).operation, {"stablehlo.custom_call"}):
        if target_name(op) != PLACEMENT:
            continue
        with module.context, op.location:
            if is_sent_to_host(op):
                with ir.InsertionPoint(op):
                    op.operands[0] = _in_order(op.operands[0])
            else:
                before = op.results[0]
                with ir.InsertionPoint.after(op):
                    ordered = _in_order(before)
                before.replace_all_uses_except(ordered, [ordered.owner.operation])
    return module


def _in_order(value: Any) -> Any:
    """Emit a call that forces row-major layout on the value, and return its result.

    Needs a current context, location and insertion point.
    """
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
    """Replace the result of each custom call to `target` in `@main` by its operand (in place), and return `module`."""
    for op in collect(main_function(module).operation, {"stablehlo.custom_call"}):
        if target_name(op) == target:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    return module


def drop_sent_arguments(module: Any) -> Any:
    """Remove the transfers of `@main`'s arguments to the host (in place), and return `module`: they are there
    already.
    """
    arguments = list(main_block(module).arguments)
    for op in collect(main_function(module).operation, {"stablehlo.custom_call"}):
        if target_name(op) == PLACEMENT and is_sent_to_host(op) and op.operands[0] in arguments:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    return module


def use_mesh(module: Any, mesh_name: str) -> Any:
    """Rename the mesh of every sharding and collective inside `@main` (in place), and return `module`; axes keep their
    names.

    The module must define the mesh `mesh_name` if it has collectives over axes.
    """
    if "replica_groups" in rename_meshes(main_function(module).operation, mesh_name):
        _tell_collectives(module, mesh_name)
    return module


def _tell_collectives(module: Any, mesh_name: str) -> None:
    """Set on the mesh `mesh_name` the attribute that collectives over its axes require (in place)."""
    from jaxlib.mlir import ir

    with module.context:
        number = ir.IntegerType.get_signless(64)
        axes = [
            ir.DictAttr.get({"name": ir.StringAttr.get(name), "size": ir.IntegerAttr.get(number, size)})
            for name, size in meshes_of(module)[mesh_name]
        ]
        mesh_ops(module)[mesh_name].attributes[COLLECTIVES_MESH] = ir.DictAttr.get({"axes": ir.ArrayAttr.get(axes)})
