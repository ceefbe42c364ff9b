"""Counters of the model FLOPs of a forward pass while it is traced, and of the FLOPs that its backward pass saves.

A matmul costs its FLOPs again in the backward pass for each of its two operands that needs a gradient. Every operand
counts as needing one unless `spared` says otherwise. A frozen weight needs no gradient, nor does a value computed from
frozen weights alone.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence


_scopes: list[list[float]] = []
_without: contextvars.ContextVar[int] = contextvars.ContextVar("operands without gradients", default=0)


def record(flops: float) -> None:
    """Add the FLOPs of one matmul to the innermost open count; a no-op outside of one.

    They are added to its spared FLOPs once for each operand that needs no gradient (`spared`).
    """
    if _scopes:
        _scopes[-1][0] += flops
        _scopes[-1][1] += flops * _without.get()


def record_matmul(out_shape: Sequence[int], contracted: int) -> None:
    """Record a matmul with result `out_shape` that contracts `contracted` elements: two FLOPs for each."""
    record(2.0 * math.prod(out_shape) * contracted)


def record_count(count: Sequence[float], times: int = 1) -> None:
    """Add a closed count, multiplied by `times`, to the innermost open one."""
    if _scopes:
        _scopes[-1][0] += count[0] * times
        _scopes[-1][1] += count[1] * times


@contextlib.contextmanager
def counting() -> Iterator[list[float]]:
    """Count the FLOPs that are traced inside; yields the list `[flops, spared]`.

    `spared` are FLOPs of gradients that no backward pass needs. Nothing is passed on to an enclosing count.
    """
    scope = [0.0, 0.0]
    _scopes.append(scope)
    try:
        yield scope
    finally:
        _scopes.pop()


@contextlib.contextmanager
def spared(operands: int) -> Iterator[None]:
    """Set the number of operands (0, 1 or 2) of every matmul traced inside that need no gradient."""
    token = _without.set(operands)
    try:
        yield
    finally:
        _without.reset(token)
