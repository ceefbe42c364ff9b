"""Cached keys and values as attention reads them: stacks of all layers, positions and layouts."""

import contextvars
import dataclasses
from typing import Any


_LANES = 128
"""Elements of a TPU register's row."""

active_cache: contextvars.ContextVar[Any] = contextvars.ContextVar("serving cache", default=None)
"""The `ServingCache` of the step that is traced; None outside of serving steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What a layer's attention looks back on, where it lies."""

    keys: Any
    """The keys of all layers [layers, B, K, T, D]."""
    values: Any
    """Their values [layers, B, K, T, E]."""
    layer: Any
    """Which layer of them it is, a scalar."""
    filled: int
    """Places of T that a step is expected to read."""


def query_position() -> Any:
    """Position of the first query among the cached keys; None where keys and queries are the same tokens."""
    cache = active_cache.get()
    return None if cache is None else cache.position


def held_by(key: Any) -> Held | None:
    """The stacks that the keys were read from which a cache's `update` gave last; None if these are no such keys."""
    cache = active_cache.get()
    given = None if cache is None else cache.given
    return given[1] if given is not None and given[0] is key else None


def only_shapes() -> bool:
    """Whether this is a first trace of a serving step, which asks what there is to cache."""
    cache = active_cache.get()
    return cache is not None and not cache.entries


def lies_in_order(shape: tuple[int, ...]) -> bool:
    """Whether a TPU's compiler lays out a cache of this shape row by row."""
    return major_to_minor(shape) == tuple(range(len(shape)))


def major_to_minor(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The order in which a TPU's compiler lays out a cache that it is given, major dim first.

    Row-major, but with positions innermost where a head does not fill the 128 lanes of a register and positions do:
    heads of 64 would take twice their bytes (read off the entries of programs by libtpu 0.0.51).
    """
    order = tuple(range(len(shape)))
    length, head = (-(-size // _LANES) * _LANES / size for size in shape[-2:])
    return order if head <= length else (*order[:-2], order[-1], order[-2])
