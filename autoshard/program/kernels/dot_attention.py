"""Attention as dots with separate dims for batch, key-value heads, group and head dim.

The usual lowering merges batch and heads into one dim. If a mesh splits batch over one axis and heads over another,
XLA's partitioner then computes all heads everywhere. Masks are comparisons of iotas, never stored tensors.
"""

from typing import Any

from autoshard.program import model_flops
from autoshard.program.kernels import cudnn_attention, decode_attention, splash_attention
from autoshard.program.kernels.attention_masks import seen_share, visible_scores
from autoshard.program.kernels.cached_keys import CachedKeys, only_shapes
from autoshard.program.kernels.ring_attention import ring_attention, ring_refusal
from autoshard.program.remat_marks import CONTEXT, mark


def attend(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    padding: Any = None,
    bias: Any = None,
    position: Any = None,
    held: CachedKeys | None = None,
    sinks: Any = None,
) -> Any:
    """Compute softmax attention with an fp32 softmax; return [B, S, H, E] in the dtype of `value`.

    - `query`: [B, H, S, D]; H is a multiple of K, and H / K query heads share a key-value head.
    - `key`, `value`: [B, K, T, D] and [B, K, T, E].
    - `causal`: position s sees t <= s + T - S, or t <= s + `position` if that is given.
    - `position`: position of the first query after a cache.
    - `window`: only the last `window` of these keys are visible; without `causal`, those less than `window` away.
    - `scale`: factor of the scores; None for D ** -0.5.
    - `softcap`: bound of the scores, applied as a scaled tanh.
    - `padding`: [B, T], true where a key may be seen.
    - `bias`: broadcasts to [B, H, S, T]; booleans are true where a key may be seen, floats are added.
    - `held`: the cache that `key` and `value` are one layer of.
    - `sinks`: [H], or [B, H, S, 1] per query: score of one more key of each head, whose value is zero.

    Inside `attention_kernel` a kernel may compute the attention, and keys and values may go around a ring. The first
    of these that is requested and possible is used: the cached kernel, a ring, cuDNN, splash, plain dots. Only plain
    dots take `sinks`, `padding` and `bias`.

    With plain dots, a query that sees no key gets the mean of all values, or zeros if there are `sinks`. Plain dots
    record their model FLOPs (`model_flops`) and mark the result for remat policies.

    Raises `UserError` if the user named a kernel that cannot compute this attention.
    """
    import jax
    import jax.numpy as jnp

    batch, heads, length, dim = query.shape
    groups, keys = key.shape[1], key.shape[2]
    refused = splash_attention.refusal(
        query.shape,
        key.shape,
        bias=bias is not None,
        padding=padding is not None,
        position=position is not None,
        causal=causal,
    )
    own = splash_attention.mask_refusal(bias=bias is not None, padding=padding is not None, position=False)
    if sinks is not None:
        refused = own = "it has sinks"
    cached = None
    if held is not None:
        cannot = decode_attention.cached_refusal(query.shape, held, masked=own, causal=causal)
        cached = splash_attention.uses_cached(cannot, decode_attention.no_gain(held))
    if held is not None and cached:
        grouped = query.reshape(batch, groups, heads // groups, dim)
        mixed = decode_attention.cached_attention(
            grouped, held, position=position, scale=scale, window=window, softcap=softcap
        )
        return mixed.astype(value.dtype).reshape(batch, 1, heads, value.shape[-1])
    masked = splash_attention.mask_refusal(
        bias=bias is not None, padding=padding is not None, position=position is not None
    )
    masked = own if sinks is not None else masked
    no_ring = masked or ring_refusal(query.shape, key.shape, window=window is not None, softcap=softcap is not None)
    if splash_attention.uses_ring(no_ring):
        grouped = query.reshape(batch, groups, heads // groups, length, dim)
        kernel = splash_attention.prefers_splash() and not refused
        mixed = ring_attention(grouped, key, value, causal=causal, scale=scale, kernel=kernel)
        return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, value.shape[-1])
    more = "capped scores" if softcap is not None else "window without a causal mask" if window and not causal else ""
    if not only_shapes() and splash_attention.uses_cudnn(
        cudnn_attention.cudnn_refusal(query, key, value, masked=masked, causal=causal, more=more)
    ):
        grouped = query.reshape(batch, groups, heads // groups, length, dim)
        mixed = cudnn_attention.cudnn_attention(grouped, key, value, causal=causal, window=window, scale=scale)
        return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, value.shape[-1])
    idle = splash_attention.no_gain(length, keys, causal, window, dim)
    if cached is None and not only_shapes() and splash_attention.uses_splash(refused, idle):
        grouped = query.reshape(batch, groups, heads // groups, length, dim)
        mixed = splash_attention.splash_attention(
            grouped, key, value, causal=causal, window=window, scale=scale, softcap=softcap
        )
        return mixed.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, value.shape[-1])
    factor = dim**-0.5 if scale is None else scale
    query = query.reshape(batch, groups, heads // groups, length, dim)
    scores = jnp.einsum("bkgsd,bktd->bkgst", query, key).astype(jnp.float32) * factor
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    if bias is not None and bias.dtype != jnp.bool_:
        scores = scores + _grouped(bias, groups, heads)
    visible = visible_scores(length, keys, causal, window, keys - length if position is None else position)
    if bias is not None and bias.dtype == jnp.bool_:
        mask = _grouped(bias, groups, heads)
        visible = mask if visible is None else visible & mask
    if padding is not None:
        mask = padding.astype(jnp.bool_)[:, None, None, None, :]
        visible = mask if visible is None else visible & mask
    if visible is not None:
        scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    weights = (_softmax_with(scores, sinks) if sinks is not None else jax.nn.softmax(scores, axis=-1)).astype(
        value.dtype
    )
    # A causal (or windowed) pass needs only a part of the scores; model FLOPs count that part.
    seen = seen_share(length, keys, causal, window) if position is None else 1.0
    model_flops.record_matmul((batch, heads, length, keys), dim * seen)
    model_flops.record_matmul((batch, heads, length, value.shape[-1]), keys * seen)
    mixed = mark(jnp.einsum("bkgst,bktd->bskgd", weights, value), CONTEXT)
    return mixed.reshape(batch, length, heads, value.shape[-1])


def _grouped(bias: Any, groups: int, heads: int) -> Any:
    """Reshape [B, H or 1, S, T] (or fewer leading dims) to [B, K or 1, G or 1, S, T]."""
    while bias.ndim < 4:
        bias = bias[None]
    if bias.shape[1] == 1:
        return bias[:, :, None]
    return bias.reshape(bias.shape[0], groups, heads // groups, *bias.shape[2:])


def _softmax_with(scores: Any, sinks: Any) -> Any:
    """Return the softmax of scores [B, K, G, S, T] with one more score per head in the denominator.

    `sinks` is [K G] or [B, K G, S, 1].
    """
    import jax
    import jax.numpy as jnp

    shape = (1, *scores.shape[1:3], 1, 1) if sinks.ndim == 1 else (*scores.shape[:-1], 1)
    sink = sinks.astype(jnp.float32).reshape(shape)
    most = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sink))
    each = jnp.exp(scores - most)
    return each / (each.sum(-1, keepdims=True) + jnp.exp(sink - most))
