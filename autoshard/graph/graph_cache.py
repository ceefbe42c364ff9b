"""Graphs cached on disk by the module they were read from, as strict rows of JSON."""

import dataclasses
import enum
import functools
import hashlib
import json
import types
import typing
from collections.abc import Callable
from typing import Any

from autoshard.base.call_rules import registrations
from autoshard.base.disk_cache import key_of, read_entry, write_entry
from autoshard.graph.read_module import read_graph
from autoshard.graph.records import OpGraph


_KIND = "graph"
_PACKAGES = ("jax", "jaxlib")
_SOURCES = ("graph/**/*.py", "mlir/*.py", "base/call_rules.py", "base/disk_cache.py")


def kept_graph(module: bytes) -> OpGraph:
    """`read_graph`, from disk where it is there; rules that were registered are in no module: with any, read anew."""
    if registrations():
        return read_graph(module)
    key = key_of(hashlib.sha256(module).hexdigest(), _PACKAGES, _SOURCES)
    body = read_entry(_KIND, key)
    if body is not None:
        try:
            return from_json(OpGraph, body)
        except (ValueError, TypeError):
            pass  # not what was written here, whatever its hash says
    graph = read_graph(module)
    write_entry(_KIND, key, to_json(graph).encode())
    return graph


def to_json(record: Any) -> str:
    """A dataclass of numbers, texts, enums, tuples and dataclasses as JSON text."""
    return json.dumps(record, default=_row, separators=(",", ":"))


def from_json(kind: Any, text: str | bytes) -> Any:
    """The record of type `kind` that `to_json` wrote; raises `ValueError` or `TypeError` for any other text."""
    return _reader(kind)(json.loads(text))


def _row(record: Any) -> list[Any]:
    return [getattr(record, field.name) for field in dataclasses.fields(record)]


def _same(value: Any) -> Any:
    return value


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What turns JSON values into values of a type."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        (part,) = (_reader(part) for part in parts if part is not type(None))
        return lambda value: None if value is None else part(value)
    if origin is tuple and parts[-1] is ...:
        each = _reader(parts[0])
        return tuple if each is _same else lambda value: tuple(map(each, value))
    if origin is tuple:
        readers = [_reader(part) for part in parts]
        return lambda value: tuple(read(item) for read, item in zip(readers, value, strict=True))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        readers = [_reader(hints[field.name]) for field in dataclasses.fields(kind)]
        return lambda value: kind(*[read(item) for read, item in zip(readers, value, strict=True)])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    return _same
