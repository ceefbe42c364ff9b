"""Counting the model FLOPs of a forward pass while it is traced, and those that its backward pass is spared.

A matmul costs its FLOPs once more in the backward pass for each of its two operands that needs a gradient. Operands are
taken to need one unless `spared` says otherwise: a frozen weight needs none, nor does a value computed of such alone.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator, Sequence


_scopes: list[list[float]] = []
_without: contextvars.ContextVar[int] = contextvars.ContextVar("operands without gradients", default=0)


def record(flops: float) -> None:
    """Add the FLOPs of one matmul to the innermost open count; a no-op outside of one."""
    if _scopes:
        _scopes[-1][0] += flops
        _scopes[-1][1] += flops * _without.get()


def record_matmul(out_shape: Sequence[int], contracted: int) -> None:
    """A matmul with result `out_shape` summing over `contracted` elements: one multiply and one add each."""
    record(2.0 * math.prod(out_shape) * contracted)


def record_count(count: Sequence[float], times: int = 1) -> None:
    """Add a count that is closed, `times` over, to the innermost open one."""
    if _scopes:
        _scopes[-1][0] += count[0] * times
        _scopes[-1][1] += count[1] * times


@contextlib.contextmanager
def counting() -> Iterator[list[float]]:
    """Count what is traced inside; the value is `[flops, spared]`, the FLOPs and those that no backward pass needs.

    Nothing is passed on to an enclosing count.
    """
    scope = [0.0, 0.0]
    _scopes.append(scope)
    try:
        yield scope
    finally:
        _scopes.pop()


@contextlib.contextmanager
def spared(operands: int) -> Iterator[None]:
    """While inside, so many operands of every matmul need no gradient: 0, 1 or 2."""
    token = _without.set(operands)
    try:
        yield
    finally:
        _without.reset(token)
