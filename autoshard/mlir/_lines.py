"""Where in somebody's source an op comes from, read off its location."""

import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any


def source_line(op: Any) -> str:
    """`file:line` of the innermost frame of an op's location, or an empty string."""
    return next((f"{file}:{line}" for file, line in _frames(op.location)), "")


def code_line(op: Any) -> str:
    """The innermost line that is the user's own, or that of a known model: `model.py:12`, or an empty string.

    Frames of frameworks, and of this package, are passed over; a file of an installed package keeps its path in it. Who
    asked for the program is no line of it.
    """
    for file, line in _frames(op.location):
        if file == _LOWERING:
            return ""
        if shown := _shown(file):
            return f"{shown}:{line}"
    return ""


def _frames(location: Any) -> Iterator[tuple[str, int]]:
    """Files and lines of a location, innermost first."""
    from jaxlib.mlir import ir

    todo = [location]
    while todo:
        location = todo.pop()
        if isinstance(location, ir.CallSiteLoc):
            todo += [location.caller, location.callee]
        elif isinstance(location, ir.NameLoc):
            todo.append(location.child_loc)
        elif isinstance(location, ir.FusedLoc):
            todo += location.locations[:1]
        elif isinstance(location, ir.FileLineColLoc):
            yield location.filename, location.start_line


_PACKAGE = str(pathlib.Path(__file__).parent.parent)
_LOWERING = f"{_PACKAGE}/program/_lower.py"
"""Calls the functions of programs, and is called by whoever wants one."""
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_FRAMEWORK = re.compile(
    r"(jax|jaxlib|optax|flax|equinox|numpy|torch|torchax|torch_xla|autoshard)/|transformers/(?!models/)"
)
_STANDARD = re.compile(r"/lib/python3\.\d+/")


@functools.lru_cache(maxsize=4096)
def _shown(file: str) -> str:
    """A file as it is shown, empty for one that no user wrote."""
    if file in ("-", ""):
        return "line"  # a module file without locations: lines of the text itself
    *_, inside = _INSTALLED.split(file)
    if inside != file:
        return "" if _FRAMEWORK.match(inside) else inside
    own = file.startswith(f"{_PACKAGE}/") or _STANDARD.search(file) or file.startswith("<")
    return "" if own else file.rpartition("/")[2]
