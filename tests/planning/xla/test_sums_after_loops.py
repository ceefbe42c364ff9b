"""Sums over devices that XLA moves behind a loop, as predicted and as compiled."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.exec import compile_plan
from autoshard.planning import Options, make_plan, read_asked
from autoshard.planning.price.analysed_program import analyse_program
from autoshard.planning.xla.sums_after_loops import sums_after_loops
from autoshard.program import Program, trace


STEPS, ROWS, WIDTH = 16, 1024, 256
S = jax.ShapeDtypeStruct
PLUGIN = pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="no CUDA plugin")


def recurrence() -> Program:
    """Trace a training step of a recurrence, whose weight gradients its backward loop adds up."""

    def loss(params: dict[str, Any], x: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            h = jnp.tanh(x + h @ params["w"] + params["b"])
            return h, h

        return jnp.square(jax.lax.scan(cell, jnp.zeros_like(x[0]), x)[1]).mean()

    def step(params: dict[str, Any], x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    params = {"w": S((WIDTH, WIDTH), jnp.bfloat16), "b": S((WIDTH,), jnp.bfloat16)}
    return trace(step, (params, S((STEPS, ROWS, WIDTH), jnp.bfloat16)), donate_argnums=(0,), training=True)


def late(function: Any) -> list[str]:
    """Return the kinds of ops whose results may be summed after the loop of a function of (w, x)."""
    program = trace(function, (S((WIDTH, WIDTH), jnp.float32), S((STEPS, ROWS, WIDTH), jnp.float32)))
    found = analyse_program(program, "gpu")
    graph = found.graph
    return sorted(graph.ops[graph.tensors[t].producer].kind for t in sums_after_loops(graph, found.structure))


def test_only_what_a_loop_adds_to_a_value_that_it_does_not_use_leaves_it() -> None:
    zero = jnp.zeros((WIDTH, WIDTH))

    def added(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda total, x: (total + (x.T @ x).T, None), zero, x)[0]

    def used(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda total, x: (total + x.T @ x, total.sum()), zero, x)

    def scaled(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda total, x: (0.9 * total + x.T @ x, None), zero, x)[0]

    def shared(w: Any, x: Any) -> Any:
        def add(total: Any, x: Any) -> Any:
            product = x.T @ x
            return total + product, product.sum()

        return jax.lax.scan(add, zero, x)

    assert late(added) == ["dot_general", "transpose"]
    assert late(used) == late(scaled) == late(shared) == []


@pytest.mark.few(1)
@pytest.mark.heavy
@pytest.mark.parametrize("topology", [pytest.param("h100:8", marks=PLUGIN), "v5e:2x4"])
def test_the_gradients_of_a_recurrence_are_summed_once_after_the_loop(topology: str) -> None:
    program = recurrence()
    plan = make_plan(program, Options(topology=topology, mesh="data=8")).plan
    sums = [each for each in plan.prediction.collectives if each.kind == "all-reduce"]
    # A ring sends 7 of 8 parts of the gradients twice.
    gradients = 2 * (WIDTH * WIDTH + WIDTH)
    assert sum(each.wire_bytes for each in sums) == pytest.approx(2 * 7 / 8 * gradients, rel=0.01)
    compilation = compile_plan(program, plan, 300.0, quick=True)
    assert not compilation.unforeseen
    assert sum(each.wire_bytes for each in compilation.collectives if each.in_loop) < gradients


@PLUGIN
@pytest.mark.heavy
def test_a_split_weight_is_gathered_once_before_the_loop() -> None:
    program = recurrence()
    asked = read_asked({"params.w": "data,-", "x": "-,data,-"})
    plan = make_plan(program, Options(topology="h100:8", mesh="data=8", asked=asked)).plan
    compilation = compile_plan(program, plan, 300.0, quick=True)
    gathers = [each for each in compilation.collectives if each.kind == "all-gather"]
    assert gathers and not any(each.in_loop and each.wire_bytes > STEPS * WIDTH * WIDTH for each in gathers)
