"""Stacks that are made before the loop that takes slices of them."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard.graph import analyse
from tests.graph.buffers import lifetimes
from tests.graph.programs import f32, graph_of


def held(fn: Any) -> list[tuple[int, ...]]:
    """Shapes of what is held while the loop runs, without what comes in and what the loop carries."""
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


def test_a_stack_that_is_laid_out_anew_is_the_one_that_came_in() -> None:
    assert held(chain) == []
    assert held(lambda x, w: chain(x, w.transpose(0, 2, 1))) == []


def test_what_each_trip_computes_of_its_slice_is_not() -> None:
    assert held(lambda x, w: lax.scan(lambda c, own: (jnp.tanh(c @ jnp.exp(own)), None), x, w)[0]) == []
