"""What a module itself says about meshes and shardings, and what its own collectives span."""

import re
from typing import Any

from autoshard.mlir._module import argument_entries, collect, main_block, main_function, symbol


MESH_NAME = re.compile(r"<@[^,<>]*, \[")
"""The beginning of a sharding's text, up to its dims."""


def mesh_texts(module: Any) -> dict[str, str]:
    """Text of every mesh that the module names, by its symbol."""
    meshes = [op for op in module.body.operations if op.operation.name == "sdy.mesh"]
    return {symbol(op): str(op.operation.attributes["mesh"]) for op in meshes}


def argument_shardings(module: Any) -> dict[int, str]:
    """Text of the sharding of every argument of `@main` that has one."""
    entries = enumerate(argument_entries(main_function(module).operation, "arg_attrs"))
    return {position: str(entry["sdy.sharding"]) for position, entry in entries if "sdy.sharding" in entry}


def device_groups(op: Any) -> tuple[tuple[int, ...], ...]:
    """Groups of devices of a collective, or (source, target) pairs of a permute; fillers of -1 are left out."""
    import numpy as np

    for name in ("replica_groups", "source_target_pairs"):
        if name in op.attributes:
            return tuple(tuple(int(d) for d in row if d >= 0) for row in np.asarray(op.attributes[name]))
    return ()


def drop_gspmd(module: Any) -> Any:
    """Take GSPMD's `@Sharding` custom calls out of `@main` (in place): for their sake XLA turns Shardy off."""
    calls = collect(main_function(module).operation, {"stablehlo.custom_call"})
    for op in calls:
        if str(op.attributes["call_target_name"]).strip('"') == "Sharding":
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    return module


def use_mesh(module: Any, mesh_name: str) -> Any:
    """Let every sharding inside `@main` name this mesh (in place); axes keep their names."""
    from jaxlib.mlir import ir

    def visit(op: Any) -> Any:
        for name in ("sharding", "in_shardings", "out_shardings", "sdy.sharding"):
            if name in op.attributes and "@" in (text := str(op.attributes[name])):
                renamed = MESH_NAME.sub(f"<@{mesh_name}, [", text)
                if renamed != text:
                    op.attributes[name] = ir.Attribute.parse(renamed)
        return ir.WalkResult.ADVANCE

    with module.context:
        for op in main_block(module).operations:
            op.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return module
