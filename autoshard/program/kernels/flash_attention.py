"""Attention as one opaque kernel call that never writes its scores to memory; there is no implementation.

The calls lower to `stablehlo.custom_call @autoshard_attention` (forward) and `@autoshard_attention_backward`. Their
factors and FLOPs are known to `graph/`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from autoshard.program import model_flops
from autoshard.program.kernels.attention_masks import computed_share, grid_steps, seen_share


FORWARD = "autoshard_attention"
BACKWARD = "autoshard_attention_backward"
"""Target of the backward call with one kernel for keys and values and one for queries."""
FUSED = "autoshard_attention_backward_fused"
"""Target of the backward call with one kernel for all gradients."""
FORWARD_RING = "autoshard_ring_attention"
BACKWARD_RING = "autoshard_ring_attention_backward"
FUSED_RING = "autoshard_ring_attention_backward_fused"


_BLOCK = 512
"""Queries, and keys, in one block of jax's splash kernel (MaxText's default)."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelBlocks:
    """Sizes (queries, keys) of a block of scores of jax's splash kernels.

    `forward` is for the forward kernel, `keys` for the gradients of keys and values, `queries` for that of queries.
    With `fused` one backward kernel, with blocks `keys`, computes all gradients, and the scores once.
    """

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
    """Compute softmax attention with gradients; return [B, K, G, S, E].

    - `query`: [B, K, G, S, D]; each of the K key-value heads serves G query heads.
    - `key`, `value`: [B, K, T, D] and [B, K, T, E].
    - `causal`, `window`: masks of the scores, as in `splash_attention`.
    - `blocks`: blocks of scores, None for the defaults, capped to the lengths. Fully masked blocks are skipped, as in
      jax's splash kernel.
    - `ring`: keys and values go around the devices that share the sequence.
    - `balanced`: tokens are in an order in which all parts of the queries see equally many keys. Otherwise later
      queries of a causal call without window and ring are priced as more work.

    There is no implementation: a program with this call can only be planned and priced.
    """
    blocks = blocks or KernelBlocks()
    length, keys = query.shape[3], key.shape[2]
    _record_scores(query, key, value, seen_share(length, keys, causal, window))
    sizes = [(min(q, length), min(k, keys)) for q, k in (blocks.forward, blocks.keys, blocks.queries)]
    forward, of_keys, of_queries = (
        _Grid(computed_share(length, keys, causal, window, each), grid_steps(length, keys, causal, window, each))
        for each in sizes
    )
    # Keys and values need four matmuls over the scores, queries three. A fused kernel needs five in all.
    share = of_keys.share if blocks.fused else (4 * of_keys.share + 3 * of_queries.share) / 7
    backward = _Grid(share, of_keys.steps + (0 if blocks.fused else of_queries.steps))
    uneven = causal and window is None and not balanced and not ring
    slope = -(-length // sizes[0][0]) if uneven else 0
    return _differentiable()(query, key, value, _CallForm(forward, backward, blocks.fused, ring, slope))


class _Grid(NamedTuple):
    """Work of one kernel."""

    share: float
    """Share of the scores that is computed."""
    steps: int
    """Grid steps that compute something, for one head of one sequence."""


class _CallForm(NamedTuple):
    """Work and form of the forward and backward calls."""

    forward: _Grid
    backward: _Grid
    """Work of all backward kernels; the share is the mean over their matmuls."""
    fused: bool
    """True if one backward kernel computes all gradients."""
    ring: bool
    """True if keys and values go around a ring."""
    slope: int
    """Number of query blocks, each of which sees more keys than the one before; 0 if all see equally many."""

    def attributes(self, grid: _Grid) -> dict[str, float]:
        """Return the attributes of a call with this work: `seen_share`, `grid_steps` and, if any, `sloping_blocks`."""
        slope = {"sloping_blocks": float(self.slope)} if self.slope else {}
        return {"seen_share": grid.share, "grid_steps": float(grid.steps)} | slope


def _record_scores(query: Any, key: Any, value: Any, share: float) -> None:
    """Record as model FLOPs those of both forward matmuls over a `share` of the scores."""
    scores = (*query.shape[:4], key.shape[2])
    model_flops.record(2.0 * functools.reduce(lambda a, b: a * b, scores, share * (query.shape[4] + value.shape[3])))


@functools.cache
def _differentiable() -> Any:
    """Return the call as a function with a custom gradient."""
    import jax
    from jax.ad_checkpoint import checkpoint_name

    def forward(query: Any, key: Any, value: Any, way: _CallForm) -> tuple[Any, Any]:
        shapes = (
            jax.ShapeDtypeStruct((*query.shape[:4], value.shape[3]), query.dtype),
            jax.ShapeDtypeStruct(query.shape[:4], "float32"),
        )
        # Both results have the name that MaxText's splash attention gives them. If saved, they are not recomputed.
        mixed, normaliser = jax.ffi.ffi_call(
            FORWARD_RING if way.ring else FORWARD, shapes, vmap_method="broadcast_all"
        )(query, key, value, **way.attributes(way.forward))
        mixed, normaliser = (checkpoint_name(each, "context") for each in (mixed, normaliser))
        return mixed, (query, key, value, mixed, normaliser)

    def backward(way: _CallForm, saved: Any, gradient: Any) -> tuple[Any, Any, Any]:
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3])
        target = (BACKWARD, BACKWARD_RING, FUSED, FUSED_RING)[2 * way.fused + way.ring]
        call = jax.ffi.ffi_call(target, shapes, vmap_method="broadcast_all")
        return tuple(call(*saved, gradient, **way.attributes(way.backward)))  # type: ignore[return-value]

    primal = jax.custom_vjp(lambda *given: forward(*given)[0], nondiff_argnums=(3,))
    primal.defvjp(forward, backward)
    return primal
