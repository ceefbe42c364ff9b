"""Means and maxima over windows, as torch takes them.

torchax writes divisors of means one element of the result after another, and where a maximum is has no gradient there.
"""

from collections.abc import Callable, Sequence
from typing import Any


def pooling_table() -> dict[Any, Callable[..., Any]]:
    """torch callable -> lowering."""
    import torch

    aten = torch.ops.aten
    means = (aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d)
    maxima = (aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)
    adaptive = (aten.adaptive_max_pool2d, aten.adaptive_max_pool3d)
    found = dict.fromkeys(means, avg_pool) | dict.fromkeys(maxima, max_pool_with_indices)
    return found | dict.fromkeys(adaptive, adaptive_max_pool)


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


def max_pool_with_indices(
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1,
    ceil: bool = False,
) -> Any:
    """`torch.nn.functional.max_pool2d` or `3d` of [..., *sides] with `return_indices`: maxima, and where each is."""
    import jax
    import jax.numpy as jnp
    from torchax.ops import jaten

    found: Any = jaten._aten_max_pool2d_with_indices
    _, indices = found(jax.lax.stop_gradient(x), kernel, stride, padding, dilation, ceil)
    flat = x.reshape(*x.shape[: x.ndim - len(kernel)], -1)
    places = indices.reshape(*flat.shape[:-1], -1)
    return jnp.take_along_axis(flat, places, axis=-1).reshape(indices.shape), indices


def adaptive_max_pool(x: Any, sizes: Sequence[int]) -> Any:
    """`torch.nn.functional.adaptive_max_pool2d` or `3d` of [..., *sides]: maxima, and where each is."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    lead, sides = x.shape[: x.ndim - len(sizes)], x.shape[x.ndim - len(sizes) :]
    places, held = np.zeros((1,) * 2 * len(sizes), np.int64), np.ones((1,) * 2 * len(sizes), bool)
    for dim, (side, size) in enumerate(zip(sides, sizes, strict=True)):
        begin, end = np.arange(size) * side // size, -(-(np.arange(size) + 1) * side // size)
        within = begin[:, None] + np.arange((end - begin).max())
        shape = [1] * 2 * len(sizes)
        shape[dim], shape[dim + len(sizes)] = within.shape
        places = places * side + np.minimum(within, side - 1).reshape(shape)
        held = held & (within < end[:, None]).reshape(shape)
    places, held = (np.broadcast_to(each, np.broadcast_shapes(places.shape, held.shape)) for each in (places, held))
    windows, mask = places.reshape(*sizes, -1), held.reshape(*sizes, -1)
    flat = x.reshape(*lead, -1)
    seen = jnp.where(mask, jax.lax.stop_gradient(flat)[..., windows], -jnp.inf)
    best = jnp.argmax(seen, axis=-1)
    indices = jnp.take_along_axis(jnp.broadcast_to(windows, seen.shape), best[..., None], axis=-1)[..., 0]
    found = jnp.take_along_axis(flat, indices.reshape(*lead, -1), axis=-1)
    return found.reshape(indices.shape), indices


def _windows(side: int, width: int, step: int, pad: int, ceil: bool) -> int:
    """How many windows there are along a side; with `ceil` one may begin within what there is and end beyond."""
    room = side + 2 * pad - width
    if not ceil:
        return room // step + 1
    count = -(-room // step) + 1
    return count - 1 if (count - 1) * step >= side + pad else count
