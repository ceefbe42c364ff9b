"""Saving and loading plans: JSON, the same bytes for the same plan."""

import dataclasses
import functools
import json
import math
import os
import types
import typing
from pathlib import Path
from typing import Any

from autoshard.base.files import write_whole
from autoshard.base.providers import provides
from autoshard.base.reading import is_shallow, parse_json, read_bytes
from autoshard.errors import UserError
from autoshard.plan.record._check import check_plan
from autoshard.plan.record._place import seen_from_file, seen_from_here
from autoshard.plan.record._plan import SCHEMA, Plan
from autoshard.plan.record._spec import Spec


FORMAT = "autoshard-plan"
MOST_DEPTH = 64
"""Of objects and lists in one another, in a plan."""
_MOST_NUMBER = 1e300
_AGAIN = "make it again with `autoshard plan ... --out`"


@provides("save")
def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan as JSON beside `path` and rename it into place; equal plans give equal bytes.

    The program's file, if it has one, is named as seen from the plan's.

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
    """Read a plan that `save_plan` wrote.

    Raises `UserError` in one sentence if the file is missing, cut short, of another kind, damaged, or was
    written by a newer version.
    """
    try:
        text = read_bytes(path).decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read the plan file {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not a plan file (it is not text); {_AGAIN}.") from error
    plan = plan_from_json(text, str(path))
    return dataclasses.replace(plan, provenance=seen_from_here(plan.provenance, path))


def parameter_specs(plan: Plan | str | os.PathLike[str]) -> dict[str, Spec]:
    """Specs of the parameters of a plan, or of a plan file, by name: what `pin_from` pins."""
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    return {name: spec for name, spec in plan.arguments.items() if plan.is_weight(name)}


def plan_to_json(plan: Plan) -> str:
    """The plan as JSON text: the schema number first, all other keys sorted, arguments and results in order."""
    held = [(field, getattr(plan, field.name)) for field in dataclasses.fields(Plan)]
    body = {field.name: value for field, value in held if field.metadata.get("absent") != value}
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
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _encode(value: Any) -> Any:
    if value is None or type(value) in (str, int, bool):
        return value
    if isinstance(value, Spec):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {field.name: _encode(own) for field, own in held if field.metadata.get("absent", value) != own}
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    item = getattr(value, "item", None)  # a numpy scalar has one
    return value if item is None else _encode(item())


def plan_from_json(text: str, path: str = "the plan") -> Plan:
    """Parse and check what `plan_to_json` wrote; `path` is named in messages.

    Raises `UserError` in one sentence if the text is cut short, of another kind, damaged, or of a newer version.
    """
    try:
        data = parse_json(text)
    except json.JSONDecodeError as error:
        whole = "is cut short" if error.pos >= len(text.rstrip()) or "Unterminated" in error.msg else "is damaged"
        raise UserError(f"{path} {whole} at line {error.lineno} ({error.msg}); {_AGAIN}.") from error
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
            if field.default is not dataclasses.MISSING:
                continue
            raise reader.damaged(f"`{field.name}` is missing")
        values[field.name] = reader.read(hints[field.name], data[field.name], field.name)
    plan = Plan(**values)
    check_plan(plan, reader.damaged)
    return plan


class _PlanReader:
    """Turns JSON values into the types that the records declare, or says what is damaged."""

    def __init__(self, path: str):
        self.path = path

    def damaged(self, what: str) -> UserError:
        return UserError(f"{self.path} is damaged: {what}; {_AGAIN}.")

    def records(self, data: dict[str, Any], key: str, fields: tuple[str, ...]) -> list[dict[str, Any]]:
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
    """Name, declared type and default of a record's fields. Asked once: Python is slow to tell types."""
    hints = typing.get_type_hints(kind)
    return [(field.name, hints[field.name], field.default) for field in dataclasses.fields(kind)]
