"""JAX lowerings of torch's pooling layers, as window reductions that XLA partitions along space."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.errors import UserError


def pooling_table() -> dict[Any, Callable[..., Any]]:
    """Return lowerings of pooling and unpooling by torch callable, without adaptive averages."""
    import torch

    aten, functional = torch.ops.aten, torch.nn.functional
    means = {1: aten.avg_pool1d, 2: aten.avg_pool2d, 3: aten.avg_pool3d}
    maxima = {2: aten.max_pool2d_with_indices, 3: aten.max_pool3d_with_indices}
    adaptive = (aten.adaptive_max_pool2d, aten.adaptive_max_pool3d)
    unpooled = (aten.max_unpool2d, aten.max_unpool3d)
    table: dict[Any, Callable[..., Any]] = {each: functools.partial(avg_pool, rank) for rank, each in means.items()}
    table |= {each: functools.partial(max_pool_with_indices, rank) for rank, each in maxima.items()}
    return (
        table
        | dict.fromkeys(adaptive, adaptive_max_pool)
        | dict.fromkeys(unpooled, max_unpool)
        | dict.fromkeys((torch.max_pool2d, functional.max_pool2d), max_pool2d)
    )


def avg_pool(
    rank: int,
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil: bool = False,
    counted: bool = True,
    divisor: int | None = None,
) -> Any:
    """Lower `torch.nn.functional.avg_pool1d` to `3d`, of rank 1 to 3, for [..., *sides].

    - `kernel`, `stride`, `padding`: one number, or one for each side; without a stride it is the kernel.
    - `ceil`: a window may end beyond the padding.
    - `counted`: padding counts as elements of a window, up to its end.
    - `divisor`: divisor of each window's sum; None for its number of elements.
    """
    import jax
    import numpy as np

    kernel, pads = _each(kernel, rank), _each(padding, rank)
    strides = _each(stride, rank) or kernel
    lead, sides = x.ndim - rank, x.shape[-rank:]
    sizes: list[int] = []
    around: list[tuple[int, int]] = [(0, 0)] * lead
    shares = np.ones((1,) * rank, np.float32)
    for dim, (side, width, step, pad) in enumerate(zip(sides, kernel, strides, pads, strict=True)):
        count = _windows(side, width, step, pad, ceil)
        size = min(width, side + 2 * pad) if count == 1 else width  # elements beyond the padding add nothing
        sizes.append(size)
        around.append((pad, (count - 1) * step + size - side - pad))
        begin = np.arange(count) * step - pad
        end = np.minimum(begin + width, side + pad)
        elements = end - begin if counted else np.minimum(end, side) - np.maximum(begin, 0)
        shares = shares * elements.reshape(-1, *([1] * (rank - 1 - dim)))
    ones = ((1,) * lead, (1,) * lead)
    zero = np.zeros((), x.dtype)  # a traced zero would hide the sum from JAX
    total = jax.lax.reduce_window(x, zero, jax.lax.add, ones[0] + tuple(sizes), ones[1] + strides, around)
    return (total / (shares if divisor is None else divisor)).astype(x.dtype)


def max_pool2d(
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Lower `torch.max_pool2d` as one window reduction, which XLA differentiates and partitions along space.

    XLA has no derivative of dilated windows, so that these are gathered by index. Without a stride it is the kernel.

    Raises `UserError` if indices are to be returned.
    """
    import jax

    if return_indices:
        raise UserError(
            "max_pool2d with `return_indices=True` has no lowering that can be split; pool without indices."
        )
    if max(_each(dilation, 2)) > 1:
        return max_pool_with_indices(2, x, kernel_size, stride, padding, dilation, ceil_mode)[0]
    return jax.lax.reduce_window(
        x, _lowest(x.dtype), jax.lax.max, **_geometry(2, x, kernel_size, stride, padding, dilation, ceil_mode)
    )


def max_pool_with_indices(
    rank: int,
    x: Any,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil: bool = False,
) -> Any:
    """Lower `torch.nn.functional.max_pool2d` or `3d`, of rank 2 or 3, for [..., *sides].

    Returns the maxima and their flat indices in the sides without padding. The first of equal elements wins, and the
    last NaN. Without a stride it is the kernel.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    sides = x.shape[-rank:]
    count = math.prod(sides)
    places = jnp.broadcast_to(jnp.arange(count).reshape(sides), x.shape)

    def larger(one: Any, other: Any) -> Any:
        """Return the winner of two pairs (value, flat index)."""
        (value, place), (value2, place2) = one, other
        nan, nan2 = value != value, value2 != value2
        first = (value > value2) | (value == value2) & (place < place2)
        first = jnp.where(nan, ~nan2 | (place > place2), first & ~nan2)
        return jnp.where(first, value, value2), jnp.where(first, place, place2)

    beyond = np.asarray(count, places.dtype)[()]  # padding loses against elements of the lowest value
    _, indices = jax.lax.reduce_window(
        (jax.lax.stop_gradient(x), places),
        (_lowest(x.dtype), beyond),
        larger,
        **_geometry(rank, x, kernel, stride, padding, dilation, ceil),
    )
    flat = x.reshape(*x.shape[: x.ndim - rank], -1)
    maxima = jnp.take_along_axis(flat, indices.reshape(*flat.shape[:-1], -1), axis=-1)
    return maxima.reshape(indices.shape), indices


def max_unpool(x: Any, indices: Any, sizes: Sequence[int], *_: Any) -> Any:
    """Lower `torch.nn.functional.max_unpool2d` or `3d`, which writes `x` to flat indices of zeros [..., *sizes].

    Strides and padding, which follow the sizes, are ignored.
    """
    import jax.numpy as jnp

    lead = x.shape[: x.ndim - len(sizes)]
    zeros = jnp.zeros((*lead, math.prod(sizes)), x.dtype)
    flat = jnp.put_along_axis(zeros, indices.reshape(*lead, -1), x.reshape(*lead, -1), axis=-1, inplace=False)
    return flat.reshape(*lead, *sizes)


def _geometry(rank: int, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> dict[str, Any]:
    """Return the arguments of `jax.lax.reduce_window` for the windows of a max pool over the last `rank` dims.

    The padding ends with the last window if that ends beyond the side. `ceil` is as in `_windows`.
    """
    window, pads, gaps = (_each(each, rank) for each in (kernel, padding, dilation))
    steps = _each(stride, rank) or window
    edges = []
    for side, width, step, pad, gap in zip(x.shape[-rank:], window, steps, pads, gaps, strict=True):
        reach = gap * (width - 1) + 1
        last = (_windows(side, reach, step, pad, ceil) - 1) * step + reach - pad
        # JAX differentiates no windows with a negative padding; a further window would not fit anyway.
        edges.append((pad, max(last - side, 0)))
    lead = (1,) * (x.ndim - rank)
    return {
        "window_dimensions": lead + window,
        "window_strides": lead + steps,
        "padding": ((0, 0),) * len(lead) + tuple(edges),
        "window_dilation": lead + gaps,
    }


def _each(value: Any, rank: int) -> tuple[int, ...]:
    """Return one number for each of `rank` sides from one number or a sequence; empty if `value` is None or empty."""
    values = () if value is None else tuple(value) if isinstance(value, Sequence) else (value,)
    return values * rank if len(values) == 1 else values


def _lowest(dtype: Any) -> Any:
    """Return the lowest value of a dtype as a numpy scalar: -inf for floats, the minimum for whole numbers."""
    import jax.numpy as jnp
    import numpy as np

    lowest = -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min
    return np.asarray(lowest, dtype)[()]


def _windows(side: int, width: int, step: int, pad: int, ceil: bool) -> int:
    """Return the number of windows along a side, with `pad` elements on each end; only windows inside these count.

    With `ceil` a window may start inside the side or its front padding, and end beyond.
    """
    room = side + 2 * pad - width
    if not ceil:
        return room // step + 1
    count = -(-room // step) + 1
    return count - 1 if (count - 1) * step >= side + pad else count


def adaptive_avg_pool(pool: Callable[..., Any]) -> Callable[..., Any]:
    """Return the lowering of `torch.nn.functional.adaptive_avg_pool2d` or `3d`.

    It is torchax's `pool` if no size is zero, and otherwise an empty array.
    """

    def run(x: Any, sizes: Sequence[int]) -> Any:
        """Return the average of each of `sizes` windows."""
        import jax.numpy as jnp

        return pool(x, sizes) if 0 not in sizes else jnp.zeros((*x.shape[: x.ndim - len(sizes)], *sizes), x.dtype)

    return run


def adaptive_max_pool(x: Any, sizes: Sequence[int]) -> Any:
    """Lower `torch.nn.functional.adaptive_max_pool2d` or `3d` for [..., *sides].

    Returns the maxima [..., *sizes] and their flat indices; the first of equal elements wins. Both are empty if a size
    is zero.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    lead, sides = x.shape[: x.ndim - len(sizes)], x.shape[x.ndim - len(sizes) :]
    if 0 in sizes:
        return jnp.zeros((*lead, *sizes), x.dtype), jnp.zeros((*lead, *sizes), int)
    places, real = np.zeros((1,) * 2 * len(sizes), np.int64), np.ones((1,) * 2 * len(sizes), bool)
    for dim, (side, size) in enumerate(zip(sides, sizes, strict=True)):
        begin, end = np.arange(size) * side // size, -(-(np.arange(size) + 1) * side // size)
        within = begin[:, None] + np.arange((end - begin).max())
        shape = [1] * 2 * len(sizes)
        shape[dim], shape[dim + len(sizes)] = within.shape
        places = places * side + np.minimum(within, side - 1).reshape(shape)
        real = real & (within < end[:, None]).reshape(shape)
    places, real = (np.broadcast_to(each, np.broadcast_shapes(places.shape, real.shape)) for each in (places, real))
    windows, mask = places.reshape(*sizes, -1), real.reshape(*sizes, -1)
    flat = x.reshape(*lead, -1)
    seen = jnp.where(mask, jax.lax.stop_gradient(flat)[..., windows], -jnp.inf)
    best = jnp.argmax(seen, axis=-1)
    indices = jnp.take_along_axis(jnp.broadcast_to(windows, seen.shape), best[..., None], axis=-1)[..., 0]
    maxima = jnp.take_along_axis(flat, indices.reshape(*lead, -1), axis=-1)
    return maxima.reshape(indices.shape), indices
