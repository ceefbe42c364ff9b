"""Attention as one kernel that never writes its scores to memory: a call that the planner knows, not an implementation.

The calls lower to `stablehlo.custom_call @autoshard_attention` (forward) and `@autoshard_attention_backward`;
`graph/` knows their factors and FLOPs.
"""

import functools
from typing import Any

from autoshard.program import _flops
from autoshard.program._attention import seen_share


FORWARD = "autoshard_attention"
BACKWARD = "autoshard_attention_backward"


def flash_attention(query: Any, key: Any, value: Any, *, causal: bool, window: int | None = None) -> Any:
    """Softmax attention: `query` [B, K, G, S, D], `key` [B, K, T, D], `value` [B, K, T, E] give [B, K, G, S, E].

    Each of the K key-value heads serves G query heads. With gradients. It has no implementation: a program that
    holds it can be planned and priced only.
    """
    share = seen_share(query.shape[3], key.shape[2], causal, window)
    scores = (*query.shape[:4], key.shape[2])
    _flops.record(2.0 * functools.reduce(lambda a, b: a * b, scores, share * (query.shape[4] + value.shape[3])))
    return _differentiable()(query, key, value, share)


@functools.cache
def _differentiable() -> Any:
    import jax

    def forward(query: Any, key: Any, value: Any, share: float) -> tuple[Any, Any]:
        shapes = (
            jax.ShapeDtypeStruct((*query.shape[:4], value.shape[3]), query.dtype),
            jax.ShapeDtypeStruct(query.shape[:4], "float32"),
        )
        mixed, normaliser = jax.ffi.ffi_call(FORWARD, shapes, vmap_method="broadcast_all")(
            query, key, value, seen_share=share
        )
        return mixed, (query, key, value, mixed, normaliser)

    def backward(share: float, saved: Any, gradient: Any) -> tuple[Any, Any, Any]:
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3])
        call = jax.ffi.ffi_call(BACKWARD, shapes, vmap_method="broadcast_all")
        return tuple(call(*saved, gradient, seen_share=share))  # type: ignore[return-value]

    primal = jax.custom_vjp(lambda q, k, v, share: forward(q, k, v, share)[0], nondiff_argnums=(3,))
    primal.defvjp(forward, backward)
    return primal
