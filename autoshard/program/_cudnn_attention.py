"""cuDNN's fused attention on GPUs, where a program may choose it: scores that never reach memory.

It is two calls, forward and backward, that every device makes with its batch and heads. What is compiled for NVIDIA's
GPUs holds cuDNN's own calls, as `jax.nn.dot_product_attention(implementation="cudnn")` makes them where JAX finds
cuDNN; anywhere else the same is computed by scores in memory, so a program can be planned and tested without a GPU.
"""

import functools
import importlib
from typing import Any, NamedTuple

from autoshard.mlir import CallWork
from autoshard.program import _flops
from autoshard.program._marks import CONTEXT, mark_of
from autoshard.program._masks import seen_share, visible_scores
from autoshard.program._register import RuledFunction
from autoshard.rules import parse_call_rule


NAME = "cudnn_attention"
"""Beginning of the names of both calls."""

_HEAD = 128
"""Widest head that cuDNN takes on all of NVIDIA's GPUs since Ampere."""
_QUERY, _KEY, _ROWS = "b k g s d", "b k t d", "b k g s"


class _Scores(NamedTuple):
    """Which scores there are, and what they are multiplied with."""

    causal: bool
    window: int | None
    scale: float


def cudnn_refusal(query: Any, key: Any, value: Any, *, masked: str, causal: bool, more: str) -> str:
    """Why cuDNN cannot compute attention of `query` [B, H, S, D] over `key` [B, K, T, D]; empty if it can.

    `masked`: why masks of the model's own keep it from any kernel, or empty; `more`: what else it is asked for.
    """
    size = query.shape[-1]
    if masked:
        return masked
    if more:
        return f"cuDNN's attention takes no {more}"
    if query.dtype.name not in ("bfloat16", "float16"):
        return f"cuDNN's attention multiplies bfloat16 or float16, not {query.dtype.name}"
    if size > _HEAD or size % 8 or value.shape[-1] != size:
        return f"heads of {size} are not what cuDNN's attention takes on every GPU: multiples of 8 up to {_HEAD}"
    if causal and query.shape[2] != key.shape[2]:
        return f"cuDNN's causal attention takes as many queries as keys, not {query.shape[2]} of {key.shape[2]}"
    return ""


def cudnn_attention(
    query: Any, key: Any, value: Any, *, causal: bool, window: int | None = None, scale: float | None = None
) -> Any:
    """Softmax attention: `query` [B, K, G, S, D], `key` and `value` [B, K, T, D] give [B, K, G, S, D], with gradients.

    Each of the K key-value heads serves G query heads.
    """
    size, share = query.shape[-1], seen_share(query.shape[3], key.shape[2], causal, window)
    scores = _Scores(causal, window, size**-0.5 if scale is None else scale)
    product = 2.0 * query.size * key.shape[2] * share
    _flops.record(2.0 * product)
    return _differentiable()(query, key, value, scores, int(product), mark_of(CONTEXT))


@functools.cache
def _differentiable() -> Any:
    import jax
    from jax.ad_checkpoint import checkpoint_name

    def forward(query: Any, key: Any, value: Any, scores: _Scores, product: int, name: str | None) -> tuple[Any, Any]:
        mixed, sums = _call("fwd", scores, 2 * product)(query, key, value)
        if name is not None:  # with it its row sums: without these it would run again
            mixed, sums = checkpoint_name(mixed, name), checkpoint_name(sums, name)
        return mixed, (query, key, value, mixed, sums)

    def backward(scores: _Scores, product: int, name: str | None, saved: Any, gradient: Any) -> tuple[Any, Any, Any]:
        return _call("bwd", scores, 5 * product)(*saved, gradient)

    primal = jax.custom_vjp(lambda *given: forward(*given)[0], nondiff_argnums=(3, 4, 5))
    primal.defvjp(forward, backward)
    return primal


@functools.cache
def _call(way: str, scores: _Scores, flops: int) -> RuledFunction:
    ours, cudnn = {"fwd": (_forward, _cudnn_forward), "bwd": (_backward, _cudnn_backward)}[way]

    def fn(*given: Any) -> Any:
        import jax

        return jax.lax.platform_dependent(
            *given, cuda=functools.partial(cudnn, scores=scores), default=functools.partial(ours, scores=scores)
        )

    takes = f"{_QUERY}, {_KEY}, {_KEY}"
    text = f"{takes} -> {_QUERY}, {_ROWS}" if way == "fwd" else f"{takes}, {_QUERY}, {_ROWS}, {_QUERY} -> {takes}"
    # Heads of one group share their keys, whose gradients are sums over them: they stay together.
    rule = parse_call_rule(f"{NAME}_{way}", text, need_replication="g s t d")
    return RuledFunction(fn, rule, (), CallWork(flops))


def _weights(query: Any, key: Any, scores: _Scores) -> Any:
    """Scores in f32 [B, K, G, S, T], least where nothing is seen."""
    import jax.numpy as jnp

    found = jnp.einsum("bkgsd,bktd->bkgst", query, key, preferred_element_type=jnp.float32) * scores.scale
    length, keys = query.shape[3], key.shape[2]
    seen = visible_scores(length, keys, scores.causal, scores.window, keys - length)
    return found if seen is None else jnp.where(seen, found, jnp.finfo(jnp.float32).min)


def _forward(query: Any, key: Any, value: Any, *, scores: _Scores) -> tuple[Any, Any]:
    import jax
    import jax.numpy as jnp

    found = _weights(query, key, scores)
    sums = jax.nn.logsumexp(found, axis=-1)
    weights = jnp.exp(found - sums[..., None]).astype(value.dtype)
    return jnp.einsum("bkgst,bktd->bkgsd", weights, value), sums


def _backward(
    query: Any, key: Any, value: Any, mixed: Any, sums: Any, gradient: Any, *, scores: _Scores
) -> tuple[Any, Any, Any]:
    import jax.numpy as jnp

    wide = jnp.float32
    weights = jnp.exp(_weights(query, key, scores) - sums[..., None])
    of_value = jnp.einsum("bkgst,bkgsd->bktd", weights, gradient.astype(wide))
    of_weights = jnp.einsum("bkgsd,bktd->bkgst", gradient, value, preferred_element_type=wide)
    rows = (gradient.astype(wide) * mixed.astype(wide)).sum(-1, keepdims=True)
    of_scores = weights * (of_weights - rows) * scores.scale
    of_query = jnp.einsum("bkgst,bktd->bkgsd", of_scores, key.astype(wide))
    of_key = jnp.einsum("bkgst,bkgsd->bktd", of_scores, query.astype(wide))
    return of_query.astype(query.dtype), of_key.astype(key.dtype), of_value.astype(value.dtype)


def _cudnn_forward(query: Any, key: Any, value: Any, *, scores: _Scores) -> tuple[Any, Any]:
    found = _fused()._dot_product_attention_fwd_impl(
        _merged(query), key, value, *_nothing(query), **_asked(scores), is_training=True
    )
    return found[0].reshape(query.shape), found[1].reshape(query.shape[:4])


def _cudnn_backward(
    query: Any, key: Any, value: Any, mixed: Any, sums: Any, gradient: Any, *, scores: _Scores
) -> tuple[Any, Any, Any]:
    rows = sums.reshape(query.shape[0], -1, query.shape[3])
    of_query, of_key, of_value = _fused()._dot_product_attention_bwd_impl(
        _merged(query), key, value, *_nothing(query), rows, _merged(mixed), _merged(gradient), **_asked(scores)
    )
    return of_query.reshape(query.shape), of_key, of_value


def _fused() -> Any:
    """jax's own way to cuDNN, without the questions that it asks of the GPU at hand."""
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


def _merged(heads: Any) -> Any:
    """[B, K, G, S, D] as [B, N, S, D]."""
    return heads.reshape(heads.shape[0], -1, *heads.shape[3:])


def _nothing(query: Any) -> list[Any]:
    """In place of a bias, lengths and offsets of sequences, and tables of pages: all empty."""
    import jax.numpy as jnp

    return [*(jnp.zeros(0, query.dtype),) * 5, *(jnp.zeros(0, query.dtype),) * 2]


def _asked(scores: _Scores) -> dict[str, Any]:
    fused = _fused()
    mask = fused.MaskType.CAUSAL if scores.causal else fused.MaskType.NO_MASK
    return {
        "scale": scores.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": mask,
        "layout": fused.AttentionLayout.BNTH.value,
        "sliding_window_length": scores.window,
    }
