"""Gradients that only the optimizer reads, computed after the backward pass."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.graph import FusionRules, analyse, defer_weight_gradients, read_graph
from autoshard.program import trace


LAYERS, WIDTH, WORDS = 4, 32, 4096


def step(params, x):
    def loss(p):
        hidden, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, p["layers"])
        return jax.nn.logsumexp(hidden @ p["head"], axis=-1).mean()

    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params))


def test_gradients_of_logits_are_stored_through_the_backward_pass() -> None:
    shape = jax.ShapeDtypeStruct
    params = {"layers": shape((LAYERS, WIDTH, WIDTH), "float32"), "head": shape((WIDTH, WORDS), "float32")}
    program = trace(step, (params, shape((64, WIDTH), "float32")), name="head", donate_argnums=(0,))
    graph = read_graph(program.module)
    before = analyse(graph, (), {})
    after = defer_weight_gradients(graph, before)
    backward = max(graph.loops, key=lambda loop: loop.start)

    def stops(liveness) -> dict[int, int]:
        return {
            t: stop for t, _, stop in liveness.buffers if graph.tensors[t].shape[-1:] == (WORDS,) and t not in given
        }

    given = {*graph.arguments, *graph.results}
    logits = [t for t in stops(before) if graph.tensors[t].shape == (64, WORDS)]
    assert logits and all(stops(before)[t] <= backward.start for t in logits)
    assert any(stops(after)[t] >= backward.stop for t in logits)
    assert sum(stop for *_, stop in after.buffers) > sum(stop for *_, stop in before.buffers)
    assert [t for t, *_ in after.buffers] == [t for t, *_ in before.buffers]


def test_a_stack_that_a_deferred_gradient_reads_is_live_through_the_backward_pass() -> None:
    def recurrence(params, x):
        def loss(p):
            states = jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["layer"]),) * 2, x, length=LAYERS)[1]
            return ((states @ p["head"]) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params))

    shape = jax.ShapeDtypeStruct
    params = {"layer": shape((WIDTH, WIDTH), "float32"), "head": shape((WIDTH, 64), "float32")}
    program = trace(recurrence, (params, shape((128, WIDTH), "float32")), name="recurrence", donate_argnums=(0,))
    graph = read_graph(program.module)
    forward, backward = graph.loops
    gradient = next(op for op in graph.ops if op.loop < 0 and graph.tensors[op.results[0]].shape == (64, WIDTH))
    states = next(c.body for c in forward.carries if c.result in gradient.operands)
    before = analyse(graph, (), {})
    after = defer_weight_gradients(graph, before)
    stops = [{t: stop for t, _, stop in each.buffers}[states] for each in (before, after)]
    assert stops[0] < backward.stop <= stops[1]


def test_weight_gradients_follow_the_backward_pass_on_gpus() -> None:
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    shape = jax.ShapeDtypeStruct
    weights = [shape((WIDTH, WIDTH), "float32")] * LAYERS

    def updated(weights, x):
        return [w - 1e-3 * g for w, g in zip(weights, jax.grad(loss)(weights, x), strict=True)]

    graph = read_graph(trace(updated, (weights, shape((64, WIDTH), "float32")), name="layers").module)
    gradients = [op for op in graph.ops if op.kind == "dot_general" and graph.tensors[op.results[0]].shape[0] == WIDTH]
    last = max(op.id for op in graph.ops if op.kind == "dot_general" and op not in gradients)
    stops = {t: stop for t, _, stop in analyse(graph, rules=FusionRules(gpu_kernels=True)).buffers}
    (*early, _) = gradients
    assert len(early) == LAYERS - 1 and all(stops[op.operands[0]] > last for op in early)


def test_weight_gradients_do_not_wait_for_the_gradient_of_a_table() -> None:
    """Order the gradient of gathered rows last, since no matmul needs it."""

    def loss(params, ids):
        return (jnp.tanh(params["table"][ids] @ params["weight"]) ** 2).mean()

    def updated(params, ids):
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params, ids))

    shape = jax.ShapeDtypeStruct
    params = {"table": shape((WORDS, WIDTH), "float32"), "weight": shape((WIDTH, WIDTH), "float32")}
    graph = read_graph(trace(updated, (params, shape((64,), "int32")), name="table").module)
    _, weight, rows = (op for op in graph.ops if op.kind == "dot_general")
    stops = {t: stop for t, _, stop in analyse(graph, rules=FusionRules(gpu_kernels=True)).buffers}
    assert stops[weight.operands[0]] == rows.id + 1


@pytest.mark.parametrize(("rows", "overwritten"), [((64,), True), ((4, 16), False)])
def test_elementwise_kernels_of_gpus_overwrite_matrices_of_one_dim_of_rows(rows, overwritten) -> None:
    shape = jax.ShapeDtypeStruct
    inputs = (shape((*rows, WIDTH), "float32"), shape((WIDTH, WIDTH), "float32"), shape((*rows, WIDTH), "float32"))
    graph = read_graph(trace(lambda x, w, y: jnp.sin((x @ w) * y) @ w, inputs, name="rows").module)
    product = graph.ops[0].results[0]
    (kernel,) = (f.root for f in analyse(graph, rules=FusionRules(gpu_kernels=True)).fusions if product in f.reads)
    stops = {t: stop for t, _, stop in analyse(graph, rules=FusionRules(gpu_kernels=True)).buffers}
    assert stops[product] == kernel + (not overwritten)


def test_what_a_loop_makes_of_a_carry_is_not_late() -> None:
    """Exclude a loop's carry, although its last value is not read until another loop is done."""

    def run(x, layers):
        for weights in layers:
            x = jax.lax.scan(lambda h, w: (h @ w, None), x, weights)[0]
            x = jnp.sort(x)
        return x

    shape = jax.ShapeDtypeStruct
    stacks = [shape((LAYERS, WIDTH, WIDTH), "float32")] * 2
    graph = read_graph(trace(run, (shape((64, WIDTH), "float32"), stacks), name="loops").module)
    assert len(graph.loops) == 2
    before = analyse(graph, (), {})
    assert defer_weight_gradients(graph, before).buffers == tuple(sorted(before.buffers))
