"""Writes to parts of an array as in torch, also under a mask whose values are unknown during the trace."""

import functools
from collections.abc import Callable
from typing import Any

from autoshard.program.torch_ops import views


RESHAPED = frozenset(
    {
        "t_",
        "transpose_",
        "squeeze_",
        "unsqueeze_",
        "swapaxes_",
        "swapdims_",
        "resize_",
        "as_strided_",
        "set_",
        "detach_",
    }
)
"""Operations with the `_` suffix of writes that change a tensor's shape or identity, but not its elements."""


def write_table() -> dict[Any, Callable[..., Any]]:
    """Return lowerings of scatters, index writes, `contiguous` and `detach`, by torch callable."""
    import torch

    aten = torch.ops.aten
    scatters = (aten.masked_scatter, aten.masked_scatter.default, torch.Tensor.masked_scatter)
    puts = (aten.index_put, aten.index_put.default, aten._unsafe_index_put)
    own = {torch.Tensor.contiguous: contiguous} | dict.fromkeys((aten.detach, aten.detach.default), detach)
    return dict.fromkeys(scatters, masked_scatter) | dict.fromkeys(puts, index_put) | own


def writers() -> dict[Any, Any]:
    """Return torchax operators by torch operation: `fill_diagonal_`, `copy_` and `detach_`, which write in place."""
    import torch

    each: Any = torch.Tensor.fill_diagonal_  # torch would decompose it into a strided view
    detached: Any = torch.Tensor.detach_  # torch calls this under `no_grad`
    copy = torch.ops.aten.copy_
    return {
        each: in_place(each, fill_diagonal, of_jax=True),
        copy: in_place(copy, copied, of_jax=True, whole=True),
        detached: reshaping(detached, torch.detach),
    }


def put(x: Any, key: Any, value: Any) -> Any:
    """Return `x` after `x[key] = value`, with torch's rules for indexes; `x` itself is unchanged.

    A traced mask must be the first index, and the others full slices or ellipses; it becomes a select. Its `value` is
    one row (or one element) for all selected places, or one row for each selected place, in order. Any other key is a
    JAX scatter.
    """
    import jax.numpy as jnp

    if isinstance(key, list) and all(isinstance(each, (int, list)) for each in key):
        key = jnp.asarray(key)
    keys: Any = tuple(key) if isinstance(key, (tuple, list)) else (key,)
    mask: Any = keys[0] if keys else None
    if not _is_traced_mask(mask) or any(each is not Ellipsis and not _is_full(each) for each in keys[1:]):
        return _set(x, tuple(jnp.asarray(each) if isinstance(each, list) else each for each in keys), value)
    rest = x.ndim - mask.ndim
    wide = mask.reshape(*mask.shape, *([1] * rest))
    value = jnp.asarray(value, x.dtype)
    if value.ndim <= rest:
        return jnp.where(wide, value, x)
    if value.shape[0] == 1:
        return jnp.where(wide, value[0], x)
    return jnp.where(wide, _in_order(mask.reshape(-1), value).reshape(x.shape), x)


def _set(x: Any, key: Any, value: Any) -> Any:
    """Return `x` after `x[key] = value`, cast to the dtype of `x`.

    Leading dims of one element that `value` has in addition to `x[key]` are dropped.
    """
    import jax
    import jax.numpy as jnp

    sizes = jnp.shape(value)
    if sizes[:1] == (1,):
        part = jax.eval_shape(lambda whole: whole[key], x)
        extra = max(len(sizes) - part.ndim, 0)
        value = value.reshape(sizes[extra:]) if set(sizes[:extra]) == {1} else value
    if jnp.issubdtype(jnp.result_type(value), jnp.inexact) and not jnp.issubdtype(x.dtype, jnp.inexact):
        value = jnp.asarray(value).astype(x.dtype)  # JAX warns of casts that may lose digits
    return x.at[key].set(value)


def in_place(func: Any, plain: Any, of_jax: bool = False, whole: bool = False) -> Any:
    """Return torchax's operator for a torch operation that writes the result of `plain` to its first argument.

    - `func`: the torch operation.
    - `plain`: another torch operation, or with `of_jax` a function of JAX arrays.
    - `whole`: True if the result replaces the argument's array; otherwise it is copied into it.
    """
    from torchax.ops import op_base, ops_registry

    return ops_registry.Operator(
        func,
        op_base.InplaceOp(plain, replace=whole, is_jax_func=of_jax),
        is_jax_function=False,
        is_user_defined=True,
        needs_env=False,
        is_view_op=True,
    )


def reshaping(func: Any, plain: Any) -> Any:
    """Return torchax's operator for a torch operation that reshapes or reorders its first argument as `plain` does.

    The operator raises `NotImplementedError` for a slice, whose shape follows from its base tensor.
    """
    from torchax.ops import ops_registry
    from torchax.tensor import Tensor

    def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reshape `tensor` in place and return it."""
        if hasattr(tensor, "view_info"):
            raise NotImplementedError(f"`{func}` of a slice; use the operation that is not in place")
        alone = Tensor(tensor.jax(), tensor._env)  # a copy, so that `plain` gives no view of `tensor`
        views.reshape(tensor, plain(alone, *args, **kwargs).jax())
        return tensor

    return ops_registry.Operator(
        func, run, is_jax_function=False, is_user_defined=True, needs_env=False, is_view_op=True
    )


def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """Lower `torch.Tensor.index_put`; an index that is None selects the whole dim.

    With `accumulate` the values are added, and add up at repeated places unless an index is a traced mask.
    """
    import jax.numpy as jnp

    key = tuple(slice(None) if each is None else each for each in indices)
    if accumulate and not any(map(_is_traced_mask, key)):
        return x.at[key].add(values)
    return x + put(jnp.zeros_like(x), key, values) if accumulate else put(x, key, values)


def fill_diagonal(x: Any, value: Any, wrap: bool = False) -> Any:
    """Lower `torch.Tensor.fill_diagonal_` for two dims [m, n], or for more dims of one size: set all-equal indexes to
    `value`.

    With `wrap`, the diagonal of a tall matrix starts again after each n + 1 rows.
    """
    import jax.numpy as jnp

    places = jnp.indices(x.shape, sparse=True)
    apart = [(places[0] - place) % (x.shape[-1] + 1) if wrap else places[0] - place for place in places[1:]]
    hit = functools.reduce(jnp.logical_and, [each == 0 for each in apart])
    return jnp.where(hit, jnp.asarray(value, x.dtype), x)


def copied(x: Any, source: Any, non_blocking: bool = False) -> Any:
    """Return `source` cast to the dtype and broadcast to the shape of `x`: the array after `torch.Tensor.copy_`."""
    import jax.numpy as jnp

    return jnp.broadcast_to(jnp.asarray(source).astype(x.dtype), x.shape)


def contiguous(x: Any, memory_format: Any = None) -> Any:
    """Lower `torch.Tensor.contiguous` as the identity, since `torch_layouts` tracks the layout of elements."""
    return x


def detach(x: Any) -> Any:
    """Lower `torch.Tensor.detach`: the same values without a gradient."""
    import jax

    return jax.lax.stop_gradient(x)


def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """Return `x` with the elements of `source`, in order, where `mask` is true; the mask broadcasts to `x`.

    If the mask was broadcast along the last dim, whole rows of the source are placed, which counts fewer places. A
    source with too few elements is not detected: its last one repeats, and an empty source leaves `x` as it is.
    """
    import jax.numpy as jnp

    if source.size == 0:
        return x
    width = x.shape[-1]
    wide = jnp.broadcast_to(mask, x.shape)
    by_rows = source.size % width == 0 and (mask.shape[-1:] == (1,) or _broadcast_last(mask))
    hit = wide[..., 0].reshape(-1) if by_rows else wide.reshape(-1)
    rows = source.reshape(-1, width) if by_rows else source.reshape(-1)
    return jnp.where(wide, _in_order(hit, rows).reshape(x.shape).astype(x.dtype), x)


def _in_order(hit: Any, rows: Any) -> Any:
    """Return a row of `rows` for each place of `hit` [T]: the n-th true place has row n, and other places arbitrary
    rows.

    Rows are found by counting the true places before each place. Beyond the last row, the last one repeats.
    """
    import jax.numpy as jnp

    return rows[jnp.clip(jnp.cumsum(hit.astype(jnp.int32)) - 1, 0, rows.shape[0] - 1)]


_IN_ORDER = {"reshape", "squeeze", "broadcast_in_dim", "copy"}
"""JAX primitives that leave the elements in order if they leave their number unchanged."""


def is_same(value: Any, other: Any, depth: int = 8) -> bool:
    """Return True if two values of the same trace certainly have the same elements in the same order, by equal
    equations.

    False may also mean that it is unknown. Only reshapes are ignored; primitives with several results never count.

    - `depth`: number of equations that are compared backwards from each value.
    """
    from jax import core

    value, other = _plain(value), _plain(other)
    if value is other:
        return True
    if not isinstance(value, core.Tracer) or not isinstance(other, core.Tracer) or depth == 0:
        return False
    mine, theirs = getattr(value, "parent", None), getattr(other, "parent", None)
    if mine is None or theirs is None or value.shape != other.shape or value.dtype != other.dtype:
        return False
    alike = mine.primitive is theirs.primitive and len(mine.in_tracers) == len(theirs.in_tracers)
    if not alike or mine.primitive.multiple_results or mine.params != theirs.params:
        return False
    return all(is_same(*each, depth - 1) for each in zip(mine.in_tracers, theirs.in_tracers, strict=True))


def _plain(value: Any) -> Any:
    """Return the value before the reshapes, squeezes, copies and broadcasts that left its number of elements as it was.

    The search stops at the first other primitive.
    """
    equation = getattr(value, "parent", None)
    while equation is not None and equation.primitive.name in _IN_ORDER:
        operand = equation.in_tracers[0]
        if getattr(operand, "size", None) != value.size:
            break
        value, equation = operand, getattr(operand, "parent", None)
    return value


def _is_traced_mask(value: Any) -> bool:
    """Return True for a traced array of booleans with at least one dim."""
    from jax import core

    return isinstance(value, core.Tracer) and value.dtype == bool and value.ndim > 0


def _is_full(value: Any) -> bool:
    """Return True for a slice of a whole dim."""
    return isinstance(value, slice) and value == slice(None)


def _broadcast_last(value: Any) -> bool:
    """Return True if a traced value is the direct result of a broadcast along its last dim; False if unknown."""
    equation = getattr(value, "parent", None)
    if equation is None or equation.primitive.name != "broadcast_in_dim":
        return False
    operand, dims = equation.in_tracers[0], equation.params["broadcast_dimensions"]
    last = value.ndim - 1
    return last not in dims or operand.shape[dims.index(last)] == 1 != value.shape[-1]
