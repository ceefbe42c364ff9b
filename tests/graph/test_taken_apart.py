"""Stacks that are computed before the loop that slices them."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard.graph import analyse
from tests.graph.buffers import TPU, lifetimes
from tests.graph.programs import f32, graph_of


def held(fn: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the values that are live during the loop, without arguments and carries."""
    graph = graph_of(fn, f32(8, 4), f32(5, 4, 4))
    (loop,) = graph.loops
    known = {*graph.arguments, *(t for c in loop.carries for t in (c.init, c.body, c.update, c.result))}
    spans = lifetimes(analyse(graph))
    return [graph.tensors[t].shape for t, (a, b) in spans.items() if t not in known and a < loop.start and b > a + 1]


def chain(x: Any, stack: Any) -> Any:
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, stack)[0]


def test_a_stack_that_is_computed_is_in_memory_while_the_loop_runs() -> None:
    assert held(lambda x, w: chain(x, jnp.exp(w))) == [(5, 4, 4)]
    assert held(lambda x, w: chain(x, jnp.exp(w).reshape(5, 2, 2, 4).reshape(5, 4, 4))) == [(5, 4, 4)]


def test_a_stack_that_is_laid_out_again_is_the_one_that_came_in() -> None:
    assert held(chain) == []
    assert held(lambda x, w: chain(x, w.transpose(0, 2, 1))) == []


def test_what_each_trip_computes_of_its_slice_is_not() -> None:
    assert held(lambda x, w: lax.scan(lambda c, own: (jnp.tanh(c @ jnp.exp(own)), None), x, w)[0]) == []


def test_what_is_chosen_among_slices_is_in_memory_where_several_matmuls_take_it() -> None:
    def run(x: Any, stack: Any, twice: bool) -> Any:
        def trip(c: Any, k: Any) -> Any:
            one, other = (lax.dynamic_index_in_dim(stack, n, 0, keepdims=False) for n in (k, (k + 1) % 5))
            weight = jnp.where(jnp.arange(4)[:, None] > k, one, other)
            first = jnp.tanh(c @ weight)
            return first @ weight.T if twice else first, None

        return lax.scan(trip, x, jnp.arange(5))[0]

    for twice in (False, True):
        graph = graph_of(lambda x, w, twice=twice: run(x, w, twice), f32(8, 4), f32(5, 4, 4))
        (loop,) = graph.loops
        (weight,) = (op for op in graph.ops if op.kind == "select" and graph.tensors[op.results[0]].shape == (4, 4))
        spans = [b[1:] for b in analyse(graph, rules=TPU).buffers if b[0] == weight.results[0]]
        last = max(op.id for op in graph.ops if op.kind == "dot_general")
        assert spans == ([(weight.id, last + 1)] if twice else []) and loop.start < weight.id
