"""Values of a layer that a remat policy may name: found while the layer is traced, and marked where a policy does.

They are the layer's input (`input`), what attention gives before its last projection (`context`), and the results of
matmuls, called after the module that made them (`self_attn.q_proj`; any end of it from a dot on names it too). A value
that no policy names is left as it is, so that marks change no program.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from autoshard.errors import UserError


INPUT, CONTEXT = "input", "context"


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    names: Sequence[str]
    found: dict[str, None]


_layer: contextvars.ContextVar[_Layer | None] = contextvars.ContextVar("layer whose values are marked", default=None)


def chosen_name(path: str, names: Iterable[str]) -> str | None:
    """Which of `names` a value is meant by: the longest that is its path or an end of it; None if none is."""
    fitting = [name for name in names if path == name or path.endswith(f".{name}")]
    return max(fitting, key=len, default=None)


def mark_of(path: str) -> str | None:
    """The name to mark a value with that is made now; None for none. It is noted that there is such a value."""
    layer = _layer.get()
    if layer is None:
        return None
    layer.found.setdefault(path)
    return chosen_name(path, layer.names)


def mark(value: Any, path: str) -> Any:
    """A JAX value of a layer, marked where the layer's policy names it."""
    name = mark_of(path)
    if name is None:
        return value
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(value, name)


@contextlib.contextmanager
def naming(names: Sequence[str], found: dict[str, None]) -> Iterator[None]:
    """Mark the values that `names` mean while inside, and record in `found` every value that a policy could name."""
    token = _layer.set(_Layer(names, found))
    try:
        yield
    finally:
        _layer.reset(token)


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """For the path of each value its shortest end that means no other of them."""
    known = list(paths)
    found = {}
    for path in known:
        pieces = path.split(".")
        ends = [".".join(pieces[k:]) for k in reversed(range(len(pieces)))]
        found[path] = next(e for e in ends if e == path or not any(o != path and chosen_name(o, [e]) for o in known))
    return found


def check_names(remat: str, names: Iterable[str], found: Iterable[str], what: str) -> None:
    """Raises `UserError` for a name that means no value of the model `what`."""
    known = list(found)
    for name in names:
        if not any(chosen_name(path, [name]) for path in known):
            values = ", ".join(sorted(short_names(known).values()))
            there = f"its layers have {values}" if known else "no layers were found in it"
            raise UserError(f"remat `{remat}` names `{name}`, which is no value of `{what}`: {there}.")
