"""Values that compilers store between the matmuls of unrolled norms, activations and transposes, and their order."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.graph import FusionRules, Liveness, OpGraph, analyse
from tests.graph.buffers import TPU
from tests.graph.programs import f32, graph_of, ops


GPU = FusionRules(narrows_stacks=False, gpu_kernels=True)
BATCH, PATCHES, WIDTH = 64, 24, 32


def normed(x: Any, scale: Any) -> Any:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * scale


def channels(params: Any, x: Any) -> Any:
    for scale, up, down in params:
        x = x + jax.nn.gelu(normed(x, scale) @ up) @ down
    return x


def mixed(params: Any, x: Any) -> Any:
    for first, up, down, *layer in params:
        h = jnp.swapaxes(normed(x, first), 1, 2)
        x = channels([layer], x + jnp.swapaxes(jax.nn.gelu(h @ up) @ down, 1, 2))
    return x


def gradient(fn: Any, params: Any, x: Any) -> OpGraph:
    return graph_of(jax.grad(lambda params, x: jnp.sum(fn(params, x) ** 2)), params, x)


def shapes(graph: OpGraph, tensors: Any) -> list[tuple[int, ...]]:
    return [graph.tensors[t].shape for t in tensors if graph.tensors[t].elements >= BATCH * PATCHES * WIDTH]


def layers(dtype: str, count: int = 3) -> list[Any]:
    parts = (f32(WIDTH), f32(WIDTH, 4 * WIDTH), f32(4 * WIDTH, WIDTH))
    return [tuple(jax.ShapeDtypeStruct(part.shape, dtype) for part in parts)] * count


def mixer(count: int = 2) -> list[Any]:
    return [(f32(WIDTH), f32(PATCHES, 48), f32(48, PATCHES), *layer) for layer in layers("float32", count)]


def test_statistics_of_a_norm_do_not_decide_that_it_is_stored() -> None:
    """Store each layer's sum and the product before its activation, as a mixer in float32 does on v5e."""
    graph = gradient(channels, layers("float32"), f32(BATCH, PATCHES, WIDTH))
    liveness = analyse(graph, rules=TPU)
    wide = BATCH * PATCHES * 4 * WIDTH
    forward = [op.results[0] for op in ops(graph, "dot_general") if graph.tensors[op.results[0]].elements == wide][:3]
    assert set(forward) <= liveness.materialised
    live = [t for t, start, stop in liveness.buffers if start <= forward[-1] and t not in graph.arguments]
    middle = graph.tensors[forward[-1]].producer
    across = [t for t, start, stop in liveness.buffers if start < middle < stop and t not in graph.arguments]
    assert live and sorted(shapes(graph, across)) == sorted(
        [(BATCH, PATCHES, 4 * WIDTH)] * 2 + [(BATCH, PATCHES, WIDTH)] * 2
    )


def test_rows_around_a_transpose_are_stored_for_the_channels() -> None:
    """Store the norm and the activation of each block of a mixer's channels (v5e, 128 images or more)."""
    graph = gradient(mixed, mixer(), f32(BATCH, PATCHES, WIDTH))
    relaid = analyse(graph, rules=TPU).relaid_rows
    assert sorted(shapes(graph, [t for t, _, _ in relaid])) == sorted(
        [(BATCH, PATCHES, WIDTH), (BATCH, PATCHES, 4 * WIDTH)] * 2
    )
    assert all(graph.tensors[t].producer <= stop for t, _, stop in relaid)
    without = gradient(channels, layers("float32"), f32(BATCH, PATCHES, WIDTH))
    assert not analyse(without, rules=TPU).relaid_rows


def rounded(liveness: Liveness, graph: OpGraph) -> list[int]:
    return [t for t in liveness.materialised if (op := graph.maker(t)) is not None and op.kind == "tanh"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_rounded_tanh_is_stored_on_gpus(dtype: str) -> None:
    """Store each gelu's tanh, in bfloat16 alone, by the kernel that computes its product."""
    graph = gradient(channels, layers(dtype), jax.ShapeDtypeStruct((BATCH, PATCHES, WIDTH), dtype))
    liveness = analyse(graph, rules=GPU)
    found = rounded(liveness, graph)
    assert len(found) == (3 if dtype == "bfloat16" else 0)
    fusions = {t: fusion for fusion in liveness.fusions for t in fusion.writes}
    for tensor in found:
        reader = min((f for f in liveness.fusions if tensor in f.reads), default=None, key=lambda f: f.root)
        joined = [f for f in liveness.fusions if f.is_fused_sibling and f.root > fusions[tensor].root]
        assert (
            reader is not None
            and reader.root > joined[0].root
            and not set(fusions[tensor].reads) & set(joined[0].reads)
        )


def attended(params: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in params)
    return jax.nn.dot_product_attention(q, k, v)


def test_gradients_of_attention_need_four_squares_on_gpus() -> None:
    """Hold scores, probabilities and both of their gradients at once, as attention in float32 does on h100."""
    length = 64
    graph = gradient(attended, [f32(16, 2, 8)] * 3, f32(4, length, 16))
    liveness = analyse(graph, rules=GPU)
    squares = [b for b in liveness.buffers if graph.tensors[b[0]].elements == 4 * 2 * length * length]
    most = max(sum(start <= at < stop for _, start, stop in squares) for at in range(len(graph.ops)))
    assert most == 4


def test_a_maximum_is_applied_on_load_on_gpus() -> None:
    """Store a relu's input alone, with its bias, for the next matmul and for the gradient (MLPs on h100)."""

    def loss(params: Any, x: Any) -> Any:
        for w, b in params:
            x = jax.nn.relu(x @ w + b)
        return jnp.sum(x**2)

    graph = graph_of(jax.grad(loss), [(f32(64, 64), f32(64))] * 3, f32(4096, 64))
    stored = analyse(graph, rules=GPU).materialised
    made = [
        maker.kind for t in stored if (maker := graph.maker(t)) is not None and graph.tensors[t].shape == (4096, 64)
    ]
    assert "maximum" not in made[:-1] and made.count("add") >= 2
