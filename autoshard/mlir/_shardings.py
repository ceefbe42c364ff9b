"""Specs, meshes and aliases on a module."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from autoshard.mlir._module import argument_entries, main_function, symbol


CONSTRAINT = "sdy.sharding_constraint"


class SpecLike(Protocol):
    @property
    def dims(self) -> tuple[tuple[str, ...], ...]: ...


def sharding_attribute(mesh_name: str, dims: Sequence[Sequence[str]]) -> Any:
    """`#sdy.sharding<@mesh, [{"a"}, {}]>`, every dim closed; needs a current context."""
    from jaxlib.mlir.dialects import sdy

    return sdy.TensorShardingAttr.get(
        mesh_name,
        [sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(axis) for axis in axes], is_closed=True) for axes in dims],
    )


def ensure_mesh(module: Any, mesh_name: str, sizes: Mapping[str, int]) -> str:
    """Name of the module's mesh with these axes; adds `sdy.mesh @mesh_name` if there is none."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    wanted = list(sizes.items())
    taken = set()
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            mesh = sdy.MeshAttr(op.operation.attributes["mesh"])
            axes = [(axis.name, axis.size) for axis in map(sdy.MeshAxisAttr, mesh.axes)]
            if axes == wanted and not list(mesh.device_ids):
                return symbol(op)
            taken.add(symbol(op))
    name = mesh_name
    while name in taken:
        name += "_"
    with module.context, ir.Location.unknown(module.context), ir.InsertionPoint.at_block_begin(module.body):
        attribute = sdy.MeshAttr.get([sdy.MeshAxisAttr.get(axis, size) for axis, size in wanted])
        sdy.MeshOp(name, attribute)
    return name


def set_shardings(
    module: Any,
    mesh_name: str,
    sizes: Mapping[str, int],
    arguments: Sequence[SpecLike | None],
    results: Sequence[SpecLike | None],
) -> Any:
    """Give `@main`'s arguments and results these specs (in place); None leaves one open.

    Dims that a spec says nothing of, such as the words of a typed PRNG key, stay whole.
    """
    from jaxlib.mlir import ir

    name = ensure_mesh(module, mesh_name, sizes)
    function = main_function(module).operation
    block = function.regions[0].blocks[0]
    values = {"arg_attrs": list(block.arguments), "res_attrs": list(list(block.operations)[-1].operation.operands)}
    with module.context:
        for key, specs in (("arg_attrs", arguments), ("res_attrs", results)):
            old = argument_entries(function, key) or [{} for _ in values[key]]
            for value, entry, spec in zip(values[key], old, specs, strict=True):
                entry.pop("sdy.sharding", None)
                if spec is not None:
                    rank = len(ir.RankedTensorType(value.type).shape)
                    entry["sdy.sharding"] = sharding_attribute(name, (*spec.dims, *((),) * (rank - len(spec.dims))))
            function.attributes[key] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in old])
    return module


def set_aliases(module: Any, aliases: Mapping[int, int]) -> Any:
    """Donate argument `i` of `@main` to result `aliases[i]` (in place); other donations are dropped."""
    from jaxlib.mlir import ir

    function = main_function(module).operation
    count = len(function.regions[0].blocks[0].arguments)
    with module.context:
        entries = argument_entries(function, "arg_attrs") or [{} for _ in range(count)]
        integer = ir.IntegerType.get_signless(32)
        for position, entry in enumerate(entries):
            entry.pop("tf.aliasing_output", None)
            entry.pop("jax.buffer_donor", None)
            if position in aliases:
                entry["tf.aliasing_output"] = ir.IntegerAttr.get(integer, aliases[position])
        function.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in entries])
    return module


def aliases(module: Any) -> dict[int, int]:
    """Argument number -> result number of every donated argument of `@main` that has a result."""
    from jaxlib.mlir import ir

    found = {}
    for position, entry in enumerate(argument_entries(main_function(module).operation, "arg_attrs")):
        if "tf.aliasing_output" in entry:
            found[position] = ir.IntegerAttr(entry["tf.aliasing_output"]).value
    return found


def read_shardings(op: Any) -> list[tuple[tuple[str, ...], ...] | None]:
    """The spec of each result of an op after `run_propagation`; None where Shardy gave none (not split)."""
    from jaxlib.mlir.dialects import sdy

    attributes = op.attributes
    if "sdy.sharding" in attributes and op.name != CONSTRAINT:
        shardings = list(sdy.TensorShardingPerValueAttr(attributes["sdy.sharding"]).shardings)
    elif "sharding" in attributes and op.name == CONSTRAINT:
        shardings = [attributes["sharding"]]
    else:
        return [None] * len(op.results)
    return [axes_of(sdy.TensorShardingAttr(sharding)) for sharding in shardings]


def axes_of(sharding: Any) -> tuple[tuple[str, ...], ...]:
    from jaxlib.mlir.dialects import sdy

    return tuple(
        tuple(sdy.AxisRefAttr(axis).name for axis in sdy.DimensionShardingAttr(dim).axes)
        for dim in sharding.dimension_shardings
    )


def pinned_axes(pin: Any) -> tuple[tuple[str, ...], ...]:
    """Return the axes of each dim in a constraint."""
    from jaxlib.mlir.dialects import sdy

    return axes_of(sdy.TensorShardingAttr(pin.attributes["sharding"]))
