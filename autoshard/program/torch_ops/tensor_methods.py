"""JAX lowerings of methods of torch tensors: new tensors like an old one, and other readings of its elements."""

from collections.abc import Callable
from typing import Any

from autoshard.errors import UserError
from autoshard.program.torch_ops.op_lowerings import jax_dtype_of


def method_table() -> dict[Any, Callable[..., Any]]:
    """Return lowerings of `view` as a dtype, `mT` and `new_tensor`, by torch callable."""
    import torch

    aten = torch.ops.aten
    return {aten.view.dtype: view_dtype, aten.mT: swapped, torch.Tensor.new_tensor: new_tensor}


def swapped(x: Any) -> Any:
    """Lower `torch.Tensor.mT`: [..., m, n] gives [..., n, m]."""
    import jax.numpy as jnp

    return jnp.swapaxes(x, -1, -2)


def new_tensor(x: Any, data: Any, *, dtype: Any = None, **others: Any) -> Any:
    """Lower `torch.Tensor.new_tensor`: return `data` as an array of the `dtype`, by default that of `x`."""
    import jax.numpy as jnp

    return jnp.asarray(data).astype(x.dtype if dtype is None else jax_dtype_of(dtype))


def view_dtype(x: Any, dtype: Any) -> Any:
    """Lower `torch.Tensor.view` with a dtype: the bits are read as numbers of another dtype, along the last dim.

    A smaller dtype lengthens the last dim, a larger one shortens it.

    Raises `UserError` for a dtype that has fewer bits here than in torch.
    """
    import jax

    wanted = jax_dtype_of(dtype)
    if wanted.itemsize != dtype.itemsize:
        raise UserError(f"a view as {dtype} has no lowering in 32 bits; use a dtype of at most 32 bits.")
    if wanted.itemsize <= x.dtype.itemsize:
        read = jax.lax.bitcast_convert_type(x, wanted)
        return read.reshape(*x.shape[:-1], -1) if read.ndim > x.ndim else read
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, wanted.itemsize // x.dtype.itemsize), wanted)
