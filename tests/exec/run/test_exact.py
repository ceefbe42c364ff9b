"""Differences beyond the noise, judged by the same two steps in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.exec import measure
from autoshard.exec.run.exact_step import ExactSteps
from autoshard.exec.run.planned_steps import PlannedStep
from autoshard.planning import Plan
from autoshard.program import Program, trace
from tests.exec.planned_programs import handmade
from tests.graph.programs import f32


def chaotic(wrong: float = 0.0) -> Program:
    """Trace a step that amplifies the rounding of a sum over nodes, which are no batch that could be reordered.

    `wrong` changes the sum by that share of it.
    """

    def step(w: Any, x: Any) -> Any:
        weights = jnp.arange(x.shape[0]) / x.shape[0] + jnp.float32(0.5)
        s = jax.nn.sigmoid((jnp.tanh(x @ w).sum(1) * weights).sum() * (1 + wrong) / 500)
        for _ in range(14):
            s = 3.9 * s * (1 - s)
        return w - 0.1 * s, s

    def make_args(seed: int) -> Any:
        keys = jax.random.split(jax.random.key(seed))
        return jax.random.normal(keys[0], (64, 64)), jax.random.normal(keys[1], (4096, 64))

    return trace(step, (f32(64, 64), f32(4096, 64)), name="chaotic", make_args=make_args)


def split(program: Program, argument: int = 1) -> Plan:
    """Return a plan that splits the rows of an argument, given by its number."""
    return handmade(program, {"data": 8}, {program.arguments[argument].name: "data,-"})


def test_a_difference_that_vanishes_in_float64_is_rounding() -> None:
    program = chaotic()
    check = measure(program, split(program), steps=1, warmup=0, check=True).check
    assert check is not None and not all(d.within(check.tolerance) for d in check.differences)
    assert check.exact is not None and check.exact < 1e-9 and check.is_rounding and check.passed


def test_a_fault_of_the_same_size_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a planned step whose sum is wrong by a rounding of float32: in float64 it is as wrong."""
    right, wrong = chaotic(), chaotic(1e-6)
    monkeypatch.setattr(PlannedStep, "__init__", _running(wrong, PlannedStep.__init__))
    monkeypatch.setattr(ExactSteps, "_compiled", _compiling(wrong, ExactSteps._compiled))
    check = measure(right, split(right), steps=1, warmup=0, check=True).check
    assert check is not None and check.exact is not None and check.exact > 1e-6
    assert not check.is_rounding and not check.passed


def dropping(typed: bool, wrong: float = 0.0) -> Program:
    """Trace gradients under dropout; that of the bias is zero in exact arithmetic, and so rounding noise.

    - `typed`: True for a typed key.
    - `wrong`: share of a mean that is not subtracted, which gives the bias a gradient.
    """

    def step(w: Any, b: Any, x: Any, key: Any) -> Any:
        keep = jax.random.bernoulli(key if typed else jax.random.wrap_key_data(key), 0.9, x.shape)

        def loss(w: Any, b: Any) -> Any:
            h = (x * keep) @ w + b
            return (jnp.sin(h - (1 - wrong) * h.mean(0)) * x).mean()

        return jax.grad(loss, (0, 1))(w, b)

    def make_args(seed: int) -> Any:
        w, b, x, key = jax.random.split(jax.random.key(seed), 4)
        arrays = jax.random.normal(w, (64, 64)), jax.random.normal(b, (64,)), jax.random.normal(x, (256, 64))
        return *arrays, key if typed else jax.random.key_data(key)

    return trace(step, jax.eval_shape(lambda: make_args(0)), name="dropping", make_args=make_args)


@pytest.mark.parametrize("typed", [True, False])
def test_noise_beside_random_numbers_is_known_by_float64(typed: bool) -> None:
    program = dropping(typed)
    plan = handmade(program, {"data": 8}, {program.arguments[2].name: "data,-"})
    check = measure(program, plan, steps=1, warmup=0, check=True).check
    assert check is not None and check.passed and check.exact is not None
    weight, bias = check.differences
    assert bias.rel_diff > 0.1 and bias.is_noise and not weight.is_noise and weight.rel_diff < 1e-5


def test_a_fault_beside_random_numbers_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a planned step that gives the bias a gradient of 1e-5 of the weight's, where the true one is zero."""
    right, wrong = dropping(False), dropping(False, 1e-3)
    monkeypatch.setattr(PlannedStep, "__init__", _running(wrong, PlannedStep.__init__, 2))
    monkeypatch.setattr(ExactSteps, "_compiled", _compiling(wrong, ExactSteps._compiled, 2))
    check = measure(right, split(right, 2), steps=1, warmup=0, check=True).check
    assert check is not None and not check.passed and check.exact is not None and check.exact > 1e-6
    monkeypatch.setattr(ExactSteps, "compare", lambda self, leaves: "no float64 here")
    check = measure(right, split(right, 2), steps=1, warmup=0, check=True).check
    assert check is not None and not check.passed and not check.differences[1].within(check.tolerance)


def test_without_float64_noise_beside_random_numbers_is_that_of_rounded_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = dropping(False)
    monkeypatch.setattr(ExactSteps, "compare", lambda self, leaves: "no float64 here")
    check = measure(program, split(program, 2), steps=1, warmup=0, check=True).check
    assert check is not None and check.passed and check.exact is None
    assert check.differences[1].is_noise and not check.differences[0].is_noise


def test_random_numbers_in_float64_are_those_of_the_module() -> None:
    program = trace(lambda key: jax.random.uniform(key, (64,)), (jax.eval_shape(lambda: jax.random.key(0)),), name="d")
    compared = ExactSteps(program, handmade(program, {"data": 8}, {})).compare([jax.random.key(3)])
    assert not isinstance(compared, str) and compared[0].passed
    np.testing.assert_array_equal(compared[1][0], jax.random.uniform(jax.random.key(3), (64,)))


def test_a_top_k_on_shards_is_compared_in_float64() -> None:
    program = trace(lambda w, x: jax.lax.top_k(x @ w, 4), (f32(64, 64), f32(16, 64)), name="best")
    pins = {program.arguments[0].name: "-,model", program.arguments[1].name: "data,-"}
    plan = autoshard.plan(program, topology="cpu:8", mesh="data=2,model=4", pins=pins)
    assert [call.name for call in plan.calls] == ["top_k"]
    rng = np.random.default_rng(0)
    compared = ExactSteps(program, plan).compare([rng.normal(size=a.shape).astype("float32") for a in program.args])
    assert not isinstance(compared, str), compared
    assert compared[0].passed and compared[1][0].dtype == np.float64


def _running(wrong: Program, constructor: Any, argument: int = 1) -> Any:
    """Return a constructor of planned steps that run another program, split by the rows of an argument."""
    return lambda self, program, plan, made: constructor(self, wrong, split(wrong, argument), made)


def _compiling(wrong: Program, compiled: Any, argument: int = 1) -> Any:
    """Return a method that compiles another program under plans that split an argument."""

    def compile_other(self: ExactSteps, plan: Plan) -> Any:
        other = ExactSteps(wrong, split(wrong, argument))
        whole = all(not spec.axes for spec in plan.arguments.values())
        return compiled(self, plan) if whole else compiled(other, split(wrong, argument))

    return compile_other


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_constants_keep_their_values_in_float64(dtype: str) -> None:
    table = np.random.default_rng(0).normal(size=(16, 16)).astype(jnp.dtype(dtype))

    def step(x: Any) -> Any:
        return jnp.maximum(x @ table, -jnp.inf).max(1, initial=-jnp.inf), jnp.where(x > 0, x, jnp.nan), x * 0.1

    program = trace(step, (jax.ShapeDtypeStruct((64, 16), dtype),), name="constants")
    steps = ExactSteps(program, handmade(program, {"data": 8}, {program.arguments[0].name: "data,-"}))
    x = np.random.default_rng(1).normal(size=(64, 16)).astype(jnp.dtype(dtype))
    found = steps.compare([x])
    assert isinstance(found, tuple) and found[0].max_rel_diff < 1e-12
    with jax.enable_x64(True):
        compiled, shardings = steps._compiled(steps._plan)
        first, second, third = compiled(jax.device_put(x.astype(np.float64), shardings[0]))
    np.testing.assert_allclose(first, (x.astype(np.float64) @ table.astype(np.float64)).max(1), rtol=1e-12)
    np.testing.assert_array_equal(second, np.where(x > 0, x.astype(np.float64), np.nan))
    assert third.dtype == np.float64


def test_floats_in_other_dims_than_their_bits_are_not_compared_in_float64() -> None:
    program = trace(lambda x: jax.lax.bitcast_convert_type(x, jnp.int8), (f32(64, 16),), name="bits")
    steps = ExactSteps(program, handmade(program, {"data": 8}, {}))
    assert isinstance(reason := steps.compare([np.zeros((64, 16), np.float32)]), str) and reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_floats_are_read_from_narrow_ones(dtype: str) -> None:
    bits = {"float32": jnp.uint32, "bfloat16": jnp.uint16}[dtype]

    def step(x: Any, scale: Any) -> Any:
        return jax.lax.bitcast_convert_type(x, bits), jax.lax.bitcast_convert_type(scale, bits) + bits(1)

    program = trace(step, (jax.ShapeDtypeStruct((64, 16), dtype), jax.ShapeDtypeStruct((), dtype)), name="bits")
    steps = ExactSteps(program, handmade(program, {"data": 8}, {program.arguments[0].name: "data,-"}))
    x, scale = np.random.default_rng(1).normal(size=(64, 16)).astype(jnp.dtype(dtype)), np.ones((), jnp.dtype(dtype))
    compared = steps.compare([x, scale])
    assert not isinstance(compared, str), compared
    for value, wanted in zip(compared[1], step(x, scale), strict=True):
        np.testing.assert_array_equal(value, wanted)
