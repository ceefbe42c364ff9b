"""Where the program of a plan is: in the plan's file as seen from that file, in memory as seen from here.

So a plan and its program can be moved together, and the bytes of the file depend neither on how the program was named
nor on the directory from which it was planned.
"""

import os
from collections.abc import Callable
from typing import Any

from autoshard.base.files import is_replaced


CONFIGURATION = "hf:"


def seen_from_file(provenance: dict[str, Any], file: str | os.PathLike[str]) -> dict[str, Any]:
    """For the plan's file; a device or a pipe has no place, and is as good as a file here."""
    folder = os.path.dirname(file) if is_replaced(file) else ""
    return _renamed(provenance, lambda path: _from(os.path.realpath(folder or "."), _true(path)))


def seen_from_here(provenance: dict[str, Any], file: str | os.PathLike[str]) -> dict[str, Any]:
    """What is read from the plan's file, for this process: relative where it is below the working directory."""
    folder = os.path.realpath(os.path.dirname(file) or ".")
    try:
        here = os.getcwd()
    except OSError:  # it does not exist any more
        here = ""

    def near(path: str) -> str:
        whole = _join(folder, path)
        below = _from(here, whole) if here else os.pardir
        return whole if below.startswith(os.pardir) else below

    return _renamed(provenance, near)


def is_same_program(one: str, other: str) -> bool:
    """Whether two names of a program mean the same, seen from here."""
    return one == other or [_apart(one)[0], _true(_apart(one)[1])] == [_apart(other)[0], _true(_apart(other)[1])]


def _renamed(provenance: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    source = provenance.get("source")
    if not isinstance(source, dict) or not isinstance(source.get("program"), str):
        return provenance
    kind, path = _apart(source["program"])
    # A bundled configuration has a name, and no place.
    if "\0" in path or not path or (kind and not path.endswith(".json")):
        return provenance
    return provenance | {"source": source | {"program": kind + rename(path).replace(os.sep, "/")}}


def _apart(program: str) -> tuple[str, str]:
    kind = CONFIGURATION if program.startswith(CONFIGURATION) else ""
    return kind, program[len(kind) :]


def _true(path: str) -> str:
    """A path without links on the way; the file itself may be one, as its neighbours are those of the link."""
    return _join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))


def _join(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, path))


def _from(folder: str, path: str) -> str:
    try:
        return os.path.relpath(path, folder)
    except ValueError:  # on another drive
        return path
