"""Numbers of ops, and the hash that proves that two lowerings have the same numbers."""

import hashlib
from typing import Any

from autoshard.mlir.module import main_block, mesh_ops, text_of, to_bytes
from autoshard.mlir.stated_shardings import rename_meshes


BRANCHING = frozenset({"stablehlo.case", "stablehlo.if"})
"""Conditionals."""
DESCEND = BRANCHING | {"stablehlo.while", "sdy.manual_computation"}
"""Ops whose regions `number_ops` enters."""


def number_ops(module: Any) -> list[Any]:
    """List the ops of `@main` in pre-order, terminators included; an op's position in the list is its number.

    The walk enters the regions of while, case, if and manual computations. The small regions of reduce, sort, scatter
    and the like are part of their op. Call `inline_calls` first.
    """
    ops: list[Any] = []

    def visit(block: Any) -> None:
        for view in block.operations:
            op = view.operation
            ops.append(op)
            if op.name in DESCEND:
                for region in op.regions:
                    for inner in region.blocks:
                        visit(inner)

    visit(main_block(module))
    return ops


def structure_hash(module: Any) -> str:
    """Hash the inlined module without meshes, shardings, argument attributes, names and locations (sha256, hex).

    The hash is equal for the sharded and the unsharded lowering of one program. Any difference in ops, shapes or
    constants changes it. Leaves `module` unchanged.
    """
    return hashlib.sha256(canonical_text(module).encode()).hexdigest()


def canonical_text(module: Any) -> str:
    """Return the text of a stripped copy of the module, without locations and with one name for meshes; see
    `structure_hash`.
    """
    from jaxlib.mlir import ir

    with module.context:
        copy = ir.Module.parse(to_bytes(module), module.context)
        strip(copy)
        rename_meshes(copy.operation, "mesh")
        return text_of(copy)


def strip(module: Any) -> Any:
    """Remove meshes, shardings on arguments, results and ops, aliasing, and the module's own attributes (in place).

    Return `module`. Constraints are ops, and stay.
    """
    from jaxlib.mlir import ir

    with module.context:
        attributes = module.operation.attributes
        for attribute in [attributes[i].name for i in range(len(attributes))]:
            del module.operation.attributes[attribute]
        for mesh in mesh_ops(module).values():
            mesh.erase()
        for op in module.body.operations:
            if op.operation.name == "func.func":
                for attribute in ("arg_attrs", "res_attrs"):
                    if attribute in op.operation.attributes:
                        del op.operation.attributes[attribute]

        def visit(op: Any) -> Any:
            for attribute in ("sdy.sharding", "sdy.sharding_per_value", "sdy.sharding_rule", "mhlo.sharding"):
                if attribute in op.attributes:
                    del op.attributes[attribute]
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return module
