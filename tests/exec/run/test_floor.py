"""Noise of results: the difference when the examples are reordered, and the tolerance that it justifies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.exec import measure
from autoshard.exec.run.check_inputs import narrow_rounding, noise_floor, rounding_floor
from autoshard.exec.run.result_check import compare
from autoshard.program import Program, trace
from tests.exec.planned_programs import handmade
from tests.graph.programs import f32


def attention(optimizer: optax.GradientTransformation) -> Program:
    """Trace a step of one attention layer whose keys have a bias. Its gradient is zero in theory."""

    def step(p: Any, state: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            q, k, v = (x @ p[name] for name in "qkv")
            scores = jax.nn.softmax(q @ (k + p["bias"]).swapaxes(1, 2))
            return ((scores @ v) ** 2).mean()

        value, g = jax.value_and_grad(loss)(p)
        updates, state = optimizer.update(g, state, p)
        return optax.apply_updates(p, updates), state, value

    shapes = {name: f32(16, 16) for name in "qkv"} | {"bias": f32(16)}
    return trace(step, (shapes, jax.eval_shape(optimizer.init, shapes), f32(8, 32, 16)), name="attention")


def split(program: Program) -> Any:
    return handmade(program, {"data": 4, "model": 2}, {program.arguments[-1].name: "data,-,-"})


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(1e-2)], ids=["sgd", "first step of adam"])
def test_a_gradient_that_is_zero_in_theory_does_not_alarm(optimizer: optax.GradientTransformation) -> None:
    program = attention(optimizer)
    measured = measure(program, split(program), steps=1, warmup=0, check=True)
    assert measured.check is not None and measured.check.passed, measured.check


def floor_of(fn: Any, *values: Any) -> tuple[list[float], str, list[Any]]:
    program = trace(fn, [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in values], name="step")
    out = [np.asarray(leaf) for leaf in jax.tree.leaves(fn(*values))]
    noise, why = noise_floor(program, lambda leaves: [np.asarray(v) for v in jax.tree.leaves(fn(*leaves))], values, out)
    return noise, why, out


W = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)
X = np.random.default_rng(2).normal(size=(64, 16)).astype(np.float32)


def test_results_of_each_example_are_put_back_in_order() -> None:
    noise, why, out = floor_of(lambda w, x: (w - 0.1 * (x.T @ jnp.tanh(x @ w)), jnp.tanh(x @ w)), W, X)
    assert not why and noise[1] <= 1e-6
    assert 0 < noise[0] < 1e-4 * float(np.abs(out[0]).max())


def test_a_step_that_tells_examples_apart_has_no_floor() -> None:
    noise, why, _ = floor_of(lambda w, x: (w, (jnp.arange(64.0)[:, None] * jnp.tanh(x @ w)).mean()), W, X)
    assert noise == [0.0, 0.0] and why.startswith("another order of its examples changes the result `")


def test_a_program_without_a_batch_has_no_floor() -> None:
    noise, why, _ = floor_of(lambda w: w * 2, W)
    assert noise == [0.0] and "no batch" in why


def test_twice_the_noise_is_excused_and_no_more() -> None:
    program = trace(lambda w: w * 2, (f32(4),), name="p")
    wanted, name = np.array([1, 2, 3, 100], np.float32), program.results[0].name
    for off, passed in ((0.15, True), (0.25, False)):
        check = compare(program, [wanted + np.float32([0, off, 0, 0])], [wanted], floor=([0.1], ""))
        assert check.passed == passed and check.worst is not None and check.worst.name == name
        assert check.worst.floor == pytest.approx(1e-3)


def bf16_step(scale: float = 1.0) -> Program:
    """Trace a step in float32 that multiplies in bfloat16; `scale` makes its gradient a wrong one."""

    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            hidden = jnp.tanh(x.astype(jnp.bfloat16) @ p["up"].astype(jnp.bfloat16))
            return ((hidden @ p["down"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2).mean()

        value, g = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda v, d: v - 0.1 * scale * d, p, g), jax.tree.map(lambda d: (scale * d) ** 2, g), value

    shapes = {"up": f32(64, 256), "down": f32(256, 64)}
    return trace(step, (shapes, f32(64, 64)), name="bf16 step")


def test_products_in_bfloat16_have_the_noise_of_bfloat16() -> None:
    program = bf16_step()
    names = {a.name: "model,-" if a.name.endswith("down") else "-,model" for a in program.arguments[:2]}
    measured = measure(program, handmade(program, {"data": 2, "model": 4}, names), steps=1, warmup=0, check=True)
    assert measured.check is not None and measured.check.max_rel_diff > measured.check.tolerance
    assert measured.check.passed, measured.check


def test_the_noise_of_bfloat16_does_not_excuse_a_gradient_that_is_half_as_large_again() -> None:
    right, wrong = bf16_step(), bf16_step(1.5)
    random = np.random.default_rng(3)
    values = [random.normal(size=a.shape).astype(np.float32) / 8 for a in right.arguments]

    def run(program: Program) -> Any:
        tree = jax.tree.structure(program.args)
        step = jax.jit(program.fn)
        return lambda leaves: [np.asarray(v) for v in jax.tree.leaves(step(*tree.unflatten(leaves)))]

    wanted = run(right)(values)
    noise = rounding_floor(right, run(right), values, wanted, [0.0] * len(wanted))
    assert not compare(right, run(wrong)(values), wanted, None, values, (noise, "")).passed
    assert compare(right, wanted, wanted, None, values, (noise, "")).passed
    assert all(0 < n < 0.1 * float(np.abs(w).max()) for n, w in zip(noise, wanted, strict=True))


def test_a_program_in_32_bits_has_no_noise_of_rounding() -> None:
    program = attention(optax.sgd(0.1))
    assert narrow_rounding(program) == 0.0 and narrow_rounding(bf16_step()) == 2.0**-9


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_products_of_float8_have_the_noise_of_its_rounding(dtype: str) -> None:
    def step(w: Any, x: Any) -> Any:
        return jnp.dot(x.astype(dtype), w.astype(dtype), preferred_element_type=jnp.float32)

    program = trace(step, (f32(16, 4), f32(64, 16)), name="step")
    # A quarter of the gap between 1 and the next number.
    assert narrow_rounding(program) == float(jnp.finfo(dtype).eps) / 4


def test_orders_are_tried_until_the_noise_is_enough() -> None:
    fn = jax.jit(lambda w, x: w - 0.1 * (x.T @ jnp.tanh(x @ w)))
    program = trace(fn, [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (W, X)], name="step")
    runs: list[Any] = []

    def run(leaves: list[Any]) -> list[Any]:
        runs.append(leaves)
        return [np.asarray(fn(*leaves))]

    first, _ = noise_floor(program, run, (W, X), [np.asarray(fn(W, X))], lambda noise: noise[0] > 0)
    assert 1 <= len(runs) < 8 and first[0] > 0
    runs.clear()
    most, _ = noise_floor(program, run, (W, X), [np.asarray(fn(W, X))])
    assert len(runs) == 8 and most[0] >= first[0]
    assert len({leaves[1].tobytes() for leaves in runs}) == 8
