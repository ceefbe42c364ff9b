"""Writers of export forms, which the files of this folder and of those in it declare."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from typing import TypeVar

from autoshard.planning import Form, Plan
from autoshard.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class FormWriter:
    """Writer of one form."""

    write: Callable[..., str]
    """Function from a plan and the sentence of its price to text; its third argument is the program, if the form reads
    the program.
    """
    check: Callable[[Plan, Program | None], None] | None
    """Function that refuses plans before their program is opened; it raises `UserError`. None refuses none."""


Write = TypeVar("Write", bound=Callable[..., str])
"""Type of the decorated writer."""

_WRITERS: dict[str, FormWriter] = {}
"""Declared writers by the form's name."""


def writes(form: str, check: Callable[[Plan, Program | None], None] | None = None) -> Callable[[Write], Write]:
    """Return a decorator that declares a function as the writer of the form named `form`, and returns it unchanged.

    `check` refuses plans, as in `FormWriter`.
    """

    def declare(write: Write) -> Write:
        _WRITERS[form] = FormWriter(write, check)
        return write

    return declare


def writer_of(form: Form) -> FormWriter:
    """Return the writer of a form; import all files of this folder first if none of them has declared it yet.

    KeyError if no file declares it.
    """
    if form.name not in _WRITERS:
        folder = importlib.import_module(__package__ or "")
        for file in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
            importlib.import_module(file.name)
    return _WRITERS[form.name]
