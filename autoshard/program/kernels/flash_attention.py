"""Attention as one kernel that never writes its scores to memory: a call that the planner knows, not an implementation.

The calls lower to `stablehlo.custom_call @autoshard_attention` (forward) and `@autoshard_attention_backward`;
`graph/` knows their factors and FLOPs.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from autoshard.program import model_flops
from autoshard.program.kernels.attention_masks import computed_share, grid_steps, seen_share


FORWARD = "autoshard_attention"
BACKWARD = "autoshard_attention_backward"
FUSED = "autoshard_attention_backward_fused"
FORWARD_RING = "autoshard_ring_attention"
BACKWARD_RING = "autoshard_ring_attention_backward"
FUSED_RING = "autoshard_ring_attention_backward_fused"


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
    ring: bool = False,
    balanced: bool = False,
) -> Any:
    """Softmax attention: `query` [B, K, G, S, D], `key` [B, K, T, D], `value` [B, K, T, E] give [B, K, G, S, E].

    Each of the K key-value heads serves G query heads. With gradients. `blocks` of scores that are masked whole are
    skipped, as jax's splash kernel does. In a `ring` keys and values go around the devices that share the sequence.
    `balanced`: tokens stand in an order in which all parts of the queries see as many keys. It has no implementation:
    a program that holds it can be planned and priced only.
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
    uneven = causal and window is None and not balanced and not ring
    slope = -(-length // sizes[0][0]) if uneven else 0
    return _differentiable()(query, key, value, _Way(forward, backward, blocks.fused, ring, slope))


class _Grid(NamedTuple):
    share: float
    """The share of the scores that is computed."""
    steps: int
    """Steps of the grid that compute something, for one head of one sequence."""


class _Way(NamedTuple):
    forward: _Grid
    backward: _Grid
    fused: bool
    ring: bool
    slope: int
    """Blocks of queries of which each sees more keys than the one before; 0 where all see as many."""

    def told(self, grid: _Grid) -> dict[str, float]:
        """Attributes of a call."""
        slope = {"sloping_blocks": float(self.slope)} if self.slope else {}
        return {"seen_share": grid.share, "grid_steps": float(grid.steps)} | slope


def _record_scores(query: Any, key: Any, value: Any, share: float) -> None:
    scores = (*query.shape[:4], key.shape[2])
    model_flops.record(2.0 * functools.reduce(lambda a, b: a * b, scores, share * (query.shape[4] + value.shape[3])))


@functools.cache
def _differentiable() -> Any:
    import jax
    from jax.ad_checkpoint import checkpoint_name

    def forward(query: Any, key: Any, value: Any, way: _Way) -> tuple[Any, Any]:
        shapes = (
            jax.ShapeDtypeStruct((*query.shape[:4], value.shape[3]), query.dtype),
            jax.ShapeDtypeStruct(query.shape[:4], "float32"),
        )
        # Under the name that splash attention of MaxText gives both: kept, they spare computing them again.
        mixed, normaliser = jax.ffi.ffi_call(
            FORWARD_RING if way.ring else FORWARD, shapes, vmap_method="broadcast_all"
        )(query, key, value, **way.told(way.forward))
        mixed, normaliser = (checkpoint_name(each, "context") for each in (mixed, normaliser))
        return mixed, (query, key, value, mixed, normaliser)

    def backward(way: _Way, saved: Any, gradient: Any) -> tuple[Any, Any, Any]:
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3])
        target = (BACKWARD, BACKWARD_RING, FUSED, FUSED_RING)[2 * way.fused + way.ring]
        call = jax.ffi.ffi_call(target, shapes, vmap_method="broadcast_all")
        return tuple(call(*saved, gradient, **way.told(way.backward)))  # type: ignore[return-value]

    primal = jax.custom_vjp(lambda *given: forward(*given)[0], nondiff_argnums=(3,))
    primal.defvjp(forward, backward)
    return primal
