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


def split(program: Program) -> Plan:
    """Return a plan that splits the rows of the second argument."""
    return handmade(program, {"data": 8}, {program.arguments[1].name: "data,-"})


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


@pytest.mark.parametrize("typed", [True, False])
def test_a_step_with_random_numbers_names_the_reason(typed: bool) -> None:
    def step(w: Any, x: Any, key: Any) -> Any:
        drawn = jax.random.normal(key if typed else jax.random.wrap_key_data(key), x.shape)
        return ((x + drawn) @ w).sum()

    key = jax.random.key(0) if typed else jax.random.PRNGKey(0)
    program = trace(step, (f32(64, 64), f32(16, 64), jax.eval_shape(lambda: key)), name="drawing")
    plan = autoshard.plan(program, topology="cpu:8", mesh="data=8")
    compared = ExactSteps(program, plan).compare([np.ones((64, 64), "f4"), np.ones((16, 64), "f4"), key])
    assert compared == ("typed random keys" if typed else "the step reads the bits of numbers, as random draws do,") + (
        " have no float64 form" if typed else " which has no float64 form"
    )


def test_a_top_k_on_shards_is_compared_in_float64() -> None:
    program = trace(lambda w, x: jax.lax.top_k(x @ w, 4), (f32(64, 64), f32(16, 64)), name="best")
    pins = {program.arguments[0].name: "-,model", program.arguments[1].name: "data,-"}
    plan = autoshard.plan(program, topology="cpu:8", mesh="data=2,model=4", pins=pins)
    assert [call.name for call in plan.calls] == ["top_k"]
    rng = np.random.default_rng(0)
    compared = ExactSteps(program, plan).compare([rng.normal(size=a.shape).astype("float32") for a in program.args])
    assert not isinstance(compared, str), compared
    assert compared[0].passed and compared[1][0].dtype == np.float64


def _running(wrong: Program, constructor: Any) -> Any:
    """Return a constructor of planned steps that run another program."""
    return lambda self, program, plan, made: constructor(self, wrong, split(wrong), made)


def _compiling(wrong: Program, compiled: Any) -> Any:
    """Return a method that compiles another program under plans that split an argument."""

    def compile_other(self: ExactSteps, plan: Plan) -> Any:
        other = ExactSteps(wrong, split(wrong))
        whole = all(not spec.axes for spec in plan.arguments.values())
        return compiled(self, plan) if whole else compiled(other, split(wrong))

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


def test_what_reads_the_bits_of_floats_is_not_compared_in_float64() -> None:
    program = trace(lambda x: jax.lax.bitcast_convert_type(x, jnp.int32), (f32(64, 16),), name="bits")
    steps = ExactSteps(program, handmade(program, {"data": 8}, {}))
    assert isinstance(reason := steps.compare([np.zeros((64, 16), np.float32)]), str) and reason
