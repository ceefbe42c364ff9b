"""Device profiles by JAX's profiler, and a reader of its XSpace files."""

import contextlib
import dataclasses
import pathlib
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autoshard.base.files import write_whole
from autoshard.base.processes import scratch_folder
from autoshard.errors import UserError


@contextlib.contextmanager
def profiled(path: pathlib.Path) -> Iterator[None]:
    """Record a profile of the `with` block and write it to `path` as a gzipped Chrome trace.

    Python's own calls are left out, and nothing is written if the block raises. Raises `UserError` if the profiler
    wrote nothing.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with scratch_folder("profile") as folder:
        with jax.profiler.trace(str(folder), profiler_options=options):
            yield
        traces = sorted(folder.rglob("*.trace.json.gz"))
        if not traces:
            raise UserError("JAX's profiler wrote no trace here; measure without --profile.")
        write_whole(path, traces[0].read_bytes())


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One event of an XSpace file."""

    plane: str
    """Name of the plane: a device, or the host."""
    line: str
    """Name of the line in the plane: a stream or a thread."""
    name: str
    """Name of the event, such as an HLO instruction."""
    start_ns: float
    """Start in nanoseconds: the line's start plus the event's offset."""
    duration_ns: float
    """Duration in nanoseconds; 0 for an instant."""
    stats: Mapping[str, Any]
    """Statistic's name -> its value: number, text or bytes."""


def events_in(file: Path) -> Iterator[Event]:
    """Yield every event of an XSpace file, plane by plane and line by line. Raises `ValueError`, while iterating, if it
    is no XSpace.
    """
    try:
        for number, plane in _fields(memoryview(file.read_bytes())):
            if number == 1:
                yield from _plane(plane)
    except (ValueError, IndexError, struct.error, TypeError) as error:
        raise ValueError(f"{file} is no profile: {error}") from error


def _plane(data: Any) -> Iterator[Event]:
    """Yield the events of one plane; `data` is an encoded `XPlane`, whose tables name events and statistics."""
    name, lines = "", []
    names: dict[int, dict[int, str]] = {4: {}, 5: {}}  # names of events (4) and of statistics (5)
    for number, value in _fields(data):
        if number == 2:
            name = _text(value)
        elif number == 3:
            lines.append(value)
        elif number in names:
            entry = dict(_fields(value))
            names[number][entry.get(1, 0)] = _text(dict(_fields(entry.get(2, b""))).get(2, b""))
    for line in lines:
        yield from _line(name, line, names[4], names[5])


def _line(plane: str, data: Any, names: Mapping[int, str], stat_names: Mapping[int, str]) -> Iterator[Event]:
    """Yield the events of one line of a plane.

    - `plane`: name of the plane.
    - `data`: encoded `XLine`.
    - `names`, `stat_names`: names of events and of statistics by id; an unknown id gives an empty name.
    """
    name, began_ns, events = "", 0, []
    for number, value in _fields(data):
        if number == 2:
            name = _text(value)
        elif number == 3:
            began_ns = value
        elif number == 4:
            events.append(value)
    for event in events:
        known: dict[int, int] = {}
        stats: dict[str, Any] = {}
        for number, value in _fields(event):
            if number == 4:
                key, content = _stat(value, stat_names)
                stats[key] = content
            else:
                known[number] = value
        # Field numbers are those of XEvent: 1 is the name's id, 2 the offset and 3 the duration in picoseconds, 4 a
        # statistic.
        start_ns = began_ns + known.get(2, 0) / 1e3
        yield Event(plane, name, names.get(known.get(1, 0), ""), start_ns, known.get(3, 0) / 1e3, stats)


def _stat(data: Any, names: Mapping[int, str]) -> tuple[str, Any]:
    """Return the name and value of one encoded `XStat`: a float, an integer, a text or bytes; None without a value.

    A value that refers to another statistic's name is that name.
    """
    key, content = "", None
    for number, value in _fields(data):
        match number:
            # Field numbers are those of XStat: 1 is the name's id, 2 a double, 3 unsigned, 4 signed, 5 text, 6 bytes, 7
            # a name's id.
            case 1:
                key = names.get(value, "")
            case 2:
                content = struct.unpack("<d", value)[0]
            case 3:
                content = value
            case 4:
                content = value - (1 << 64) if value >> 63 else value
            case 5:
                content = _text(value)
            case 6:
                content = bytes(value)
            case 7:
                content = names.get(value, "")
    return key, content


def _text(value: Any) -> str:
    """Decode UTF-8 bytes."""
    return bytes(value).decode()


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of an encoded protobuf message, in file order.

    A varint is a whole number, unsigned; all other types are their raw bytes. Raises `ValueError` for an unknown
    wire type and for raw bytes that are cut off, and `IndexError` for a varint that is cut off.
    """
    place, end = 0, len(data)
    while place < end:
        tag, place = _varint(data, place)
        kind = tag & 7
        if kind == 0:
            value, place = _varint(data, place)
        else:
            if kind == 2:
                size, place = _varint(data, place)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                raise ValueError(f"a field has the unknown wire type {kind}")
            if place + size > end:
                raise ValueError("it ends in the middle of a field")
            value, place = data[place : place + size], place + size
        yield tag >> 3, value


def _varint(data: Any, place: int) -> tuple[int, int]:
    """Decode the unsigned variable-length number at `place`; return it and the position after it. Raises `IndexError`
    past the end.
    """
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
