"""What a plan that is read must be, beyond the types of its fields: one that was edited may not be any plan."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.plan.record._plan import Plan
from autoshard.plan.record._spec import Spec


_ROUNDING_S = 1e-9
"""A time may be so far below zero: it is a difference of sums of seconds."""


def check_plan(plan: Plan, damaged: Callable[[str], UserError]) -> None:
    """Raises what `damaged` makes of the first thing that is wrong."""
    for problem in (*_devices(plan), *_specs(plan), *_amounts(plan), *_origins(plan.provenance)):
        raise damaged(problem)


def _devices(plan: Plan) -> Iterator[str]:
    for axis, size in plan.mesh.items():
        if size < 1:
            yield f"the mesh axis {axis!r} has size {size}"
    count = len(set(plan.device_order))
    if math.prod(plan.mesh.values()) != count or len(plan.device_order) != count:
        product = " x ".join(map(str, plan.mesh.values()))
        yield f"the mesh has {product} devices but `device_order` names {count}"
    try:
        there = Topology.parse(plan.topology).num_devices
    except UserError as error:
        yield f"its topology cannot be ({error})"
        return
    for device in plan.device_order:
        if not 0 <= device < there:
            yield f"`device_order` names device {device}, but {plan.topology} has devices 0 to {there - 1}"


def _specs(plan: Plan) -> Iterator[str]:
    named = [*plan.arguments.items(), *plan.results.items(), *((f"pin on op {pin.op}", pin.spec) for pin in plan.pins)]
    for what, rows in (("region", plan.regions), ("call", plan.calls)):
        for row in rows:
            named += [(f"{what} of op {row.op}", spec) for spec in (*row.operands, *row.results, Spec((row.summed,)))]
    for name, spec in named:
        unknown = [axis for axis in spec.axes if axis not in plan.mesh]
        if unknown:
            yield f"{name} is split over {unknown[0]!r}, which is not a mesh axis"
        if len(set(spec.axes)) != len(spec.axes):
            yield f"{name} uses a mesh axis twice"
    for name, spec in plan.arguments.items():
        if len(spec.dims) != len(plan.shapes[name]):
            yield f"{name} has {len(plan.shapes[name])} dims but its spec has {len(spec.dims)}"
        if any(size < 0 for size in plan.shapes[name]):
            yield f"{name} has the shape {list(plan.shapes[name])}"


def _amounts(plan: Plan) -> Iterator[str]:
    """Times and sizes that are none. Gaps may be infinite: nothing is known of such a plan."""
    if plan.memory_limit_bytes < 1:
        yield f"`memory_limit_bytes` is {plan.memory_limit_bytes}"
    for name in ("solver_gap", "plan_gap"):
        if math.isnan(getattr(plan, name)):
            yield f"`{name}` is nan"
    predictions = {"prediction": plan.prediction} | {f"baselines.{key}": each for key, each in plan.baselines.items()}
    for where, prediction in predictions.items():
        yield from _negative(prediction, where)
    for number, row in enumerate(plan.ops):
        yield from _negative(row, f"ops.{number}")
    for number, held in enumerate(plan.timeline.held if plan.timeline else ()):
        if not 0 <= held.first <= held.last < len(plan.timeline.moments_s if plan.timeline else ()):
            yield f"`timeline.held.{number}` is held from moment {held.first} to {held.last}, which are not there"
        yield from _negative(held, f"timeline.held.{number}")
    for number, span in enumerate(plan.timeline.spans if plan.timeline else ()):
        yield from _negative([span.start_s, span.seconds], f"timeline.spans.{number}")


def _negative(value: Any, where: str) -> Iterator[str]:
    """Every number in a record that is below zero or not finite."""
    if isinstance(value, (int, float)) and not (-_ROUNDING_S <= value < math.inf):
        yield f"`{where}` is {value}"
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _negative(getattr(value, field.name), f"{where}.{field.name}")
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _negative(each, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _negative(each, where)


_ORIGINS: dict[str, type | tuple[type, ...]] = {
    "versions": dict,
    "xla_flags": dict,
    "source": (dict, type(None)),
    "recipe": (dict, type(None)),
    "pinned": dict,
    "maxtext": dict,
    "asked": list,
    "said_by_program": list,
    "flag_sets": (dict, type(None)),
    "learned": (dict, str, type(None)),
}
"""What is read again of where a plan came from, and as what."""


def _origins(said: dict[str, Any]) -> Iterator[str]:
    for key, kind in _ORIGINS.items():
        if key in said and not isinstance(said[key], kind):
            yield f"`provenance.{key}` is not of the right type"
            return
    texts = [("xla_flags.flags", (said.get("xla_flags") or {}).get("flags", [])), ("asked", said.get("asked", []))]
    texts += [("said_by_program", said.get("said_by_program", [])), ("pinned", [*said.get("pinned", {}).values()])]
    for where, lines in texts:
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            yield f"`provenance.{where}` is no list of text"
    source = said.get("source") or {}
    for key, kind in (("program", str), ("entry", str), ("options", dict)):
        if key in source and not isinstance(source[key], kind):
            yield f"`provenance.source.{key}` is not of the right type"
