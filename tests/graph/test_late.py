"""Gradients that only the optimizer reads, computed after the backward pass."""

import jax
import jax.numpy as jnp

from autoshard.graph import analyse, defer_weight_gradients, read_graph
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
