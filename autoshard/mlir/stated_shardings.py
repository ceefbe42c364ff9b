"""Meshes and shardings that a module states itself, as plain values."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from autoshard.mlir.module import argument_entries, main_function, mesh_ops


MeshAxes = tuple[tuple[str, int], ...]
"""Axis names and sizes of a mesh, major first."""


@dataclasses.dataclass(frozen=True, slots=True)
class AxisUse:
    """A mesh axis as the program itself names it."""

    name: str
    part: tuple[int, int] | None = None
    """The (size of the preceding part, size) of a part of the axis, as in Shardy's `"x":(pre)size`; None for the whole
    axis.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Sharding:
    """Sharding that the program itself requests for one value."""

    dims: tuple[tuple[AxisUse, ...], ...]
    """Axes that split each dim, major first."""
    open: tuple[bool, ...]
    """One flag for each dim: True if more axes may split it."""
    replicated: tuple[AxisUse, ...] = ()
    """Axes over which the tensor is explicitly replicated."""
    unreduced: tuple[AxisUse, ...] = ()
    """Axes over which partial sums of the value are not yet reduced."""
    mesh: MeshAxes = ()
    """Axes and sizes of the mesh that the program names; empty if it is unknown or the sharding is in GSPMD's form."""
    tiles: str = ""
    """GSPMD's sharding text, which names no axes; empty for Shardy's shardings. Every dim of `dims` is then without
    axes, and a mesh is needed to interpret the text.
    """

    @property
    def is_free(self) -> bool:
        """True if the sharding constrains nothing: all dims are open and without axes, no axis is replicated or
        unreduced, and there is no GSPMD text.
        """
        return not self.tiles and all(self.open) and not any(self.dims) and not self.replicated and not self.unreduced


def meshes_of(module: Any) -> dict[str, MeshAxes]:
    """Return axis names and sizes of every mesh that the module defines, by the mesh's symbol."""
    return {name: mesh_axes(op.attributes["mesh"]) for name, op in mesh_ops(module).items()}


def mesh_axes(mesh: Any) -> MeshAxes:
    """Return axis names and sizes of an `sdy.mesh` attribute, major first; its device ids are ignored."""
    from jaxlib.mlir.dialects import sdy

    return tuple((axis.name, axis.size) for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(mesh).axes))


def argument_shardings(module: Any) -> dict[int, Any]:
    """Return the `sdy.sharding` attribute of every argument of `@main` that has one, by argument number; GSPMD's are
    ignored.
    """
    entries = enumerate(argument_entries(main_function(module).operation, "arg_attrs"))
    return {position: entry["sdy.sharding"] for position, entry in entries if "sdy.sharding" in entry}


def mesh_of(sharding: Any, meshes: Mapping[str, MeshAxes]) -> MeshAxes | None:
    """Return the mesh of an `sdy.sharding`; None if it names a mesh that is not in `meshes`.

    None is also the answer for None and for attributes of other types. `meshes` are those of `meshes_of`; a sharding
    may also contain its own mesh.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    if sharding is None or not sdy.TensorShardingAttr.isinstance(sharding):
        return None
    mesh = sdy.TensorShardingAttr(sharding).mesh_or_ref
    return meshes.get(mesh.value) if isinstance(mesh, ir.FlatSymbolRefAttr) else mesh_axes(mesh)


def is_idle(sharding: Any, meshes: Mapping[str, MeshAxes]) -> bool:
    """Return True if an `sdy.sharding` is on a mesh of one device, a mesh without axes included.

    Return False if its mesh is unknown, and for None or other attributes. `meshes` are those of `meshes_of`.
    """
    mesh = mesh_of(sharding, meshes)
    return mesh is not None and math.prod(size for _, size in mesh) == 1


def stated_sharding(sharding: Any, meshes: Mapping[str, MeshAxes]) -> Sharding:
    """Return an `sdy.sharding` as a record, with an empty mesh if `meshes` (of `meshes_of`) lack it.

    Priorities are dropped: they order Shardy's propagation, and a plan leaves nothing to propagation.
    """
    from jaxlib.mlir.dialects import sdy

    whole = sdy.TensorShardingAttr(sharding)
    dims = [sdy.DimensionShardingAttr(dim) for dim in whole.dimension_shardings]
    return Sharding(
        tuple(_uses(dim.axes) for dim in dims),
        tuple(not dim.is_closed for dim in dims),
        _uses(whole.replicated_axes),
        _uses(whole.unreduced_axes),
        mesh_of(sharding, meshes) or (),
    )


def shardings_of_values(shardings: Any, meshes: Mapping[str, MeshAxes]) -> list[Sharding]:
    """Return the record of every sharding in an `sdy.sharding_per_value`, in order; see `stated_sharding`."""
    from jaxlib.mlir.dialects import sdy

    return [stated_sharding(each, meshes) for each in sdy.TensorShardingPerValueAttr(shardings).shardings]


def manual_axes(region: Any) -> tuple[str, ...]:
    """Return the names of the axes that an `sdy.manual_computation` splits by hand, in its order."""
    from jaxlib.mlir.dialects import sdy

    axes = sdy.ManualAxesAttr(region.attributes["manual_axes"])
    return tuple(axes[i] for i in range(len(axes)))


def _uses(axes: Any) -> tuple[AxisUse, ...]:
    """Return axes of an `sdy` sharding, whole or in parts, as records in the same order."""
    from jaxlib.mlir.dialects import sdy

    uses = []
    for axis in map(sdy.AxisRefAttr, axes):
        part = axis.sub_axis_info and sdy.SubAxisInfoAttr(axis.sub_axis_info)
        uses.append(AxisUse(axis.name, (part.pre_size, part.size) if part else None))
    return tuple(uses)


def tiled_sharding(call: Any, rank: int) -> Sharding:
    """Return the sharding of a `@Sharding` custom call on a value of `rank` dims, in GSPMD's form.

    `unspecified_dims=[1]` in the call's configuration leaves dim 1 open; all other dims are closed. The text is
    `{replicated}` for a call without `mhlo.sharding`.
    """
    from jaxlib.mlir import ir

    texts = {
        name: ir.StringAttr(call.attributes[name]).value
        for name in ("backend_config", "mhlo.sharding")
        if name in call.attributes
    }
    match = re.search(r"unspecified_dims=\[([\d,]*)\]", texts.get("backend_config", ""))
    free = {int(n) for n in match[1].split(",") if n} if match else set()
    tiles = texts.get("mhlo.sharding", "{replicated}")
    return Sharding(((),) * rank, tuple(d in free for d in range(rank)), tiles=tiles)


def _on_mesh(attribute: Any, name: str) -> Any | None:
    """Return an attribute that refers to a mesh by name, with the name replaced; None for any other attribute.

    Shardings, shardings of several values, and groups of collectives refer to meshes. A sharding that contains its own
    mesh stays as it is. Shardings of several values are returned even if none of them changes.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy, stablehlo

    if sdy.TensorShardingPerValueAttr.isinstance(attribute):
        each = sdy.TensorShardingPerValueAttr(attribute).shardings
        return sdy.TensorShardingPerValueAttr.get([_on_mesh(sharding, name) or sharding for sharding in each])
    if stablehlo.ReplicaGroupMeshAxesAttr.isinstance(attribute):
        axes = stablehlo.ReplicaGroupMeshAxesAttr(attribute).axes
        return stablehlo.ReplicaGroupMeshAxesAttr.get(ir.FlatSymbolRefAttr.get(name), axes)
    if not sdy.TensorShardingAttr.isinstance(attribute):
        return None
    old = sdy.TensorShardingAttr(attribute)
    if not isinstance(old.mesh_or_ref, ir.FlatSymbolRefAttr):
        return None
    return sdy.TensorShardingAttr.get(name, old.dimension_shardings, old.replicated_axes, old.unreduced_axes)


_REFERRING = ("sharding", "in_shardings", "out_shardings", "sdy.sharding", "replica_groups")
"""Attributes of ops that refer to a mesh."""


def rename_meshes(root: Any, name: str) -> set[str]:
    """Replace the mesh of every sharding and collective inside an op by `name` (in place); axes keep their names.

    Mesh definitions stay. Returns the names of the attributes that were replaced.
    """
    from jaxlib.mlir import ir

    found = set()

    def visit(op: Any) -> Any:
        """Replace the mesh in the op's attributes of `_REFERRING`, record their names in `found`, and continue the
        walk.
        """
        for key in _REFERRING:
            new = _on_mesh(op.attributes[key], name) if key in op.attributes else None
            if new is not None:
                op.attributes[key] = new
                found.add(key)
        return ir.WalkResult.ADVANCE

    with root.context:
        root.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found
