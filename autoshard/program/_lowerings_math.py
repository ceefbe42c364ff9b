"""JAX lowerings of torch's linear algebra and searches, where torchax's own compute something else."""

from collections.abc import Callable
from typing import Any

from autoshard.errors import UserError


def math_table() -> dict[Any, Callable[..., Any]]:
    """torch callable -> lowering."""
    import torch

    aten = torch.ops.aten
    return {
        aten._linalg_eigh: eigh,
        aten._safe_softmax: safe_softmax,
        aten.searchsorted.Tensor: searchsorted,
        aten.searchsorted.Scalar: searchsorted,
        aten.bucketize.Tensor: bucketize,
        aten.as_strided_scatter: as_strided_scatter,
    }


def eigh(x: Any, uplo: str = "L", compute_v: bool = True) -> Any:
    """`torch.linalg.eigh` of [..., n, n], of which one triangle is read; both have the gradients of the whole."""
    import jax
    import jax.numpy as jnp

    half = jnp.tril(x) if uplo.upper() == "L" else jnp.triu(x)
    strict = jnp.tril(x, -1) if uplo.upper() == "L" else jnp.triu(x, 1)
    whole = half + jnp.conj(jnp.swapaxes(strict, -1, -2))
    return tuple(jnp.linalg.eigh(x + jax.lax.stop_gradient(whole - x), symmetrize_input=False))


def safe_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    """A softmax that is nought where all along `dim` is -inf."""
    import jax
    import jax.numpy as jnp

    none = jnp.all(jnp.isneginf(x), axis=dim, keepdims=True)
    return jnp.where(none, 0, jax.nn.softmax(jnp.where(none, 0, x), axis=dim))


def searchsorted(
    rows: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """`torch.searchsorted` of one row for all `values`, or of as many rows [..., N] as `values` [..., M] has."""
    import jax
    import jax.numpy as jnp

    values = jnp.asarray(values, rows.dtype)
    order = rows if sorter is None else jnp.take_along_axis(rows, sorter, axis=-1)
    at = "right" if right or side == "right" else "left"
    if rows.ndim == 1:
        return jnp.searchsorted(order, values, side=at)
    found = jax.vmap(lambda row, each: jnp.searchsorted(row, each, side=at))
    return found(order.reshape(-1, order.shape[-1]), values.reshape(-1, values.shape[-1])).reshape(values.shape)


def bucketize(values: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """`torch.bucketize`."""
    return searchsorted(boundaries, values, right=right)


def as_strided_scatter(*args: Any, **kwargs: Any) -> Any:
    """Raises `UserError`: where strides overlap, torch's gradients are not those of what is computed."""
    raise UserError("as_strided_scatter has no lowering; write to a slice instead.")
