"""Memory traffic and live bytes of attention's scores on TPUs, compared with observed compiled programs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.graph import (
    OpClass,
    OpGraph,
    Softmax,
    SoftmaxForm,
    analyse,
    build_structure,
    find_softmaxes,
    store_rounded,
)
from tests.graph.buffers import TPU
from tests.graph.programs import bf16, graph_of


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bhsd,bhtd->bhst", q, k).astype(jnp.float32)
    masked = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores * 0.1, -1e9)
    return jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(masked).astype(q.dtype), v)


def capped(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.tanh(jnp.einsum("bhsd,bhtd->bhst", q, k).astype(jnp.float32))
    return jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(scores).astype(q.dtype), v)


def scaled(q: Any, k: Any, v: Any) -> Any:
    """Compute attention whose scores are scaled and masked in bfloat16, as code in torch does."""
    scores = jnp.einsum("bhsd,bhtd->bhst", q, k) / 8
    masked = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9).astype(jnp.float32)
    return jnp.einsum("bhst,bhtd->bhsd", jax.nn.softmax(masked).astype(q.dtype), v)


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*args: Any) -> Any:
        return (jax.checkpoint(fn)(*args).astype(jnp.float32) ** 2).sum()

    return jax.grad(loss, (0, 1, 2))


def softmaxes_of(fn: Callable[..., Any], row: int) -> tuple[OpGraph, tuple[Softmax, ...]]:
    graph = graph_of(fn, bf16(4, 8, 128, 64), bf16(4, 8, row, 64), bf16(4, 8, row, 64))
    return graph, find_softmaxes(graph, build_structure(graph))


def bytes_per_score(graph: OpGraph, softmax: Softmax, form: SoftmaxForm) -> float:
    """Sum the traffic of all kernels on score-sized values, matmuls included, in bytes per score."""
    times = dict(form.moved)
    for op in graph.ops:
        if op.op_class is OpClass.HEAVY:
            for tensor in softmax.tensors.intersection((*op.operands, *op.results)):
                times[tensor] = times.get(tensor, 0) + 1
    return sum(graph.tensors[t].bytes * n for t, n in times.items()) / graph.tensors[softmax.scores].elements


@pytest.mark.parametrize(
    ("fn", "row", "fused", "recomputed"),
    [
        # Bytes in the compiled programs: with local scores [4, 8, 1024, 1024], and with [1, 16, 1024, 1024].
        (attention, 1024, 8, 6),
        (gradient(attention), 1024, 8 + 26, 6 + 18),
        # Too long for the scores' own kernel: [4, 8, 4096, 4096] (the scores in their traced dtype), [1, 16, 4096,
        # 4096].
        (gradient(attention), 4096, 12 + 30, 6 + 18),
    ],
)
def test_traffic_is_what_was_compiled(fn: Callable[..., Any], row: int, fused: float, recomputed: float) -> None:
    graph, softmaxes = softmaxes_of(fn, row)
    assert all(softmax.rows == (3,) for softmax in softmaxes)
    assert sum(bytes_per_score(graph, softmax, softmax.fused) for softmax in softmaxes) == fused
    assert sum(bytes_per_score(graph, softmax, softmax.recomputed) for softmax in softmaxes) == recomputed


def test_computed_again_only_scores_and_their_gradient_are_stored() -> None:
    graph, softmaxes = softmaxes_of(gradient(attention), 1024)
    backward = softmaxes[-1]
    products = {op.results[0] for op in graph.ops if op.op_class is OpClass.HEAVY}
    assert len(backward.recomputed.buffers) == 2
    assert {tensor for tensor, *_ in backward.recomputed.buffers} <= products
    assert {width for *_, width in backward.recomputed.buffers} == {2}


@pytest.mark.parametrize("row", [2048, 4096])
def test_in_one_kernel_the_exponentials_and_long_rows_of_scores_are_stored(row: int) -> None:
    graph, (softmax,) = softmaxes_of(attention, row)
    wide = [(tensor, width) for tensor, *_, width in softmax.fused.buffers]
    (exponential,) = (op.results[0] for op in graph.ops if op.kind == "exponential")
    assert wide == [(exponential, 4)] if row == 2048 else wide == [(softmax.scores, 4), (exponential, 4)]


def test_scores_that_the_gradient_takes_are_stored_in_rows_of_any_length() -> None:
    _, softmaxes = softmaxes_of(gradient(capped), 1024)
    assert softmaxes[-1].scores in {tensor for tensor, *_ in softmaxes[-1].fused.buffers}


def test_neither_sigmoids_nor_saved_probabilities_are_one() -> None:
    def gated(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bhsd,bhtd->bhst", q, k)
        return jnp.einsum("bhst,bhtd->bhsd", scores * jnp.exp(-scores), v)

    def layers(q: Any, k: Any, v: Any) -> Any:
        return lax.scan(lambda x, _: (attention(x, k, v), None), q, None, length=2)[0].astype(jnp.float32).sum()

    assert softmaxes_of(gated, 128)[1] == ()
    assert len(softmaxes_of(layers, 128)[1]) == 1
    assert softmaxes_of(jax.grad(layers), 128)[1] == ()


def test_what_a_softmax_holds_is_nowhere_else() -> None:
    graph, softmaxes = softmaxes_of(gradient(attention), 1024)
    inside = {tensor for softmax in softmaxes for tensor in softmax.tensors}
    before = analyse(graph, rules=TPU)
    after = analyse(graph, rules=TPU, softmaxes=softmaxes)
    assert inside.intersection(tensor for tensor, *_ in before.buffers)
    # Other values may live longer or shorter, as the compiler stores probabilities that it knows to be scores.
    assert {tensor for tensor, *_ in after.buffers} == {tensor for tensor, *_ in before.buffers} - inside


def test_rounded_values_that_two_matmuls_read_are_stored() -> None:
    """Compare with a step that was compiled for v5p: the forward pass's probabilities are freed before the gradient."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (attention(q, k, v).astype(jnp.float32) ** 2).sum()

    graph = graph_of(jax.grad(loss, (0, 1, 2)), *(bf16(4, 8, 1024, 64),) * 3)
    (softmax,) = store_rounded(find_softmaxes(graph, build_structure(graph)))
    scores, probabilities, before, gradient = sorted(softmax.recomputed.buffers, key=lambda buffer: buffer[1])
    for tensor, *_ in (probabilities, gradient):
        assert [op.op_class for op in graph.users[tensor]] == [OpClass.HEAVY] * 2
    assert probabilities[2] <= before[1] < gradient[1] < scores[2]


def test_scores_that_are_computed_with_in_bfloat16_are_narrow() -> None:
    for fn, narrow in ((attention, False), (capped, False), (scaled, True)):
        (softmax,) = softmaxes_of(fn, 128)[1]
        assert softmax.narrow == narrow
        (kept,) = store_rounded([softmax], narrow=True)
        assert kept.recomputed == (softmax.rounded if narrow else softmax.recomputed)
