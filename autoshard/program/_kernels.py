"""Attention as one kernel that never writes its scores to memory: a call that the planner knows, not an implementation.

The calls lower to `stablehlo.custom_call @autoshard_attention` (forward) and `@autoshard_attention_backward`;
`graph/` knows their factors and FLOPs.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from autoshard.program import _flops
from autoshard.program._masks import computed_share, grid_steps, seen_share


FORWARD = "autoshard_attention"
BACKWARD = "autoshard_attention_backward"
FUSED = "autoshard_attention_backward_fused"


_BLOCK = 512
"""Queries, and keys, in one block of jax's splash kernel (MaxText's default)."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelBlocks:
    """(queries, keys) in a block of scores of jax's splash kernels: forward, for the gradients of keys and values, and
    for those of queries; `fused`: one backward kernel makes all gradients, and computes the scores once."""

    forward: tuple[int, int] = (_BLOCK, _BLOCK)
    keys: tuple[int, int] = (_BLOCK, _BLOCK)
    queries: tuple[int, int] = (_BLOCK, _BLOCK)
    fused: bool = False


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool,
    window: int | None = None,
    blocks: KernelBlocks | None = None,
) -> Any:
    """Softmax attention: `query` [B, K, G, S, D], `key` [B, K, T, D], `value` [B, K, T, E] give [B, K, G, S, E].

    Each of the K key-value heads serves G query heads. With gradients. `blocks` of scores that are masked whole are
    skipped, as jax's splash kernel does. It has no implementation: a program that holds it can be planned and
    priced only.
    """
    blocks = blocks or KernelBlocks()
    length, keys = query.shape[3], key.shape[2]
    _record_scores(query, key, value, seen_share(length, keys, causal, window))
    sizes = [(min(q, length), min(k, keys)) for q, k in (blocks.forward, blocks.keys, blocks.queries)]
    forward, of_keys, of_queries = (
        _Grid(computed_share(length, keys, causal, window, each), grid_steps(length, keys, causal, window, each))
        for each in sizes
    )
    # Four matmuls over the scores for keys and values, three for queries; all five in a fused kernel.
    share = of_keys.share if blocks.fused else (4 * of_keys.share + 3 * of_queries.share) / 7
    backward = _Grid(share, of_keys.steps + (0 if blocks.fused else of_queries.steps))
    return _differentiable()(query, key, value, forward, backward, blocks.fused)


class _Grid(NamedTuple):
    share: float
    """The share of the scores that is computed."""
    steps: int
    """Steps of the grid that compute something, for one head of one sequence."""


def _record_scores(query: Any, key: Any, value: Any, share: float) -> None:
    scores = (*query.shape[:4], key.shape[2])
    _flops.record(2.0 * functools.reduce(lambda a, b: a * b, scores, share * (query.shape[4] + value.shape[3])))


@functools.cache
def _differentiable() -> Any:
    import jax

    def forward(query: Any, key: Any, value: Any, grid: _Grid, again: _Grid, fused: bool) -> tuple[Any, Any]:
        shapes = (
            jax.ShapeDtypeStruct((*query.shape[:4], value.shape[3]), query.dtype),
            jax.ShapeDtypeStruct(query.shape[:4], "float32"),
        )
        mixed, normaliser = jax.ffi.ffi_call(FORWARD, shapes, vmap_method="broadcast_all")(
            query, key, value, seen_share=grid.share, grid_steps=float(grid.steps)
        )
        return mixed, (query, key, value, mixed, normaliser)

    def backward(grid: _Grid, again: _Grid, fused: bool, saved: Any, gradient: Any) -> tuple[Any, Any, Any]:
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3])
        call = jax.ffi.ffi_call(FUSED if fused else BACKWARD, shapes, vmap_method="broadcast_all")
        told = {"seen_share": again.share, "grid_steps": float(again.steps)}
        return tuple(call(*saved, gradient, **told))  # type: ignore[return-value]

    primal = jax.custom_vjp(lambda *given: forward(*given)[0], nondiff_argnums=(3, 4, 5))
    primal.defvjp(forward, backward)
    return primal
