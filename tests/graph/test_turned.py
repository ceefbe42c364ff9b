"""Stacks of gradients in the layout of their matmuls, and the copies that the update makes of them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.graph import FusionRules, OpGraph, analyse, read_graph
from autoshard.graph.memory.stack_layouts import ExtraTraffic, transposed_stack_copies
from autoshard.program import trace


LAYERS, WIDTH, INNER, TOKENS = 3, 256, 768, 32


def graph_of(update: Any, transposed: bool = False, scanned: bool = True) -> OpGraph:
    """Read the graph of a step on stacked matmuls, whose weights are [in, out], or [out, in] if `transposed`."""
    shape = (INNER, WIDTH) if transposed else (WIDTH, INNER)

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ (w.T if transposed else w))[:, :WIDTH]

    def loss(w: Any, x: Any) -> Any:
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)
        else:
            for k in range(LAYERS):
                x = layer(x, w[k])
        return x.sum()

    def step(w: Any, m: Any, v: Any, x: Any) -> Any:
        return update(w, m, v, jax.grad(loss)(w, x))

    stack = jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32)
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)
    return read_graph(trace(step, (stack, stack, stack, x)).module)


def descent(w: Any, m: Any, v: Any, g: Any) -> Any:
    return w - 0.1 * g, m, v


def adam(w: Any, m: Any, v: Any, g: Any) -> Any:
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return w - 0.1 * m / (jnp.sqrt(v) + 1e-8), m, v


def counted(graph: OpGraph) -> list[int]:
    passes = transposed_stack_copies(graph)
    assert {graph.tensors[each.tensor].shape for each in passes} <= {(LAYERS, WIDTH, INNER)}
    assert all(each.block == -1 for each in passes)
    return [each.count for each in passes]


def test_a_gradient_is_filled_with_zeros_and_what_meets_the_state_is_copied():
    # One value is combined with the parameter: zeros are written, the value is copied.
    assert counted(graph_of(descent)) == [1, 2]
    # Two values are combined with the moments: the second is written in the stack's layout before it is copied too.
    assert counted(graph_of(adam)) == [1, 2, 4]


@pytest.mark.parametrize("layers", [2, 3])
def test_a_rate_for_each_layer_is_a_value_that_a_stack_meets(layers: int) -> None:
    def step(w: Any, rates: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w)[:, :WIDTH], None), x, w)[0].sum()

        return rates[:, None, None] * jax.grad(loss)(w), w

    shapes = (layers, WIDTH, INNER), (layers,), (TOKENS, WIDTH)
    graph = read_graph(trace(step, [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]).module)
    assert [each.count for each in transposed_stack_copies(graph)] == [1, 2]


def test_weights_that_lie_as_their_gradient_is_multiplied_cost_nothing():
    assert transposed_stack_copies(graph_of(adam, transposed=True)) == ()


def test_gradients_outside_of_loops_are_part_of_the_update():
    assert transposed_stack_copies(graph_of(adam, scanned=False)) == ()


def test_what_nothing_meets_is_not_copied():
    assert transposed_stack_copies(graph_of(lambda w, m, v, g: (g * 2.0, m, v))) == ()


@pytest.mark.parametrize("tiled", [True, False])
def test_only_compilers_that_fuse_matmuls_lay_stacks_out_so(tiled: bool):
    graph = graph_of(descent)
    passes = analyse(graph, rules=FusionRules(fused_matmuls=tiled)).extra_traffic
    stack = graph.tensors[next(each.tensor for each in transposed_stack_copies(graph))]
    assert (ExtraTraffic(stack.id, -1, 1) in passes) == tiled
