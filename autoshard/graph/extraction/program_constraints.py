"""What a program says about specs: constraints on values, and regions that it splits by hand (`shard_map`)."""

import dataclasses
from typing import Any

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.graph.extraction.graph_builder import ReadBlock, UseReading
from autoshard.graph.extraction.mlir_attributes import parse_axes, parse_shardings, parse_type, tiled
from autoshard.graph.extraction.opaque_rules import IN, OUT, end_rule, same_rule
from autoshard.graph.records import Constraint, Manual, Sharding


CONSTRAINTS = frozenset({"sharding_constraint", "reshard"})


def read_constraint(reading: UseReading, op: Any, loop: int) -> None:
    """A tensor of its own, so that the value may be split in another way before and after.

    A constraint that says nothing is the value itself, and so is one on an argument that nothing else uses.
    """
    source = reading.ids[op.operands[0]]
    if "sharding" in op.attributes:
        (sharding,) = parse_shardings(str(op.attributes["sharding"]), reading.meshes)
    else:
        sharding = tiled(op.attributes, len(reading.tensors[source].shape))
    if sharding.is_free or not sharding.dims or source in reading.free:
        return reading.alias(op)
    where = _place("with_sharding_constraint", op)
    if reading.tensors[source].value[0] == -1 and len(list(op.operands[0].uses)) == 1:
        reading.alias(op)
        reading.constraints.append(Constraint(source, sharding, where))
        return None
    shape = reading.tensors[source].shape
    reading.passing(
        op, "sharding_constraint", source, op.results[0], (reading.number, 0), loop, same_rule([shape], [shape])
    )
    reading.constraints.append(Constraint(reading.ids[op.results[0]], sharding, where))
    return None


def read_manual(reading: UseReading, op: Any, loop: int, read_block: ReadBlock) -> None:
    """A `shard_map`: an op for each value that enters or leaves, and the body's ops in between."""
    number, outer = reading.number, reading.manual
    sides = [parse_shardings(str(op.attributes[f"{side}_shardings"]), reading.meshes) for side in ("in", "out")]
    axes = parse_axes(str(op.attributes["manual_axes"]))
    both = tuple(dict.fromkeys((*outer, *axes)))
    mesh = next((s.mesh for side in sides for s in side), ())
    reading.regions.append(Manual(number, axes, mesh, _place("shard_map", op)))
    body = op.regions[0].blocks[0]
    reading.manual = both
    for k, (value, argument, sharding) in enumerate(zip(op.operands, body.arguments, sides[0], strict=True)):
        _read_end(reading, op, IN, reading.ids[value], argument, (number, len(op.results) + k), loop, k, sharding, axes)
    returned = read_block(body, loop)
    reading.manual = outer
    for r, (source, result, sharding) in enumerate(zip(returned, op.results, sides[1], strict=True)):
        _read_end(reading, op, OUT, source, result, (number, r), loop, r, sharding, axes)


def _read_end(
    reading: UseReading,
    op: Any,
    kind: str,
    source: int,
    value: Any,
    where: tuple[int, int],
    loop: int,
    position: int,
    sharding: Sharding,
    axes: tuple[str, ...],
) -> None:
    shape, _, _ = parse_type(str(value.type))
    mine = reading.tensors[source].shape
    if not shape and source not in reading.free:
        reading.ids[value] = source
        return
    own = dataclasses.replace(sharding, dims=tuple(tuple(a for a in dim if a.name in axes) for dim in sharding.dims))
    rule, fixed = end_rule(*((mine, shape) if kind == IN else (shape, mine)), own, kind)
    manual = tuple(dict.fromkeys((*reading.manual, *axes)))
    reading.passing(op, kind, source, value, where, loop, rule, position, fixed, manual)


def called(op: Any, kind: str) -> str:
    """What a custom call calls; regions by hand in GSPMD's form are refused."""
    if kind != "custom_call":
        return ""
    target = str(op.attributes["call_target_name"]).strip('"')
    if target in ("SPMDFullToShardShape", "SPMDShardToFullShape"):
        raise UserError(
            f"the program has a region split by hand in GSPMD's form ({target}), whose axes have no names: export it "
            "with Shardy (jax_use_shardy_partitioner), or before it is split."
        )
    return target


def _place(what: str, op: Any) -> str:
    """What asks for a spec and where, for a person: the source line if it is known, else the op's name."""
    name, line = mlir.location_name(op.location), mlir.source_line(op).rpartition("/")[2]
    line = line.replace("-:", "line ", 1) if line.startswith("-:") else line
    return f"{what} at {line}" if line else f"{what} {name}".strip()
