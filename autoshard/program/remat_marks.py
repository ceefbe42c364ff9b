"""Values of a layer that a remat policy may name, recorded and marked while the layer is traced.

They are the layer's input (`input`), the input of attention's last projection (`context`), and the results of matmuls.
A matmul's result has the path of its module as its name (`self_attn.q_proj`). Any end of that path that follows a dot
names it too. A value that no policy names is left unmarked, so marks change no program.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autoshard.errors import UserError


INPUT, CONTEXT = "input", "context"
"""Names of the layer's input, and of the input of attention's last projection."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """The names to mark in the layer that is traced, and all names that it has."""

    names: Sequence[str]
    found: dict[str, None]


_layer: contextvars.ContextVar[_Layer | None] = contextvars.ContextVar("layer whose values are marked", default=None)


def chosen_name(path: str, names: Iterable[str]) -> str | None:
    """Return the longest of `names` that is the value's path or an end of it; None if there is none."""
    fitting = [name for name in names if path == name or path.endswith(f".{name}")]
    return max(fitting, key=len, default=None)


def mark_of(path: str) -> str | None:
    """Return the name to mark the value at `path` with, or None for no mark and outside of `naming`.

    The path is recorded as a value of the layer.
    """
    layer = _layer.get()
    if layer is None:
        return None
    layer.found.setdefault(path)
    return chosen_name(path, layer.names)


def mark(value: Any, path: str) -> Any:
    """Return a JAX value marked with `checkpoint_name` if the layer's policy names it, else unchanged."""
    name = mark_of(path)
    if name is None:
        return value
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(value, name)


@contextlib.contextmanager
def naming(names: Sequence[str], found: dict[str, None]) -> Iterator[None]:
    """Mark the values that `names` refer to while inside, and record in `found` the paths of all values."""
    token = _layer.set(_Layer(names, found))
    try:
        yield
    finally:
        _layer.reset(token)


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Return for the path of each value its shortest end, cut at dots, that refers to no other value."""
    known = list(paths)
    shortest = {}
    for path in known:
        pieces = path.split(".")
        ends = [".".join(pieces[k:]) for k in reversed(range(len(pieces)))]
        shortest[path] = next(e for e in ends if e == path or not any(o != path and chosen_name(o, [e]) for o in known))
    return shortest


def check_names(remat: str, names: Iterable[str], found: Iterable[str], what: str) -> None:
    """Raise `UserError` for the first of `names` that refers to no value of the model `what`.

    `found` are the paths of the values, and `remat` is the policy's text in the error.
    """
    known = list(found)
    for name in names:
        if not any(chosen_name(path, [name]) for path in known):
            values = ", ".join(sorted(short_names(known).values()))
            there = f"its layers have {values}" if known else "no layers were found in it"
            raise UserError(f"remat `{remat}` names `{name}`, which is no value of `{what}`: {there}.")
