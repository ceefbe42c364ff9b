"""Counting the model FLOPs of a forward pass while it is traced."""

import contextlib
import math
from collections.abc import Iterator, Sequence


_scopes: list[list[float]] = []


def record(flops: float) -> None:
    """Add the FLOPs of one matmul to the innermost open count; a no-op outside of one."""
    if _scopes:
        _scopes[-1][0] += flops


def record_matmul(out_shape: Sequence[int], contracted: int) -> None:
    """A matmul with result `out_shape` summing over `contracted` elements: one multiply and one add each."""
    record(2.0 * math.prod(out_shape) * contracted)


@contextlib.contextmanager
def counting() -> Iterator[list[float]]:
    """Count what is traced inside; the value is `[flops]`. Nothing is passed on to an enclosing count."""
    scope = [0.0]
    _scopes.append(scope)
    try:
        yield scope
    finally:
        _scopes.pop()
