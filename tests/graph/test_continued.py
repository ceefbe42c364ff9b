"""Epilogues that the kernels of matmuls and convolutions compute on TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.graph import Fusion, OpGraph, analyse, round_operands
from tests.graph.buffers import TPU
from tests.graph.programs import f32, graph_of, ops


ROWS, WIDTH = 256, 64


def dense(params: Any, x: Any) -> Any:
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return jnp.sum(x * x)


def large(graph: OpGraph, tensors: Any) -> list[int]:
    return [t for t in tensors if graph.tensors[t].elements >= ROWS * WIDTH]


def traffic(graph: OpGraph, fusions: tuple[Fusion, ...]) -> int:
    """Count the large values that fusions without a matmul or convolution read and write."""
    moving = [f for f in fusions if graph.ops[f.root].kind not in ("dot_general", "convolution")]
    return sum(len(large(graph, (*f.reads, *f.moved))) for f in moving)


def test_a_matmul_goes_on_with_what_follows_and_sums_it() -> None:
    layer = (f32(WIDTH, WIDTH), f32(WIDTH))
    graph = graph_of(jax.grad(dense), [layer] * 4, f32(ROWS, WIDTH))
    liveness = analyse(graph, rules=TPU)
    products = {op.results[0] for op in ops(graph, "dot_general") if graph.tensors[op.results[0]].shape[0] == ROWS}
    back = sorted(products)[4:]  # gradients of the layers' inputs; the first layer's is not computed
    assert len(products) == 7 and set(back) <= set(liveness.stores)
    assert not liveness.materialised & set(back)
    for source in back:
        stored = liveness.stores[source]
        (fusion,) = (f for f in liveness.fusions if stored in f.writes)
        assert fusion.moved == () and source not in fusion.reads
        assert len(large(graph, fusion.reads)) == 1  # the layer's value that the forward pass saved
        (start,) = (b[1] for b in liveness.buffers if b[0] == stored)
        assert start == graph.tensors[source].producer
    biases = [f for f in liveness.fusions if graph.ops[f.root].kind == "reduce" and graph.results.count(f.writes[0])]
    assert len(biases) == 4 and not any(large(graph, f.reads) for f in biases)
    # The first gradient: its saved value is read and the gradient written. Each later one reads its saved value.
    assert traffic(graph, liveness.fusions) <= 6
    assert traffic(graph, analyse(graph).fusions) > 12


def test_a_kernel_that_sums_the_gradient_of_an_activation_for_a_bias_stores_it() -> None:
    """Differentiate layers with biases and GELU, whose gradient has several ways from the matmul's result.

    Compiled for v5e, v6e and v5p, such kernels store the gradient, also for the first layer with its one matmul.
    """

    def loss(params: Any, x: Any) -> Any:
        for w, b in params:
            x = jax.nn.gelu(x @ w + b)
        return jnp.sum(x * x)

    graph = graph_of(jax.grad(loss), [(f32(WIDTH, WIDTH), f32(WIDTH))] * 3, f32(ROWS, WIDTH))
    liveness = analyse(graph, rules=TPU)
    products = [op.results[0] for op in ops(graph, "dot_general") if graph.tensors[op.results[0]].shape[0] == ROWS]
    back = products[3:]
    assert len(back) == 2 and liveness.materialised.isdisjoint(back)
    for source in back:
        users = {user.kind for user in graph.users[liveness.stores[source]]}
        assert "reduce" in users and "dot_general" in users


def test_ways_that_meet_are_one_kernel() -> None:
    def fn(x: Any, y: Any, z: Any) -> Any:
        both = x * y
        return both + jnp.sin(both) * z

    graph = graph_of(fn, *[f32(ROWS, WIDTH)] * 3)
    both = ops(graph, "multiply")[0].results[0]
    (fusion,) = analyse(graph, rules=TPU).fusions
    assert both not in fusion.writes and len(fusion.reads) == 3

    def apart(x: Any, y: Any) -> Any:
        both = x * y
        return both + 1, jnp.sin(both)

    graph = graph_of(apart, *[f32(ROWS, WIDTH)] * 2)
    # libtpu for v5e writes both results in one kernel, which reads `x` and `y`.
    assert ops(graph, "multiply")[0].results[0] not in analyse(graph, rules=TPU).materialised


def test_statistics_of_a_convolutions_result_are_summed_by_it() -> None:
    def fn(x: Any, w: Any, v: Any) -> Any:
        names = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names)
        mean, square = y.mean((0, 1, 2)), (y * y).mean((0, 1, 2))
        h = jax.nn.relu((y - mean) * lax.rsqrt(square - mean * mean + 1e-5))
        return lax.conv_general_dilated(h, v, (1, 1), "SAME", dimension_numbers=names)

    graph = graph_of(fn, f32(8, 16, 16, 64), f32(3, 3, 64, 64), f32(3, 3, 64, 64))
    liveness = analyse(graph, rules=TPU)
    sums = [f for f in liveness.fusions if graph.ops[f.root].kind == "reduce"]
    assert len(sums) == 2 and not any(large(graph, f.reads) for f in sums)
    assert not liveness.stores  # the ops after the first convolution wait for its statistics
    first, second = (op.results[0] for op in ops(graph, "convolution"))
    assert {first, second} <= liveness.materialised and traffic(graph, liveness.fusions) == 0
    plain = analyse(graph)
    assert sum(len(large(graph, f.reads)) for f in plain.fusions if graph.ops[f.root].kind == "reduce") == 2


def test_what_is_asked_for_is_stored_as_it_is() -> None:
    def fn(x: Any, w: Any, y: Any) -> Any:
        product = x @ w
        return product, product + y

    graph = graph_of(fn, f32(ROWS, WIDTH), f32(WIDTH, WIDTH), f32(ROWS, WIDTH))
    liveness = analyse(graph, rules=TPU)
    assert not liveness.stores and set(graph.results) <= liveness.materialised


def test_a_sum_that_needs_another_reads_again() -> None:
    def fn(x: Any) -> Any:
        y = jnp.exp(x)
        return y, ((y - y.mean(0)) ** 2).sum(0)

    graph = graph_of(fn, f32(ROWS, WIDTH))
    liveness = analyse(graph, rules=TPU)
    first, second = (f for f in liveness.fusions if graph.ops[f.root].kind == "reduce")
    assert not large(graph, first.reads) and len(large(graph, second.reads)) == 1


def test_a_sum_that_needs_what_follows_reads_the_product_from_memory() -> None:
    """Match libtpu for v5e: the scores alone are stored, and sums of exponentials and of choices read them."""

    def loss(w: Any, x: Any, labels: Any) -> Any:
        scores = x @ w
        hit = lax.broadcasted_iota(labels.dtype, scores.shape, 1) == labels[:, None]
        chosen = scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        return -jnp.where(hit, chosen, 0.0).sum(-1).mean()

    labels = jax.ShapeDtypeStruct((ROWS,), "int32")
    graph = graph_of(jax.value_and_grad(loss, (0, 1)), f32(WIDTH, ROWS), f32(ROWS, WIDTH), labels)
    liveness = analyse(graph, rules=TPU)
    scores = ops(graph, "dot_general")[0].results[0]
    picked = [f for f in liveness.fusions if graph.ops[f.root].kind == "reduce" and scores in f.reads]
    assert len(picked) == 2 and scores in liveness.materialised and scores not in liveness.stores


def test_squared_errors_are_added_up_by_the_kernel_that_stores_the_error() -> None:
    def loss(weights: Any, x: Any, y: Any) -> Any:
        first, second = weights
        return (((jnp.tanh(x @ first) @ second) - y) ** 2).mean()

    shapes = [f32(64, 32), f32(32, 128), f32(128, 128), f32(64, 128)]
    graph = round_operands(graph_of(lambda x, v, w, y: jax.value_and_grad(loss)((v, w), x, y), *shapes))
    liveness = analyse(graph, rules=TPU)
    (error,) = (op for op in graph.ops if op.kind == "subtract" and graph.arguments[3] in op.operands)
    assert liveness.stores[error.operands[0]] == error.results[0]
    gradients = [op for op in graph.ops if op.kind == "dot_general" and op.id > error.id]
    assert liveness.materialised.isdisjoint(gradients[0].operands[:1])


def test_an_exponential_is_not_computed_inside_of_windows() -> None:
    """Store the operand of a convolution with windows, which would compute each element once for every window."""

    def stored(activation: Any, kernel: tuple[int, ...]) -> bool:
        def fn(x: Any, first: Any, second: Any) -> Any:
            value = lax.conv_general_dilated(x, first, (1, 1), "SAME", dimension_numbers=NAMES)
            after = lax.conv_general_dilated(activation(value), second, (1, 1), "SAME", dimension_numbers=NAMES)
            return after, jnp.sum(value * after, 0)

        graph = graph_of(fn, f32(8, 16, 16, 4), f32(3, 3, 4, 32), f32(*kernel, 32, 32))
        liveness = analyse(graph, rules=TPU)
        convolution = [op for op in graph.ops if op.kind == "convolution"][-1]
        return convolution.operands[0] in liveness.materialised

    assert stored(jax.nn.silu, (3, 3)) and not stored(jax.nn.relu, (3, 3)) and not stored(jax.nn.silu, (1, 1))


NAMES = ("NHWC", "HWIO", "NHWC")
