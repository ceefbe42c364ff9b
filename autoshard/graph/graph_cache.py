"""Graphs cached on disk by the hash of their module, as strict rows of JSON."""

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


def cached_graph(module: bytes) -> OpGraph:
    """Return `read_graph(module)`, from the disk cache if it is there.

    If the user registered call rules, the cache is bypassed, since the module does not contain these rules.
    """
    if registrations():
        return read_graph(module)
    key = key_of(hashlib.sha256(module).hexdigest(), _PACKAGES, _SOURCES)
    body = read_entry(_KIND, key)
    if body is not None:
        try:
            return from_json(OpGraph, body)
        except (ValueError, TypeError):
            pass  # the hash matches, but the text is no graph
    graph = read_graph(module)
    write_entry(_KIND, key, to_json(graph).encode())
    return graph


def to_json(record: Any) -> str:
    """Serialise a dataclass of numbers, texts, enums, tuples and dataclasses as JSON text."""
    return json.dumps(record, default=_row, separators=(",", ":"))


def from_json(kind: Any, text: str | bytes) -> Any:
    """Deserialise a record of type `kind` from the text of `to_json`.

    Raises `ValueError` or `TypeError` for any other text.
    """
    return _reader(kind)(json.loads(text))


def _row(record: Any) -> list[Any]:
    """Return a dataclass as the list of its fields' values."""
    return [getattr(record, field.name) for field in dataclasses.fields(record)]


def _same(value: Any) -> Any:
    """Return the value itself: the reader of numbers and texts."""
    return value


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return a function that converts JSON values into values of the type `kind`."""
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
