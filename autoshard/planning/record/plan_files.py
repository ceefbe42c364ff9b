"""Plans as JSON files: equal plans give equal bytes, and files are checked on load."""

import dataclasses
import functools
import hashlib
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autoshard.base.files import is_shallow, parse_json, read_bytes, write_whole
from autoshard.base.providers import provides
from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.planning.record.plan_record import SCHEMA, Plan
from autoshard.planning.record.program_place import seen_from_file, seen_from_here
from autoshard.planning.record.spec import Spec


_DECIDES = ("topology", "mesh", "device_order", "arguments", "results", "pins", "calls", "regions")
"""Fields of a plan on which its digest depends."""


def plan_digest(plan: Plan) -> str:
    """Return twelve hex digits that depend on the program's fingerprint and on the fields of `_DECIDES`: topology,
    mesh, and all that a compiler receives.
    """
    body = json.loads(plan_to_json(plan))
    text = json.dumps([plan.program_fingerprint, {key: body[key] for key in _DECIDES}], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


_ROUNDING_S = 1e-9
"""Most seconds by which a time may be below zero, since it is a difference of sums of seconds."""


def check_plan(plan: Plan, damaged: Callable[[str], UserError]) -> None:
    """Check the devices, specs, amounts and provenance of a plan, in this order; raise the error that `damaged` makes
    of the first problem.
    """
    for problem in (*_devices(plan), *_specs(plan), *_amounts(plan), *_origins(plan.provenance)):
        raise damaged(problem)


def _devices(plan: Plan) -> Iterator[str]:
    """Yield problems of the mesh, the device order and the topology, as clauses of a sentence."""
    for axis, size in plan.mesh.items():
        if size < 1:
            yield f"the mesh axis {axis!r} has size {size}"
    count = len(set(plan.device_order))
    if math.prod(plan.mesh.values()) != count or len(plan.device_order) != count:
        product = " x ".join(map(str, plan.mesh.values()))
        yield f"the mesh has {product} devices but `device_order` names {count}"
    try:
        num_devices = Topology.parse(plan.topology).num_devices
    except UserError as error:
        yield f"its topology cannot be ({error})"
        return
    for device in plan.device_order:
        if not 0 <= device < num_devices:
            yield f"`device_order` names device {device}, but {plan.topology} has devices 0 to {num_devices - 1}"


def _specs(plan: Plan) -> Iterator[str]:
    """Yield problems of specs and shapes, as clauses of a sentence.

    They are unknown axes, axes that are used twice, and arguments whose spec has another rank or whose shape is
    negative.
    """
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
    """Yield memory limits below 1, times and sizes that are negative or not finite, and moments that are not there.
    Gaps may be infinite, if no bound of such a plan is known.
    """
    if plan.memory_limit_bytes < 1:
        yield f"`memory_limit_bytes` is {plan.memory_limit_bytes}"
    for name in ("solver_gap", "plan_gap"):
        if math.isnan(getattr(plan, name)):
            yield f"`{name}` is nan"
    predictions = {"prediction": plan.prediction} | {f"baselines.{key}": each for key, each in plan.baselines.items()}
    for where, prediction in predictions.items():
        yield from _negative(prediction, where)
    yield from _negative(plan.compiled, "compiled")
    for number, row in enumerate(plan.ops):
        yield from _negative(row, f"ops.{number}")
    for number, held in enumerate(plan.timeline.held if plan.timeline else ()):
        if not 0 <= held.first <= held.last < len(plan.timeline.moments_s if plan.timeline else ()):
            yield f"`timeline.held.{number}` is live from moment {held.first} to {held.last}, which are not there"
        yield from _negative(held, f"timeline.held.{number}")
    for number, span in enumerate(plan.timeline.spans if plan.timeline else ()):
        yield from _negative([span.start_s, span.seconds], f"timeline.spans.{number}")


def _negative(value: Any, where: str) -> Iterator[str]:
    """Yield every number in a record, and in its parts, that is below zero (beyond rounding) or not finite, with its
    place `where`.
    """
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
    "not_held": list,
    "said_by_program": list,
    "flag_sets": (dict, type(None)),
    "tokens": (int, type(None)),
    "padded": dict,
    "eager": bool,
    "learned": (dict, str, type(None)),
}
"""Entries of a plan's provenance that are read again, with their types."""


def _origins(provenance: dict[str, Any]) -> Iterator[str]:
    """Yield problems of the types in the provenance; a wrong type in `_ORIGINS` ends the check. Absent entries are
    allowed.
    """
    for key, kind in _ORIGINS.items():
        if key in provenance and not isinstance(provenance[key], kind):
            yield f"`provenance.{key}` is not of the right type"
            return
    texts = [
        ("xla_flags.flags", (provenance.get("xla_flags") or {}).get("flags", [])),
        ("asked", provenance.get("asked", [])),
    ]
    texts += [
        ("not_held", provenance.get("not_held", [])),
        ("said_by_program", provenance.get("said_by_program", [])),
        ("pinned", [*provenance.get("pinned", {}).values()]),
    ]
    for where, lines in texts:
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            yield f"`provenance.{where}` is no list of text"
    source = provenance.get("source") or {}
    for key, kind in (("program", str), ("entry", str), ("options", dict)):
        if key in source and not isinstance(source[key], kind):
            yield f"`provenance.source.{key}` is not of the right type"


FORMAT = "autoshard-plan"
"""Value of `format` in every plan file."""
MOST_DEPTH = 64
"""Deepest nesting of objects and lists in a plan."""
_MOST_NUMBER = 1e300
"""Absolute value from which on a number in a file counts as damaged."""
_AGAIN = "make it again with `autoshard plan ... --out`"
"""Remedy that errors name."""


@provides("save")
def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan as JSON to a temporary file and rename it to `path`; equal plans give equal bytes.

    The path of the program's file, if there is one, is written relative to the plan's file.

    Raises `UserError` if the directory is missing or cannot be written.
    """
    target = Path(path)
    try:
        text = plan_to_json(dataclasses.replace(plan, provenance=seen_from_file(plan.provenance, target)))
        write_whole(target, text.encode())
    except OSError as error:
        hint = "; give a path in a directory that exists" if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"cannot write the plan to {target}: {error.strerror}{hint}.") from error


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan that `save_plan` wrote, with the path of its program's file relative to the current directory again.

    Raises `UserError` in one sentence if the file is missing, cut short, of another kind, damaged, or written by a
    newer version.
    """
    name = str(path)
    if name.startswith("hf:") or name.lower().endswith((".py", ".mlir", ".stablehlo", ".hlo")):
        raise UserError(f"{path} is a program, not a plan: `autoshard plan {path} --out plan.json` makes one.")
    try:
        text = read_bytes(path).decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read the plan file {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not a plan file (it is not text); {_AGAIN}.") from error
    plan = plan_from_json(text, str(path))
    return dataclasses.replace(plan, provenance=seen_from_here(plan.provenance, path))


def parameter_specs(plan: Plan | str | os.PathLike[str]) -> dict[str, Spec]:
    """Return the specs of a plan's parameters, frozen ones included, by name, as `pin_from` pins them. `plan` may be a
    file, which raises `UserError` as `load_plan` does.
    """
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    return {name: spec for name, spec in plan.arguments.items() if plan.is_weight(name)}


def plan_to_json(plan: Plan) -> str:
    """Return the plan as JSON text: schema and format first, all other keys sorted, arguments and results in order.

    Fields with their `absent` value are left out. Infinite numbers become text.
    """
    fields = [(field, getattr(plan, field.name)) for field in dataclasses.fields(Plan)]
    body = {field.name: value for field, value in fields if field.metadata.get("absent") != value}
    body["arguments"] = [
        {
            "name": name,
            "spec": spec,
            "shape": plan.shapes[name],
            "dtype": plan.dtypes[name],
            "role": plan.roles[name],
        }
        for name, spec in plan.arguments.items()
    ]
    body["results"] = [{"name": name, "spec": spec} for name, spec in plan.results.items()]
    body["mesh"] = [{"axis": axis, "size": size} for axis, size in plan.mesh.items()]
    for key in ("shapes", "dtypes", "roles"):
        del body[key]
    ordered = {"schema": SCHEMA, "format": FORMAT} | {key: _sorted(_encode(body[key])) for key in sorted(body)}
    return json.dumps(ordered, indent=1, allow_nan=False) + "\n"


def _sorted(value: Any) -> Any:
    """Return a JSON value with the keys of all objects sorted, nested ones included; lists keep their order."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _encode(value: Any) -> Any:
    """Return a value of a plan as JSON: records as objects without fields of their `absent` value, tuples as lists,
    numpy scalars as numbers. Floats that are not finite become text.
    """
    if value is None or type(value) in (str, int, bool):
        return value
    if isinstance(value, Spec):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {field.name: _encode(own) for field, own in fields if field.metadata.get("absent", value) != own}
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    item = getattr(value, "item", None)  # numpy scalars have `item`
    return value if item is None else _encode(item())


def plan_from_json(text: str, path: str = "the plan") -> Plan:
    """Parse and check the text of `plan_to_json`; `path` is named in messages.

    Unknown keys are ignored, and absent fields have their defaults. Raises `UserError` in one sentence if the text is
    cut short, of another kind, damaged, or of a newer version.
    """
    try:
        data = parse_json(text)
    except json.JSONDecodeError as error:
        problem = "is cut short" if error.pos >= len(text.rstrip()) or "Unterminated" in error.msg else "is damaged"
        raise UserError(f"{path} {problem} at line {error.lineno} ({error.msg}); {_AGAIN}.") from error
    except ValueError as error:
        raise UserError(f"{path} is no plan ({error}); {_AGAIN}.") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{path} is not a plan file (no `format`: {FORMAT!r} in it); {_AGAIN}.")
    schema = data.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise UserError(f"{path} is damaged: `schema` is {schema!r}, not a number from 1 to {SCHEMA}; {_AGAIN}.")
    if schema > SCHEMA:
        raise UserError(
            f"{path} has schema {schema}, but this version of autoshard reads up to {SCHEMA}: update autoshard."
        )
    if not is_shallow(data, MOST_DEPTH):
        raise UserError(f"{path} is damaged: it is nested too deeply; {_AGAIN}.")
    reader = _PlanReader(path)
    arguments = reader.records(data, "arguments", ("name", "spec", "shape", "dtype", "role"))
    results = reader.records(data, "results", ("name", "spec"))
    mesh = reader.records(data, "mesh", ("axis", "size"))
    values: dict[str, Any] = {
        "mesh": {reader.read(str, row["axis"], "mesh"): reader.read(int, row["size"], "mesh") for row in mesh},
        "arguments": {row["name"]: reader.read(Spec, row["spec"], f"spec of {row['name']}") for row in arguments},
        "results": {row["name"]: reader.read(Spec, row["spec"], f"spec of {row['name']}") for row in results},
        "shapes": {row["name"]: reader.read(tuple[int, ...], row["shape"], "shape") for row in arguments},
        "dtypes": {row["name"]: reader.read(str, row["dtype"], "dtype") for row in arguments},
        "roles": {row["name"]: reader.read(str, row["role"], "role") for row in arguments},
    }
    hints = typing.get_type_hints(Plan)
    for field in dataclasses.fields(Plan):
        if field.name in values:
            continue
        if field.name not in data:
            if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING:
                continue
            raise reader.damaged(f"`{field.name}` is missing")
        values[field.name] = reader.read(hints[field.name], data[field.name], field.name)
    plan = Plan(**values)
    check_plan(plan, reader.damaged)
    return plan


class _PlanReader:
    """Reader that converts JSON values to the types that the records declare, and reports damaged values."""

    def __init__(self, path: str):
        self.path = path

    def damaged(self, what: str) -> UserError:
        """Return the error that a part of the file is damaged; `what` is a clause on the part."""
        return UserError(f"{self.path} is damaged: {what}; {_AGAIN}.")

    def records(self, data: dict[str, Any], key: str, fields: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return the list of objects at `key`, each with exactly these fields, of which the first is a unique name.

        Raises `UserError` for a missing list and for a value of another form.
        """
        rows = data.get(key)
        if not isinstance(rows, list):
            raise self.damaged(f"`{key}` is missing" if rows is None else f"`{key}` is not a list")
        for row in rows:
            if not isinstance(row, dict) or set(row) != set(fields):
                raise self.damaged(f"an entry of `{key}` does not have just the fields {', '.join(fields)}")
        names = [row[fields[0]] for row in rows]
        if any(not isinstance(name, str) for name in names) or len(set(names)) != len(names):
            raise self.damaged(f"`{key}` has a name that is not text or stands twice")
        return rows

    def read(self, kind: Any, value: Any, where: str) -> Any:
        """Convert a JSON value to the type `kind`; `where` names the value in the error.

        Floats may be text for infinity and nan; integers count as floats, and booleans never as numbers. Raises
        `UserError` for a value of another type, and for integers beyond 64 bits.
        """
        origin = typing.get_origin(kind)
        if kind is Any:
            return value
        if origin is types.UnionType:
            if value is None and type(None) in typing.get_args(kind):
                return None
            (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
            return self.read(kind, value, where)
        if kind is Spec:
            return Spec(self.read(tuple[tuple[str, ...], ...], value, where))
        if dataclasses.is_dataclass(kind):
            return self._record(kind, value, where)
        if origin is tuple:
            parts = typing.get_args(kind)
            if isinstance(value, list) and (parts[-1] is ... or len(parts) == len(value)):
                item_kinds = [parts[0]] * len(value) if parts[-1] is ... else parts
                return tuple(self.read(each, item, where) for each, item in zip(item_kinds, value, strict=True))
        elif origin is dict:
            if isinstance(value, dict):
                return {key: self.read(typing.get_args(kind)[1], item, f"{where}.{key}") for key, item in value.items()}
        elif kind is float:
            if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MOST_NUMBER:
                return float(value)
            if value in ("inf", "-inf", "nan"):
                return float(value)
        elif kind is bool or not isinstance(value, bool):
            if isinstance(value, kind) and not (kind is int and abs(value) >= 2**63):
                return value
        raise self.damaged(f"`{where}` is {json.dumps(value)[:60]}, which is not of the right type")

    def _record(self, kind: Any, value: Any, where: str) -> Any:
        """Convert a JSON object to the dataclass `kind`; unknown keys are ignored. Raises `UserError` for another value
        and for an absent field without a default value.
        """
        if not isinstance(value, dict):
            raise self.damaged(f"`{where}` is not a record")
        read = {}
        for name, declared, default in _fields_of(kind):
            if name in value:
                read[name] = self.read(declared, value[name], f"{where}.{name}")
            elif default is dataclasses.MISSING:
                raise self.damaged(f"`{where}.{name}` is missing")
        return kind(**read)


@functools.cache
def _fields_of(kind: Any) -> list[tuple[str, Any, Any]]:
    """Return the name, declared type and default (`MISSING` for none, or for a factory) of a record's fields. The
    result is cached, since Python resolves types slowly.
    """
    hints = typing.get_type_hints(kind)
    return [(field.name, hints[field.name], field.default) for field in dataclasses.fields(kind)]
