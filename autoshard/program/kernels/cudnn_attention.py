"""cuDNN's fused attention on GPUs, whose scores never reach memory."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from autoshard.base.call_rules import CallRule, bind, parse_call_rule
from autoshard.mlir import CallWork
from autoshard.program import model_flops
from autoshard.program.kernels.attention_masks import seen_share, visible_scores
from autoshard.program.registered_rules import RuledFunction
from autoshard.program.remat_marks import CONTEXT, mark_of


NAME = "cudnn_attention"
"""Common prefix of the names of the forward and backward calls."""

_HEAD = 128
"""Widest head that cuDNN supports on all NVIDIA GPUs since Ampere."""
_QUERY, _KEY, _ROWS = "b k g s d", "b k t d", "b k g s"


class _Scores(NamedTuple):
    """Masks and scale of the scores."""

    causal: bool
    window: int | None
    """Number of last keys that a query sees; None for all."""
    scale: float


def cudnn_refusal(query: Any, key: Any, value: Any, *, masked: str, causal: bool, more: str) -> str:
    """Return the first reason why cuDNN cannot compute an attention; empty if it can.

    Heads of queries, keys and values must have one size, a multiple of 8 up to 128, in bf16 or f16. Causal attention
    needs as many queries as keys.

    - `query`, `key`, `value`: [B, H, S, D], [B, K, T, D] and [B, K, T, E].
    - `masked`: reason why masks of the model exclude every kernel, or empty.
    - `causal`: True if the attention is causal.
    - `more`: name of another feature that the attention needs, or empty.
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
    """Compute softmax attention with gradients; return [B, K, G, S, D] in the dtype of `value`.

    - `query`: [B, K, G, S, D]; each of the K key-value heads serves G query heads.
    - `key`, `value`: [B, K, T, D].
    - `causal`, `window`: masks of the scores; with a window only the last `window` keys are visible.
    - `scale`: factor of the scores; None for D ** -0.5.

    The FLOPs of scores that are not masked are recorded as model FLOPs.
    """
    size, share = query.shape[-1], seen_share(query.shape[3], key.shape[2], causal, window)
    scores = _Scores(causal, window, size**-0.5 if scale is None else scale)
    # FLOPs of one matmul over the scores; forward has two, backward five.
    product = 2.0 * query.size * key.shape[2] * share
    model_flops.record(2.0 * product)
    return _differentiable()(query, key, value, scores, int(product), mark_of(CONTEXT))


@functools.cache
def _differentiable() -> Any:
    """Return the attention as a function with a custom gradient."""
    import jax
    from jax.ad_checkpoint import checkpoint_name

    def forward(query: Any, key: Any, value: Any, scores: _Scores, product: int, name: str | None) -> tuple[Any, Any]:
        mixed, sums = _call("fwd", scores, 2 * product)(query, key, value)
        if name is not None:  # row sums too, or the kernel would run again
            mixed, sums = checkpoint_name(mixed, name), checkpoint_name(sums, name)
        return mixed, (query, key, value, mixed, sums)

    def backward(scores: _Scores, product: int, name: str | None, saved: Any, gradient: Any) -> tuple[Any, Any, Any]:
        return _call("bwd", scores, 5 * product)(*saved, gradient)

    primal = jax.custom_vjp(lambda *given: forward(*given)[0], nondiff_argnums=(3, 4, 5))
    primal.defvjp(forward, backward)
    return primal


@functools.cache
def _call(way: str, scores: _Scores, flops: int) -> RuledFunction:
    """Return the call `fwd` or `bwd`: cuDNN on NVIDIA GPUs, plain JAX elsewhere, with a sharding rule and `flops`.

    Batch and key-value heads may be split.
    """
    ours, cudnn = {"fwd": (_forward, _cudnn_forward), "bwd": (_backward, _cudnn_backward)}[way]

    def fn(*given: Any) -> Any:
        import jax

        return jax.lax.platform_dependent(
            *given, cuda=functools.partial(cudnn, scores=scores), default=functools.partial(ours, scores=scores)
        )

    takes = f"{_QUERY}, {_KEY}, {_KEY}"
    text = f"{takes} -> {_QUERY}, {_ROWS}" if way == "fwd" else f"{takes}, {_QUERY}, {_ROWS}, {_QUERY} -> {takes}"
    # Heads of one group share their keys, whose gradients are sums over these heads, so that a group stays unsplit.
    rule = parse_call_rule(f"{NAME}_{way}", text, need_replication="g s t d")
    return RuledFunction(fn, rule, (), CallWork(flops))


def _weights(query: Any, key: Any, scores: _Scores) -> Any:
    """Return the scaled scores in fp32 [B, K, G, S, T]; masked ones are the least finite number."""
    import jax.numpy as jnp

    products = jnp.einsum("bkgsd,bktd->bkgst", query, key, preferred_element_type=jnp.float32) * scores.scale
    length, keys = query.shape[3], key.shape[2]
    seen = visible_scores(length, keys, scores.causal, scores.window, keys - length)
    return products if seen is None else jnp.where(seen, products, jnp.finfo(jnp.float32).min)


def _forward(query: Any, key: Any, value: Any, *, scores: _Scores) -> tuple[Any, Any]:
    """Compute the forward call in plain JAX: results [B, K, G, S, D], and logarithms of sums of exponentials, fp32."""
    import jax
    import jax.numpy as jnp

    logits = _weights(query, key, scores)
    sums = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - sums[..., None]).astype(value.dtype)
    return jnp.einsum("bkgst,bktd->bkgsd", weights, value), sums


def _backward(
    query: Any, key: Any, value: Any, mixed: Any, sums: Any, gradient: Any, *, scores: _Scores
) -> tuple[Any, Any, Any]:
    """Compute the gradients of query, key and value in plain JAX, in their dtypes.

    `mixed` and `sums` are the results of the forward call, and `gradient` is that of `mixed`.
    """
    import jax.numpy as jnp

    wide = jnp.float32
    weights = jnp.exp(_weights(query, key, scores) - sums[..., None])
    of_value = jnp.einsum("bkgst,bkgsd->bktd", weights, gradient.astype(wide))
    of_weights = jnp.einsum("bkgsd,bktd->bkgst", gradient, value, preferred_element_type=wide)
    # The softmax's gradient is weights * (d_weights - row sum of weights * d_weights); the row sum equals this one.
    rows = (gradient.astype(wide) * mixed.astype(wide)).sum(-1, keepdims=True)
    of_scores = weights * (of_weights - rows) * scores.scale
    of_query = jnp.einsum("bkgst,bktd->bkgsd", of_scores, key.astype(wide))
    of_key = jnp.einsum("bkgst,bkgsd->bktd", of_scores, query.astype(wide))
    return of_query.astype(query.dtype), of_key.astype(key.dtype), of_value.astype(value.dtype)


def _cudnn_forward(query: Any, key: Any, value: Any, *, scores: _Scores) -> tuple[Any, Any]:
    """Compute the forward call by cuDNN, with the results of `_forward`."""
    outputs = _fused()._dot_product_attention_fwd_impl(
        _merged(query), key, value, *_nothing(query), **_asked(scores), is_training=True
    )
    return outputs[0].reshape(query.shape), outputs[1].reshape(query.shape[:4])


def _cudnn_backward(
    query: Any, key: Any, value: Any, mixed: Any, sums: Any, gradient: Any, *, scores: _Scores
) -> tuple[Any, Any, Any]:
    """Compute the gradients by cuDNN, with the arguments and results of `_backward`."""
    rows = sums.reshape(query.shape[0], -1, query.shape[3])
    of_query, of_key, of_value = _fused()._dot_product_attention_bwd_impl(
        _merged(query), key, value, *_nothing(query), rows, _merged(mixed), _merged(gradient), **_asked(scores)
    )
    return of_query.reshape(query.shape), of_key, of_value


def _fused() -> Any:
    """Return jax's module of cuDNN calls, whose inner functions do not check the present GPU."""
    return importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")


def _merged(heads: Any) -> Any:
    """Reshape [B, K, G, S, D] to [B, N, S, D]."""
    return heads.reshape(heads.shape[0], -1, *heads.shape[3:])


def _nothing(query: Any) -> list[Any]:
    """Return empty operands in place of a bias, lengths and offsets of sequences, and page tables."""
    import jax.numpy as jnp

    return [*(jnp.zeros(0, query.dtype),) * 5, *(jnp.zeros(0, query.dtype),) * 2]


def _asked(scores: _Scores) -> dict[str, Any]:
    """Return the static arguments of jax's functions: no dropout, heads before positions."""
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


_PASSES = {"_dot_product_attention_fwd_impl": False, "_dot_product_attention_bwd_impl": True}
"""Names of jax's functions, with True for the backward pass."""
_MASK, _LAYOUT, _WINDOW = 4, 5, 6
"""Positions of static arguments."""
_CAUSAL = (2, 3)
"""Mask types that hide later positions."""
# Positions of operands.
_BIAS, _LENGTHS = 3, (4, 5)


def cudnn_rule(name: str, static: Sequence[Any], operands: Sequence[Any], results: Sequence[Any]) -> CallRule | None:
    """Return the sharding rule of a call by the name of JAX's function, or None for other calls.

    Batch and key heads may be split, unless the gradient of a bias without these dims is a result.

    - `static`: static arguments of the call, by position.
    - `operands`, `results`: its tensors, with shapes.
    """
    if name not in _PASSES:
        return None

    def laid(head: str, row: str, channel: str) -> str:
        return f"b {head} {row} {channel}" if static[_LAYOUT] else f"b {row} {head} {channel}"

    heads = 1 if static[_LAYOUT] else 2
    shared = operands[0].shape[heads] // max(1, operands[1].shape[heads])
    query_heads = "(k g)" if shared > 1 else "k"
    query, key, value = laid(query_heads, "s", "h"), laid("k", "t", "h"), laid("k", "t", "v")
    mixed, sums = laid(query_heads, "s", "v"), f"b {query_heads} s"
    takes = [query, key, value]
    for number, operand in enumerate(operands[3:10], 3):
        batched = number in _LENGTHS and operand.shape == operands[0].shape[:1]
        takes.append("b" if batched else " ".join(f"u{number}x{dim}" for dim in range(len(operand.shape))))
    if len(operands[_BIAS].shape) == 4:
        sizes = operands[_BIAS].shape
        takes[_BIAS] = f"{'b' if sizes[0] > 1 else 'alike'} {query_heads if sizes[1] > 1 else 'common'} s t"
    if _PASSES[name]:
        takes += [sums, mixed, mixed]
        gives = [query, key, value, *([takes[_BIAS]] if len(results) > 3 else [])]
    else:
        gives = [mixed, sums][: len(results)]
    text = f"{', '.join(takes)} -> {', '.join(gives)}"
    words = set(text.replace("(", " ").replace(")", " ").replace(",", " ").split()) - {"->"}
    unsplit = words - {"b", "k"}
    if len(gives) == 4:  # the bias's gradient is a sum over dims that the bias lacks
        unsplit |= {factor for factor in ("b", "k") if factor not in takes[_BIAS].replace("(", "").split()}
    groups = " g" if shared > 1 else ""
    each = f"b k{groups} s t"
    flops = f"6 {each} h + 4 {each} v" if _PASSES[name] else f"2 {each} h + 2 {each} v"
    sizes = {"g": shared} if shared > 1 else {}
    return parse_call_rule(name, text, need_replication=sorted(unsplit), sizes=sizes, flops=flops)


def cudnn_flops(rule: CallRule, static: Sequence[Any], operands: Sequence[Any], results: Sequence[Any]) -> int:
    """Return the FLOPs of a call with the `rule` of `cudnn_rule`, of all devices.

    A causal mask leaves half of the scores, and a window leaves the window's width of each row; the smaller counts.
    """
    flops = bind(rule, [a.shape for a in operands], [r.shape for r in results], f"of `{rule.name}`").flops
    rows = 2 if static[_LAYOUT] else 1
    keys = operands[1].shape[rows]
    share = 0.5 if int(getattr(static[_MASK], "value", static[_MASK])) in _CAUSAL else 1.0
    if static[_WINDOW]:
        share = min(share, static[_WINDOW] / keys)
    return int(flops * share)
