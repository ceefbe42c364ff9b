"""Sharding constraints that are not kept: those that say nothing, and all of them where the user asks for it."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from autoshard.mlir._module import argument_entries, collect, main_function
from autoshard.mlir._own import argument_shardings, mesh_texts


_NAMES = frozenset({"sdy.sharding_constraint", "sdy.reshard"})
_CALL = "stablehlo.custom_call"
_REGION = "sdy.manual_computation"
_MESH = re.compile(r"<(?:@([\w.$-]+|\"[^\"]*\")|(mesh<[^>]*>)),\s*\[")
"""The beginning of a sharding's text: the mesh by name, or in place."""
_AXIS_SIZE = re.compile(r'"\s*=\s*(\d+)')
"""Of an axis, in the text of a mesh."""


def drop_idle_constraints(module: Any) -> Any:
    """Take out constraints on a mesh of one device (in place): they say nothing of how to split.

    A program traced where there is one device names all its axes and splits nothing; JAX itself puts such a constraint,
    on a mesh without axes, wherever it turns arrays of PRNG keys into words and back.
    """
    meshes = mesh_texts(module)
    if not meshes:
        return module
    return _drop(module, [op for op in _constraints(module) if is_idle(_text(op), meshes)])


def drop_constraints(module: Any) -> Any:
    """Take out all constraints, and what is said of arguments and results (in place); regions by hand stay."""
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
class SaidCounts:
    """How much a module itself says of shardings."""

    constraints: int
    arguments: int
    """Arguments of the program that have a sharding."""
    regions: int
    """Regions of the program that are split by hand (`shard_map`)."""
    idle: int
    """Constraints and arguments on a mesh of one device, which the others leave out; none of JAX's own."""


def count_said(module: Any) -> SaidCounts:
    meshes = mesh_texts(module)
    found = collect(module.operation, {*_NAMES, _CALL, _REGION})
    texts = [_text(op) for op in found if _constrains(op)]
    arguments = list(argument_shardings(module).values())
    idle = [text for text in (*texts, *arguments) if is_idle(text, meshes)]
    return SaidCounts(
        sum(not is_idle(text, meshes) for text in texts),
        sum(not is_idle(text, meshes) for text in arguments),
        sum(op.name == _REGION for op in found),
        sum(bool(_AXIS_SIZE.search(_mesh(text, meshes) or "")) for text in idle),
    )


def is_idle(text: str, meshes: Mapping[str, str]) -> bool:
    """Whether a sharding, as text, is on a mesh of one device; `meshes` are those of `mesh_texts`."""
    mesh = _mesh(text, meshes)
    return mesh is not None and math.prod(int(size) for size in _AXIS_SIZE.findall(mesh)) == 1


def _mesh(text: str, meshes: Mapping[str, str]) -> str | None:
    """Text of the mesh that a sharding is on; None if it is on none, as in GSPMD's form."""
    found = _MESH.search(text)
    return (found[2] or meshes.get(found[1].strip('"'))) if found else None


def _constraints(module: Any) -> list[Any]:
    return [op for op in collect(module.operation, {*_NAMES, _CALL}) if _constrains(op)]


def _constrains(op: Any) -> bool:
    return op.name in _NAMES or (op.name == _CALL and str(op.attributes["call_target_name"]).strip('"') == "Sharding")


def _text(op: Any) -> str:
    name = "mhlo.sharding" if op.name == _CALL else "sharding"
    return str(op.attributes[name]) if name in op.attributes else ""


def _drop(module: Any, ops: list[Any]) -> Any:
    for op in ops:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()
    return module
