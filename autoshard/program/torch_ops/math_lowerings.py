"""JAX lowerings of torch's linear algebra, and of operations whose gradient differs from JAX's at special points."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.errors import UserError


def edge_table() -> dict[Any, Callable[..., Any]]:
    """Return lowerings of operations with special gradients by torch callable."""
    import torch

    aten = torch.ops.aten
    clamps = (aten.clamp.default, aten.clamp.Tensor)
    return {
        aten.abs: absolute,
        aten.linalg_vector_norm: vector_norm,
        aten.dist: distance,
        torch.cdist: distances,
        aten._cdist_forward: distances,
        aten._pdist_forward: pair_distances,
        aten.var.correction: variance,
        aten.var_mean.correction: variance_mean,
        aten.mean: mean,
        **dict.fromkeys((torch.cov, torch.Tensor.cov), covariance),
        aten.sign: sign,
        aten.std.correction: std,
        aten.std_mean.correction: std_mean,
        aten.leaky_relu: leaky_relu,
        aten.log_sigmoid_forward: log_sigmoid,
        aten.binary_cross_entropy: binary_cross_entropy,
        aten.softplus: softplus,
        aten.trunc: trunc,
        aten.sgn: sgn,
        aten.clamp_min: clamp_min,
        aten.clamp_max: clamp_max,
        **dict.fromkeys(clamps, clamp),
    }


def absolute(x: Any) -> Any:
    """Lower `torch.abs`; the gradient of floats is zero at zero."""
    import jax.numpy as jnp

    return _absolute()(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.abs(x)


@functools.cache
def _absolute() -> Callable[[Any], Any]:
    """Return a function of x that computes |x| and has the gradient sign(x)."""
    import jax
    import jax.numpy as jnp

    @jax.custom_jvp
    def found(x: Any) -> Any:
        return jnp.abs(x)

    @found.defjvp
    def of_sign(primals: Any, tangents: Any) -> Any:
        """Return |x| and its tangent."""
        return jnp.abs(primals[0]), tangents[0] * jnp.sign(primals[0])

    return found


def _root(x: Any, power: float = 0.5) -> Any:
    """Return `x ** power` for x of at least 0, with a value and a gradient of zero at zero."""
    import jax.numpy as jnp

    none = x == 0
    safe = jnp.where(none, 1, x)
    return jnp.where(none, 0, jnp.sqrt(safe) if power == 0.5 else safe**power)


def _axes(dim: Any) -> Any:
    """Convert the `dim` of torch's reductions to JAX's axes; None and an empty sequence mean all dims."""
    return (tuple(dim) or None) if isinstance(dim, Sequence) else dim


def vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Lower `torch.linalg.vector_norm` of order `ord` along `dim`, or over all elements if it is None or empty.

    `ord` 0 counts elements that are not zero; infinities give the largest and smallest magnitude. The gradient is zero
    where the norm is zero. With a `dtype`, `x` is cast first.
    """
    import jax.numpy as jnp
    from torchax.ops import mappings

    axes = () if x.ndim == 0 else _axes(dim)
    x = x if dtype is None else x.astype(mappings.t2j_dtype(dtype))
    if ord == 0:
        return (x != 0).sum(axis=axes, keepdims=keepdim).astype(jnp.abs(x).dtype)
    sizes = absolute(x)
    if ord == math.inf:
        return sizes.max(axis=axes, keepdims=keepdim)
    if ord == -math.inf:
        return sizes.min(axis=axes, keepdims=keepdim)
    if ord == 1:
        return sizes.sum(axis=axes, keepdims=keepdim)
    if ord in (2, "fro"):
        squares = jnp.square(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.square(sizes)
        return _root(squares.sum(axis=axes, keepdims=keepdim))
    total = (_root(sizes, ord) if ord < 1 else sizes**ord).sum(axis=axes, keepdims=keepdim)
    return _root(total, 1.0 / ord) if ord > 0 else total ** (1.0 / ord)


def distance(x: Any, y: Any, p: float = 2) -> Any:
    """Lower `torch.dist`: the norm of order `p` of all elements of `x - y`."""
    return vector_norm(x - y, p)


def distances(x: Any, y: Any, p: float = 2.0, compute_mode: Any = None) -> Any:
    """Lower `torch.cdist`: [..., M, D] and [..., N, D] give [..., M, N]; `compute_mode` is ignored."""
    return vector_norm(x[..., :, None, :] - y[..., None, :, :], p, -1)


def pair_distances(x: Any, p: float = 2.0) -> Any:
    """Lower `torch.pdist`: distances [N (N - 1) / 2] of all pairs of rows of [N, D], ordered by the first row."""
    import numpy as np

    one, two = np.triu_indices(x.shape[0], k=1)
    return vector_norm(x[one] - x[two], p, -1)


def std(x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """Lower `torch.std` with a `correction` of 1 by default; the gradient is zero where all elements are equal."""
    return _root(variance(x, dim, correction=correction, keepdim=keepdim))


def variance(x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """Lower `torch.var` with a `correction` of 1 by default, along `dim`, or over all elements if it is None or empty.

    If the correction leaves no element to divide by, the result is infinite, or NaN for a variance of zero.
    """
    import jax.numpy as jnp

    # A fractional correction is what jnp.var computes with too, though its type says int.
    ddof: Any = 1 if correction is None else correction
    axes = _axes(dim) if x.ndim else None
    reduced = range(x.ndim) if axes is None else axes if isinstance(axes, Sequence) else (axes,)
    if ddof >= math.prod(x.shape[dim] for dim in reduced):
        return jnp.var(x, axis=axes, keepdims=keepdim) * jnp.inf
    return jnp.var(x, axis=axes, ddof=ddof, keepdims=keepdim)


def variance_mean(x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """Lower `torch.var_mean`: return variance and mean."""
    return variance(x, dim, correction=correction, keepdim=keepdim), mean(x, dim, keepdim)


def mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Lower `torch.mean` along `dim`, or over all elements if it is None or empty.

    With a `dtype`, `x` is cast first.
    """
    import jax.numpy as jnp
    from torchax.ops import mappings

    x = x if dtype is None else x.astype(mappings.t2j_dtype(dtype))
    return jnp.mean(x, _axes(dim) if x.ndim else None, keepdims=keepdim)


def covariance(x: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Lower `torch.cov` for rows of variables, [variables, observations] or [observations]; return a matrix or a
    number.

    Observations count by both weights. A divisor that the correction makes negative becomes zero.
    """
    import jax.numpy as jnp

    rows = x.reshape(1, -1) if x.ndim < 2 else x
    weights = jnp.ones(rows.shape[1], rows.dtype)
    for each in (fweights, aweights):
        weights = weights if each is None else weights * each
    total = weights.sum()
    centred = rows - (rows * weights).sum(1, keepdims=True) / total
    lost = correction * (weights * aweights).sum() / total if aweights is not None and correction else correction
    return (centred @ jnp.conj(centred * weights).T / jnp.maximum(total - lost, 0)).squeeze()


def sign(x: Any) -> Any:
    """Lower `torch.sign`; booleans are returned unchanged."""
    import jax.numpy as jnp

    return x if x.dtype == bool else jnp.sign(x)


def std_mean(x: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """Lower `torch.std_mean`: return standard deviation and mean."""
    return std(x, dim, correction=correction, keepdim=keepdim), mean(x, dim, keepdim)


def leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    """Lower `torch.nn.functional.leaky_relu`; at zero the gradient is the negative slope."""
    import jax.numpy as jnp

    return jnp.where(x > 0, x, x * negative_slope)


def log_sigmoid(x: Any) -> Any:
    """Lower `torch.nn.functional.logsigmoid`; also return `x`, of the shape of the buffer of torch's gradient."""
    import jax

    return jax.nn.log_sigmoid(x), x


def binary_cross_entropy(x: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    """Lower `torch.nn.functional.binary_cross_entropy` of probabilities, with logarithms clamped to at least -100.

    `reduction` is 0 for none, 1 for the mean and 2 for the sum. The mean divides by the number of elements, not by
    weights.
    """
    loss = _cross_entropy()(x, target)
    loss = loss if weight is None else loss * weight
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


@functools.cache
def _cross_entropy() -> Callable[[Any, Any], Any]:
    """Return the elementwise loss of (probabilities, targets), with torch's bounded gradient."""
    import jax
    import jax.numpy as jnp

    @jax.custom_jvp
    def found(x: Any, target: Any) -> Any:
        one, other = jnp.maximum(jnp.log(x), -100), jnp.maximum(jnp.log1p(-x), -100)
        return (target - 1) * other - target * one

    @found.defjvp
    def bounded(primals: Any, tangents: Any) -> Any:
        """Return the loss and its tangent, with the divisor clamped to at least 1e-12."""
        x, target = primals
        slope = (x - target) / jnp.maximum(x * (1 - x), 1e-12)
        return found(x, target), slope * tangents[0] + (jnp.log1p(-x) - jnp.log(x)) * tangents[1]

    return found


def softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    """Lower `torch.nn.functional.softplus`, which is `x` itself where `beta * x` exceeds the threshold.

    Elsewhere it is `log(1 + exp(beta * x)) / beta`.
    """
    import jax.numpy as jnp

    large = x * beta > threshold
    # An infinite exponential of a large element would make its gradient NaN, though it is not chosen.
    return jnp.where(large, x, jnp.log1p(jnp.exp(jnp.where(large, 0, x) * beta)) / beta).astype(x.dtype)


def trunc(x: Any) -> Any:
    """Lower `torch.trunc`; the dtype stays, also for whole numbers."""
    import jax.numpy as jnp

    return jnp.trunc(x).astype(x.dtype)


def sgn(x: Any) -> Any:
    """Lower `torch.sgn`: the sign, which is `x / |x|` for complex numbers and zero at zero."""
    import jax.numpy as jnp

    return jnp.sign(x)


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """Lower `torch.clamp`, whose gradient at a bound is 1.

    A bound of None does not limit, and `max` wins over `min`.
    """
    clamped = x if min is None else clamp_min(x, min)
    return clamped if max is None else clamp_max(clamped, max)


def clamp_min(x: Any, min: Any) -> Any:
    """Lower `torch.clamp_min`: the larger of `x` and `min`, in their promoted dtype; NaN stays."""
    import jax.numpy as jnp

    return jnp.where(x < min, min, x).astype(jnp.result_type(x, min))


def clamp_max(x: Any, max: Any) -> Any:
    """Lower `torch.clamp_max`: the smaller of `x` and `max`, in their promoted dtype; NaN stays."""
    import jax.numpy as jnp

    return jnp.where(x > max, max, x).astype(jnp.result_type(x, max))


def math_table() -> dict[Any, Callable[..., Any]]:
    """Return lowerings of linear algebra and searches by torch callable."""
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
    """Lower `torch.linalg.eigh` for [..., n, n], which reads one triangle; return eigenvalues and eigenvectors.

    The gradient is that of the whole matrix, as in torch. Vectors are computed even if `compute_v` is False.
    """
    import jax
    import jax.numpy as jnp

    half = jnp.tril(x) if uplo.upper() == "L" else jnp.triu(x)
    strict = jnp.tril(x, -1) if uplo.upper() == "L" else jnp.triu(x, 1)
    symmetric = half + jnp.conj(jnp.swapaxes(strict, -1, -2))
    return tuple(jnp.linalg.eigh(x + jax.lax.stop_gradient(symmetric - x), symmetrize_input=False))


def safe_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    """Lower `aten._safe_softmax`: a softmax that is zero where all elements along `dim` are -inf."""
    import jax
    import jax.numpy as jnp

    if dtype is not None:
        from torchax.ops import mappings

        x = x.astype(mappings.t2j_dtype(dtype))
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
    """Lower `torch.searchsorted` for one row with all `values`, or for rows [..., N] with `values` [..., M].

    The indices are on the left of equal elements unless `right` or `side` asks for the right. `sorter` orders the rows
    first. `out_int32` is ignored here.
    """
    import jax
    import jax.numpy as jnp

    values = jnp.asarray(values, rows.dtype)
    order = rows if sorter is None else jnp.take_along_axis(rows, sorter, axis=-1)
    at = "right" if right or side == "right" else "left"
    if rows.ndim == 1:
        return jnp.searchsorted(order, values, side=at)
    search = jax.vmap(lambda row, each: jnp.searchsorted(row, each, side=at))
    return search(order.reshape(-1, order.shape[-1]), values.reshape(-1, values.shape[-1])).reshape(values.shape)


def bucketize(values: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """Lower `torch.bucketize`: indices of `values` in the sorted `boundaries` [N]; `out_int32` is ignored here."""
    return searchsorted(boundaries, values, right=right)


def as_strided_scatter(*args: Any, **kwargs: Any) -> Any:
    """Raise `UserError`: if strides overlap, torch's gradients differ from those of the computed ops."""
    raise UserError("as_strided_scatter has no lowering; write to a slice instead.")
