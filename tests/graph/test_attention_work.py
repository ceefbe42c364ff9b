"""FLOPs that a model's attention needs, by hand: 12 b h s t d in training, times the share that a mask keeps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from autoshard.graph import model_shares, read_graph
from autoshard.program import trace


BATCH, HEADS, SEQ, DIM, WINDOW = 2, 4, 512, 64, 128
Mask = Callable[[Any], Any]


def needed(attend: Callable[..., Any], heads_first: bool = False) -> float:
    """Return the model FLOPs of a training step of an attention, over those of all scores by hand."""
    shape = (BATCH, HEADS, SEQ, DIM) if heads_first else (BATCH, SEQ, HEADS, DIM)
    each = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    step = jax.grad(lambda *args: attend(*args).astype(jnp.float32).sum(), (0, 1, 2))
    graph = read_graph(trace(step, (each, each, each), name="attention").module)
    shares = model_shares(graph)
    ops = [op for op in graph.ops if op.flops and "rematted_computation" not in op.name]
    flops = sum(op.flops * shares.get(op.id, 1.0) * graph.trips(op.loop) for op in ops)
    return flops / (12 * BATCH * HEADS * SEQ * SEQ * DIM)


def masked(mask: Mask) -> Callable[..., Any]:
    """Return attention by einsums, with scores that `mask` hides."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = mask(jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32))
        return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores).astype(q.dtype), v)

    return attend


def ahead(scores: Any) -> Any:
    return jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)[None, :]


lower = masked(lambda scores: jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, -1e9))
upper = masked(lambda scores: jnp.where(jnp.triu(jnp.ones((SEQ, SEQ), bool), 1), -1e9, scores))
near = masked(lambda scores: jnp.where((ahead(scores) >= 0) & (ahead(scores) < WINDOW), scores, -1e9))
whole = masked(lambda scores: scores)


def causal(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@jax.checkpoint
def layers(q: Any, k: Any, v: Any) -> Any:
    return jax.lax.scan(jax.checkpoint(lambda x, _: (causal(x, k, v), None)), q, None, length=1)[0]


SEEN = np.mean([min(row + 1, WINDOW) for row in range(SEQ)]) / SEQ


@pytest.mark.parametrize(
    ("attend", "share"),
    [(causal, 0.5), (layers, 0.5), (lower, 0.5), (upper, 0.5), (near, SEEN), (whole, 1.0)],
    ids=["jax.nn", "recomputed layers", "tril", "triu", "window", "whole"],
)
def test_masked_scores_of_a_softmax_in_memory_do_not_count(attend: Callable[..., Any], share: float) -> None:
    assert needed(attend) == pytest.approx(share, rel=0.01)


def test_attentions_at_one_line_that_differ_in_masks_count_whole() -> None:
    assert needed(lambda q, k, v: causal(whole(q, k, v), k, v)) == pytest.approx(1.5, rel=0.01)
    either = [masked(mask) for mask in (lambda scores: scores, lambda s: jnp.where(ahead(s) >= 0, s, -1e9))]
    assert needed(lambda q, k, v: either[1](either[0](q, k, v), k, v)) == pytest.approx(2.0, rel=0.01)


def splash(block: int, fused: bool, mask: Any = splash_attention_mask.CausalMask) -> Callable[..., Any]:
    """Return jax's kernel over one sequence for each example, with square blocks."""
    names = [f"block_{side}{of}" for of in ("", "_dkv") for side in ("q", "kv")] + ["block_kv_compute"]
    names += ["block_kv_dkv_compute", *(() if fused else ("block_q_dq", "block_kv_dq"))]
    sizes = splash_attention_kernel.BlockSizes(**dict.fromkeys(names, block), use_fused_bwd_kernel=fused)
    heads = splash_attention_mask.MultiHeadMask([mask((SEQ, SEQ))] * HEADS)
    return jax.vmap(splash_attention_kernel.make_splash_mha_single_device(heads, block_sizes=sizes))


@pytest.mark.parametrize(
    ("attend", "share"),
    [
        (splash(128, False), 0.5),
        (splash(256, False), 0.5),
        (splash(256, True), 0.5),
        (splash(128, False, splash_attention_mask.FullMask), 1.0),
        (lambda q, k, v: flash_attention(q, k, v, causal=True), 0.5),
    ],
    ids=["blocks of 128", "blocks of 256", "fused backward", "no mask", "flash"],
)
def test_a_kernels_recomputed_scores_and_blocks_do_not_count(attend: Callable[..., Any], share: float) -> None:
    assert needed(attend, heads_first=True) == pytest.approx(share, rel=0.01)
