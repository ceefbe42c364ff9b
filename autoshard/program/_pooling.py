"""Means over windows, as torch takes them: torchax writes their divisors one element of the result after another."""

from collections.abc import Callable, Sequence
from typing import Any


def table() -> dict[Any, Callable[..., Any]]:
    """torch callable -> lowering."""
    import torch

    aten = torch.ops.aten
    return dict.fromkeys((aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d), avg_pool)


def avg_pool(
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil: bool = False,
    counted: bool = True,
    divisor: int | None = None,
) -> Any:
    """`torch.nn.functional.avg_pool1d` to `3d` of [..., *sides]; `counted`: padding counts as elements of a window."""
    import jax
    import numpy as np

    kernel = tuple(kernel)
    strides = tuple(stride) or kernel
    pads = tuple(padding) * (len(kernel) if len(padding) == 1 else 1)
    lead, sides = x.ndim - len(kernel), x.shape[-len(kernel) :]
    sizes: list[int] = []
    around: list[tuple[int, int]] = [(0, 0)] * lead
    shares = np.ones((1,) * len(kernel), np.float32)
    for dim, (side, width, step, pad) in enumerate(zip(sides, kernel, strides, pads, strict=True)):
        count = _windows(side, width, step, pad, ceil)
        size = min(width, side + 2 * pad) if count == 1 else width  # what is outside of all padding adds nothing
        sizes.append(size)
        around.append((pad, (count - 1) * step + size - side - pad))
        begin = np.arange(count) * step - pad
        end = np.minimum(begin + width, side + pad)
        held = end - begin if counted else np.minimum(end, side) - np.maximum(begin, 0)
        shares = shares * held.reshape(-1, *([1] * (len(kernel) - 1 - dim)))
    whole = ((1,) * lead, (1,) * lead)
    zero = np.zeros((), x.dtype)  # a traced one would hide from JAX that these are sums
    total = jax.lax.reduce_window(x, zero, jax.lax.add, whole[0] + tuple(sizes), whole[1] + strides, around)
    return (total / (shares if divisor is None else divisor)).astype(x.dtype)


def _windows(side: int, width: int, step: int, pad: int, ceil: bool) -> int:
    """How many windows there are along a side; with `ceil` one may begin within what there is and end beyond."""
    room = side + 2 * pad - width
    if not ceil:
        return room // step + 1
    count = -(-room // step) + 1
    return count - 1 if (count - 1) * step >= side + pad else count
