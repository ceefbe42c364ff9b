"""Conditionals on eight CPU devices: branches are split like all ops, and return the unplanned values."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import mlir
from autoshard.planning import Options, Pin, Plan, Spec, make_plan, read_asked
from autoshard.program import Program, trace


def step(params: Any, x: Any, which: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        x = jax.lax.cond(which > 0, lambda x: jnp.tanh(x @ params["a"]), lambda x: x * 2.0, x)
        branches = [lambda x: x @ params["b"], lambda x: jnp.sin(x) @ params["a"], lambda x: x]
        return jnp.mean(jax.lax.switch(which, branches, x) ** 2)

    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@functools.cache
def planned(mesh: str) -> tuple[Program, Plan]:
    program = trace(step, ({"a": f32(64, 64), "b": f32(64, 64)}, f32(512, 64), jax.ShapeDtypeStruct((), jnp.int32)))
    return program, make_plan(program, Options(topology="cpu:8", mesh=mesh)).plan


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("mesh", ["data=8", "data=4,model=2"])
def test_every_branch_gives_the_unplanned_values(mesh: str, which: int) -> None:
    random = np.random.default_rng(which)
    params = {name: random.normal(size=(64, 64)).astype("float32") / 8 for name in ("a", "b")}
    args = params, random.normal(size=(512, 64)).astype("float32"), np.int32(which)
    wanted, found = jax.jit(step)(*args), planned(mesh)[1].jit(step)(*args)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_batch_stays_split_through_branches() -> None:
    program, plan = planned("data=8")
    assert plan.arguments["x"].dims == (("data",), ())
    assert plan.unruled == ()
    text = plan.lower(step, *program.args).compile().as_text()
    assert "conditional(" in text
    assert "all-gather(" not in text and "all-to-all(" not in text
    inside = [pin.spec.dims for pin in plan.pins if "cond" in pin.name and len(pin.spec.dims) == 2]
    assert (("data",), ()) in inside


def test_branches_count_by_their_share() -> None:
    def seconds(fn: Any) -> float:
        program = trace(fn, (f32(2048, 4096), f32(4096, 4096), jax.ShapeDtypeStruct((), jnp.int32)))
        return make_plan(program, Options(topology="cpu:1")).plan.prediction.compute_s

    once = seconds(lambda x, w, i: jnp.tanh(x @ w) + i)
    halves = seconds(lambda x, w, i: jax.lax.cond(i > 0, lambda: jnp.tanh(x @ w), lambda: jnp.sin(x @ w)) + i)
    assert halves == pytest.approx(once, rel=0.1)


@pytest.mark.parametrize(("sine", "flip"), [("whole", "split"), ("split", "whole"), ("split", "turned")])
def test_branches_that_end_in_different_specs_compile_and_compute_the_same(sine: str, flip: str) -> None:
    def switched(x: Any, which: Any) -> Any:
        return jax.lax.switch(which, [jnp.sin, lambda x: 0.5 * x, lambda x: jnp.flip(x, 0)], x)

    specs = {"whole": Spec(((), ())), "split": Spec((("data",), ())), "turned": Spec(((), ("data",)))}
    x = jnp.linspace(-1.0, 1.0, 128).reshape(16, 8)
    program = trace(switched, (x, jnp.int32(0)))
    with mlir.new_context() as context:
        names = [op.name for op in mlir.number_ops(mlir.inline_calls(mlir.parse_module(program.module, context)))]
    pins = [Pin(names.index(f"stablehlo.{op}"), 0, specs[spec]) for op, spec in (("sine", sine), ("reverse", flip))]
    plan = make_plan(program, Options(topology="cpu:8", mesh="data=8")).plan
    run = dataclasses.replace(plan, pins=tuple(pins)).jit(switched)
    for which in range(3):
        np.testing.assert_array_equal(run(x, jnp.int32(which)), jax.jit(switched)(x, jnp.int32(which)))


def test_what_a_branch_in_a_loop_needs_moves_in_every_trip_that_takes_the_branch() -> None:
    """Gather a matrix that is split by rows outside of the loop, in the half of the trips that multiply by it."""

    def fn(x: Any, w: Any, n: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            return jax.lax.cond((i + n) % 2 > 0, lambda x: jnp.tanh(x @ w), jnp.sin, x)

        return jax.lax.fori_loop(0, 6, body, x)

    program = trace(fn, (f32(1 << 16, 64), f32(64, 64), jax.ShapeDtypeStruct((), jnp.int32)))
    asked = read_asked({"x": "data,-", "w": "data,-"})
    plan = make_plan(program, Options(topology="cpu:8", mesh="data=8", asked=asked)).plan
    (gather,) = plan.prediction.collectives
    assert gather.kind == "all-gather" and gather.count == 6 / 2
    text = plan.lower(fn, *program.args).compile().as_text()
    assert text is not None
    (branch,) = [block for block in text.split("\n\n") if "all-gather(" in block]
    assert branch.split()[0] in text[text.index("branch_computations={") :].partition("}")[0], "and it is in the branch"
