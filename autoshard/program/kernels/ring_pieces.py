"""Attention of some queries over some keys, with the sums that combine it with attention over other keys.

A piece returns its result as if there were no other keys, and for each query the logarithm of its sum of exponentials.
`added` combines two pieces. The gradient of a piece takes the logarithms of the sums over all keys, and returns these
keys' share of the gradients.
"""

import functools
import math
from typing import Any, NamedTuple

from autoshard.program.kernels.splash_attention import LANES, interpreted


KEYS = 512
"""Number of keys in a block of scores that is computed at once without a kernel."""
SIDES = (1024, 512, 256, 128)
"""Numbers of queries, and of keys, in a block of the kernel's scores; the largest divisor is used."""


class How(NamedTuple):
    """The computation of a piece."""

    kernel: bool
    """True if jax's splash kernel computes a piece; else blocks of keys are computed in turn, with scores in memory."""


def ring_side(*lengths: int) -> int:
    """Return the queries, and keys, of a block of the kernel's scores: the largest of `SIDES` that divides all lengths.

    If none does, it is `LANES`.
    """
    divisor = math.gcd(*lengths)
    return next((side for side in SIDES if divisor % side == 0), LANES)


def piece(query: Any, key: Any, value: Any, causal: bool, how: How) -> tuple[Any, Any]:
    """Compute attention over some keys; return [B, K, G, S, E] and the logarithms of sums [B, K, G, S], both in fp32.

    - `query`: [B, K, G, S, D], already scaled.
    - `key`, `value`: [B, K, T, D] and [B, K, T, E].
    - `causal`: query s sees keys up to s; S equals T.
    - `how`: with or without jax's kernel.
    """
    if how.kernel:
        return _kernel_piece(query, key, value, causal)
    return _plain_piece(query, key, value, causal)


def piece_back(
    query: Any, key: Any, value: Any, out: Any, total: Any, gradient: Any, causal: bool, how: How
) -> tuple[Any, Any, Any]:
    """Return these keys' share of the gradients of `query`, `key` and `value`, in fp32.

    - `out`: result of the queries over all keys.
    - `total`: logarithms of their sums of exponentials over all keys.
    - `gradient`: gradient of `out`.
    """
    if how.kernel:
        return _kernel_back(query, key, value, out, total, gradient, causal)
    return _plain_back(query, key, value, out, total, gradient, causal)


def added(out: Any, total: Any, other: Any, others: Any) -> tuple[Any, Any]:
    """Combine two pieces of the same queries: results `out` and `other`, logarithms of sums `total` and `others`.

    Return the result and the logarithms over the keys of both.
    """
    import jax.numpy as jnp

    both = jnp.logaddexp(total, others)
    return out * jnp.exp(total - both)[..., None] + other * jnp.exp(others - both)[..., None], both


# Pieces by blocks of keys.


def _blocks(value: Any, size: int) -> Any:
    """Reshape [B, K, T, D] to [T / size, B, K, size, D]."""
    import jax.numpy as jnp

    b, k, t, d = value.shape
    return jnp.moveaxis(value.reshape(b, k, t // size, size, d), 2, 0)


def _scores(query: Any, key: Any, first: Any, causal: bool) -> Any:
    """Return the scores in fp32 of one block of keys, which starts at key `first`; masked ones are the least number."""
    import jax
    import jax.numpy as jnp

    scores = jnp.einsum("bkgsd,bktd->bkgst", query, key, preferred_element_type=jnp.float32)
    if not causal:
        return scores
    shape = (1, 1, 1, *scores.shape[3:])
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, dim) for dim in (3, 4))
    return jnp.where(row >= column + first, scores, jnp.finfo(jnp.float32).min)


def _block_size(length: int) -> int:
    """Return the largest divisor of `length` that is at most `KEYS`."""
    return next(size for size in range(min(KEYS, length), 0, -1) if length % size == 0)


def _plain_piece(query: Any, key: Any, value: Any, causal: bool) -> tuple[Any, Any]:
    """Compute `piece` in plain JAX, by a scan over blocks of keys with running maxima and sums."""
    import jax
    import jax.numpy as jnp

    size = _block_size(key.shape[2])

    def step(carried: Any, given: Any) -> tuple[Any, None]:
        most, total, out = carried
        keys, values, first = given
        scores = _scores(query, keys, first, causal)
        now = jnp.maximum(most, scores.max(-1))
        weights, less = jnp.exp(scores - now[..., None]), jnp.exp(most - now)
        mixed = jnp.einsum(
            "bkgst,bkte->bkgse", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return (now, total * less + weights.sum(-1), out * less[..., None] + mixed), None

    rows = query.shape[:4]
    start = (
        jnp.full(rows, jnp.finfo(jnp.float32).min),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, value.shape[3]), jnp.float32),
    )
    firsts = jnp.arange(key.shape[2] // size) * size
    (most, total, out), _ = jax.lax.scan(step, start, (_blocks(key, size), _blocks(value, size), firsts))
    return out / total[..., None], most + jnp.log(total)


def _plain_back(
    query: Any, key: Any, value: Any, out: Any, total: Any, gradient: Any, causal: bool
) -> tuple[Any, Any, Any]:
    """Compute `piece_back` in plain JAX, by a scan over blocks of keys."""
    import jax
    import jax.numpy as jnp

    size = _block_size(key.shape[2])
    # The softmax's gradient needs the row sum of weights * d_weights, which equals this product.
    share = jnp.einsum("bkgse,bkgse->bkgs", out.astype(jnp.float32), gradient.astype(jnp.float32))
    wide = {"preferred_element_type": jnp.float32}

    def step(of_query: Any, given: Any) -> tuple[Any, tuple[Any, Any]]:
        keys, values, first = given
        weights = jnp.exp(_scores(query, keys, first, causal) - total[..., None])
        of_value = jnp.einsum("bkgst,bkgse->bkte", weights.astype(gradient.dtype), gradient, **wide)
        of_weights = jnp.einsum("bkgse,bkte->bkgst", gradient, values, **wide)
        of_scores = (weights * (of_weights - share[..., None])).astype(query.dtype)
        of_key = jnp.einsum("bkgst,bkgsd->bktd", of_scores, query, **wide)
        return of_query + jnp.einsum("bkgst,bktd->bkgsd", of_scores, keys, **wide), (of_key, of_value)

    firsts = jnp.arange(key.shape[2] // size) * size
    of_query, (of_key, of_value) = jax.lax.scan(
        step, jnp.zeros(query.shape, jnp.float32), (_blocks(key, size), _blocks(value, size), firsts)
    )
    of_key, of_value = (jnp.moveaxis(x, 0, 2).reshape(like.shape) for x, like in ((of_key, key), (of_value, value)))
    return of_query, of_key, of_value


# Pieces by jax's kernel.


@functools.cache
def _kernel(heads: int, length: int, keys: int, causal: bool, saving: bool, interpret: bool) -> Any:
    """Return jax's kernel for the `heads` query heads of one group; with `saving` it also returns the sums.

    `length` and `keys` are numbers of queries and keys. With `interpret` the kernel is interpreted.
    """
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    side = ring_side(length, keys)
    part = min(side, 512)
    sizes = kernel.BlockSizes(
        block_q=side, block_kv=side, block_kv_compute=part, block_q_dkv=side, block_kv_dkv=side,
        block_kv_dkv_compute=part, block_q_dq=side, block_kv_dq=side,
    )  # fmt: skip
    mask = masks.CausalMask((length, keys)) if causal else masks.FullMask((length, keys))
    with jax.ensure_compile_time_eval():
        return kernel.make_splash_mqa_single_device(
            masks.MultiHeadMask([mask] * heads), block_sizes=sizes, save_residuals=saving, interpret=interpret
        )


def _kernel_piece(query: Any, key: Any, value: Any, causal: bool) -> tuple[Any, Any]:
    """Compute `piece` by jax's kernel."""
    import jax
    import jax.numpy as jnp

    one = _kernel(query.shape[2], query.shape[3], key.shape[2], causal, True, interpreted())
    # The inner jit holds the mask's tables, since a call that stays one op may not have constants.
    out, (total,) = jax.jit(jax.vmap(jax.vmap(lambda *given: one(*given))))(query, key, value)
    return out.astype(jnp.float32), total


def _kernel_back(
    query: Any, key: Any, value: Any, out: Any, total: Any, gradient: Any, causal: bool
) -> tuple[Any, Any, Any]:
    """Compute `piece_back` by jax's kernel."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    one = _kernel(query.shape[2], query.shape[3], key.shape[2], causal, False, interpreted())
    # The kernel's own gradient function receives the sums over all keys instead of those over these keys.
    fixed = {name: one.kwargs[name] for name in ("mask_value", "is_mqa", "block_sizes", "mask_function", "interpret")}

    def back(q: Any, k: Any, v: Any, o: Any, lse: Any, do: Any) -> tuple[Any, Any, Any]:
        saved = (q, k, v, None, None, o, lse, one.dq_mask_info, one.dkv_mask_info)
        outputs = kernel._splash_attention_bwd(
            save_residuals=False, residual_checkpoint_name=None, attn_logits_soft_cap=None, res=saved, do=do, **fixed
        )
        return outputs[3:6]

    gradients = jax.jit(jax.vmap(jax.vmap(back)))(query, key, value, out, total, gradient)
    return tuple(x.astype(jnp.float32) for x in gradients)  # type: ignore[return-value]
