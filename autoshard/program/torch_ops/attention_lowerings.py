"""JAX lowerings of torch's attention, with dims unmerged and torch's dtypes."""

import math
from typing import Any

from autoshard.errors import UserError
from autoshard.program.kernels.dot_attention import attend
from autoshard.program.remat_marks import mark
from autoshard.program.torch_ops.op_lowerings import linear


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Lower `torch.nn.functional.scaled_dot_product_attention` with an fp32 softmax.

    Shapes are [..., H, S, D], [..., K, T, D], [..., K, T, E] and, for the result, [..., H, S, E]. Heads may be left
    out. Leading dims are broadcast; unless there is exactly one, they are merged. Fewer key-value heads are shared by
    query heads, with or without `enable_gqa`. `dropout_p` is ignored. In `attn_mask`, which broadcasts to
    [..., H, S, T], booleans are true where a key is seen, and floats are added. With `is_causal` the first query sees
    the first key only, also if S and T differ.
    """
    import jax.numpy as jnp

    without_heads = query.ndim == key.ndim == value.ndim == 2
    query, key, value = (x[None] if x.ndim == 2 else x for x in (query, key, value))
    if query.shape[-3] == 1:
        query = jnp.broadcast_to(query, (*query.shape[:-3], key.shape[-3], *query.shape[-2:]))
    lead = jnp.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    query, key, value = (jnp.broadcast_to(x, (*lead, *x.shape[-3:])) for x in (query, key, value))
    if len(lead) != 1:
        query, key, value = (x.reshape(-1, *x.shape[-3:]) if lead else x[None] for x in (query, key, value))
    if attn_mask is not None and attn_mask.ndim > 3 and len(lead) > 1:
        attn_mask = jnp.broadcast_to(attn_mask, (*lead, *attn_mask.shape[-3:])).reshape(-1, *attn_mask.shape[-3:])
    square = query.shape[-2] == key.shape[-2]
    position = None if square or not is_causal else 0  # torch's first query attends to the first key only
    result = attend(query, key, value, causal=is_causal, scale=scale, bias=attn_mask, position=position)
    result = jnp.swapaxes(result, 1, 2)
    if len(lead) != 1:
        result = result.reshape(*lead, *result.shape[1:])
    return result[0] if without_heads else result


def multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Lower `torch.nn.functional.multi_head_attention_forward` for [S, B, E] or [S, E]; return `(result, weights)`.

    The weights are [B, L, S], of each head [B, H, L, S] without `average_attn_weights`, or None without `need_weights`.
    A program whose result does not depend on them does not compute them. Dropout is ignored. Boolean masks are true
    where a key is hidden, and floats are added to the scores. `is_causal` counts only without `attn_mask`.

    Raises `UserError` for biases of keys and values, added zero keys and static keys.
    """
    import jax.numpy as jnp

    if bias_k is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise UserError("multi-head attention with `add_bias_kv`, `add_zero_attn` or static keys is not supported.")
    width = embed_dim_to_check
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        parts = in_proj_weight.reshape(3, width, width)
        weights = (parts[0], parts[1], parts[2])
    biases = (None, None, None) if in_proj_bias is None else tuple(in_proj_bias.reshape(3, width))

    unbatched = query.ndim == 2
    if unbatched:
        query, key, value = (x[:, None] for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]

    def heads(x: Any, weight: Any, bias: Any) -> Any:
        """Project [S, B, E] and return it by heads, [B, H, S, E / H]."""
        projected = mark(linear(x, weight, bias), "in_proj")
        return jnp.transpose(projected.reshape(*projected.shape[:2], num_heads, -1), (1, 2, 0, 3))

    q, k, v = (heads(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    mask = attn_mask
    if mask is not None and mask.ndim == 3:
        mask = mask.reshape(-1, num_heads, *mask.shape[1:])
    if mask is not None and mask.dtype == jnp.bool_:
        mask = ~mask  # true means masked out in this function of torch
    padding = None
    if key_padding_mask is not None:
        if key_padding_mask.dtype == jnp.bool_:
            padding = ~key_padding_mask
        else:
            extra = key_padding_mask[:, None, None, :]
            if mask is not None and mask.dtype == jnp.bool_:
                mask = jnp.where(mask, 0.0, -jnp.inf).astype(extra.dtype)
            mask = extra if mask is None else mask + extra
    causal = is_causal and attn_mask is None
    mixed = attend(q, k, v, causal=causal, bias=mask, padding=padding)
    joined = jnp.transpose(mixed.reshape(*mixed.shape[:2], width), (1, 0, 2))
    result = mark(linear(joined, out_proj_weight, out_proj_bias), "out_proj")
    shares = _attention_weights(q, k, causal, mask, padding) if need_weights else None
    if shares is not None and average_attn_weights:
        shares = shares.mean(1)
    if unbatched:
        result, shares = result[:, 0], None if shares is None else shares[0]
    return result, shares


def _attention_weights(query: Any, key: Any, causal: bool, bias: Any, padding: Any) -> Any:
    """Return the softmax [B, H, L, S] of the scores of [B, H, L, E] and [B, H, S, E], masked as in `attend`."""
    import jax
    import jax.numpy as jnp

    scores = jnp.einsum("bhld,bhsd->bhls", query, key)
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32)) / math.sqrt(query.shape[-1])
    masks = [] if padding is None else [padding[:, None, None, :]]
    if causal:
        masks.append(jnp.tril(jnp.ones(scores.shape[-2:], bool)))
    if bias is not None and bias.dtype == jnp.bool_:
        masks.append(bias)
    elif bias is not None:
        scores = scores + bias
    for each in masks:
        scores = jnp.where(each, scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1).astype(query.dtype)
