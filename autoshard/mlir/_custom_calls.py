"""Constraints in the notation of GSPMD: custom calls to `Sharding` that carry an HLO sharding string."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.mlir._module import collect
from autoshard.mlir._number import strip
from autoshard.mlir._shardings import CONSTRAINT, axes_of, ensure_mesh, sharding_attribute


def custom_call_pins(module: Any, write: Callable[[Sequence[Sequence[str]]], str]) -> int:
    """Replace every `sdy.sharding_constraint` by a custom call to `Sharding`, and drop meshes (in place).

    `write` gives the HLO sharding string for the mesh axes of each dim. Compilers that partition with GSPMD read
    these. Returns how many there were.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    found = collect(module.operation, {CONSTRAINT})
    with module.context:
        for op in found:
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
        for op in list(module.body.operations):
            if op.operation.name == "sdy.mesh":
                op.operation.erase()
    return len(found)


def constrain_custom_calls(
    module: Any,
    mesh_name: str,
    sizes: Mapping[str, int],
    read: Callable[[str, tuple[int, ...]], Sequence[Sequence[str]] | None],
) -> int:
    """Strip a module (see `strip`), its custom calls to `Sharding` becoming constraints of Shardy (in place).

    `read` gives the mesh axes of each dim for a sharding string and a shape, or None to drop the constraint. Returns
    how many were dropped.
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
    """The custom calls to `Sharding` of a module, each with its HLO sharding string."""
    from jaxlib.mlir import ir

    return [
        (op, ir.StringAttr(op.attributes["mhlo.sharding"]).value)
        for op in collect(module.operation, {"stablehlo.custom_call"})
        if ir.StringAttr(op.attributes["call_target_name"]).value == "Sharding" and "mhlo.sharding" in op.attributes
    ]
