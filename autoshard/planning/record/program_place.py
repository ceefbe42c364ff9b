"""Place of a plan's program: a path relative to the plan's file in that file, and relative to this process in memory.

A plan and its program can therefore be moved together. The bytes of the file depend neither on the name that the user
gave the program nor on the working directory.
"""

import os
from collections.abc import Callable
from typing import Any

from autoshard.base.files import is_replaced


CONFIGURATION = "hf:"
"""Prefix of the name of a Hugging Face configuration: a bundled one's name, or the path of a `.json` file."""


def seen_from_file(provenance: dict[str, Any], file: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a provenance with the program's path relative to the folder of the plan's file, for writing.

    `file` is the plan's path. A device or a pipe has no folder, so the path is then relative to the working directory.
    """
    folder = os.path.dirname(file) if is_replaced(file) else ""
    return _renamed(provenance, lambda path: _from(os.path.realpath(folder or "."), _true(path)))


def seen_from_here(provenance: dict[str, Any], file: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a provenance from the plan's file with the program's path as this process opens it.

    - `provenance`: as stored in the file, with the path relative to the file's folder.
    - `file`: path of the plan's file.

    A path below the working directory becomes relative to it, any other path absolute.
    """
    folder = os.path.realpath(os.path.dirname(file) or ".")
    try:
        here = os.getcwd()
    except OSError:  # the working directory was removed
        here = ""

    def near(path: str) -> str:
        """Return a path relative to the working directory if it is below, else absolute."""
        absolute = _join(folder, path)
        relative = _from(here, absolute) if here else os.pardir
        return absolute if relative.startswith(os.pardir) else relative

    return _renamed(provenance, near)


def is_same_program(one: str, other: str) -> bool:
    """Return True if two names of programs are equal, or have one prefix and paths that are equal without links.

    Links are resolved in folders only, and relative paths start in the working directory.
    """
    return one == other or [_apart(one)[0], _true(_apart(one)[1])] == [_apart(other)[0], _true(_apart(other)[1])]


def _renamed(provenance: dict[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return a copy of a provenance with the program's path changed by `rename`, written with `/`.

    A provenance without a path is returned as it is: no source, a bundled configuration, or a name with a NUL.
    """
    source = provenance.get("source")
    if not isinstance(source, dict) or not isinstance(source.get("program"), str):
        return provenance
    kind, path = _apart(source["program"])
    # A bundled configuration has a name but no path.
    if "\0" in path or not path or (kind and not path.endswith(".json")):
        return provenance
    return provenance | {"source": source | {"program": kind + rename(path).replace(os.sep, "/")}}


def _apart(program: str) -> tuple[str, str]:
    """Return the prefix `hf:` (empty if there is none) and the rest of a program's name."""
    kind = CONFIGURATION if program.startswith(CONFIGURATION) else ""
    return kind, program[len(kind) :]


def _true(path: str) -> str:
    """Return an absolute path whose folder contains no links.

    The file may be a link and stays one, as the files next to it are those of the link.
    """
    return _join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))


def _join(folder: str, path: str) -> str:
    """Return the normalised path of a file in a folder."""
    return os.path.normpath(os.path.join(folder, path))


def _from(folder: str, path: str) -> str:
    """Return a path relative to a folder, or the path unchanged if it is on another drive."""
    try:
        return os.path.relpath(path, folder)
    except ValueError:  # on another drive
        return path
