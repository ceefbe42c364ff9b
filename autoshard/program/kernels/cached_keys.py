"""Cached keys and values for attention: stacks of all layers, with positions and layouts."""

import contextvars
import dataclasses
from typing import Any


_LANES = 128
"""Number of elements in a row of a TPU's register."""

active_cache: contextvars.ContextVar[Any] = contextvars.ContextVar("serving cache", default=None)
"""The `ServingCache` of the step that is traced; None outside of serving steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class CachedKeys:
    """The cached keys and values that one layer's attention reads, as stacks of all layers."""

    keys: Any
    """Keys of all layers, [layers, B, K, T, D]."""
    values: Any
    """Values of all layers, [layers, B, K, T, E]."""
    layer: Any
    """Number of the layer in the stacks, a scalar."""
    filled: int
    """Number of places among T that a step is expected to read."""


def query_position() -> Any:
    """Return the position of the first query among the cached keys; None outside of serving steps.

    None means that keys and queries are the same tokens.
    """
    cache = active_cache.get()
    return None if cache is None else cache.position


def stacks_of(key: Any) -> CachedKeys | None:
    """Return the stacks from which the active cache's last `update` read `key`, this very object; None for others."""
    cache = active_cache.get()
    given = None if cache is None else cache.given
    return given[1] if given is not None and given[0] is key else None


def only_shapes() -> bool:
    """Return True in the first trace of a serving step, which only needs the shapes to cache: it has no entries yet."""
    cache = active_cache.get()
    return cache is not None and not cache.entries


def lies_in_order(shape: tuple[int, ...]) -> bool:
    """Return True if a TPU's compiler lays out a cache of this shape [..., positions, head] row by row."""
    return major_to_minor(shape) == tuple(range(len(shape)))


def major_to_minor(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims of a cache [..., positions, head] in the order of a TPU's layout, major dim first.

    The innermost dim is padded to a multiple of the 128 lanes of a register. The order is row-major, except that
    positions are innermost if their relative padding is less than a head's. Heads of 64 would otherwise need twice
    their bytes. Evidence: docs/compiler_behaviour.md, "Layout of a key-value cache that a program receives".
    """
    order = tuple(range(len(shape)))
    length, head = (-(-size // _LANES) * _LANES / size for size in shape[-2:])
    return order if head <= length else (*order[:-2], order[-1], order[-2])
