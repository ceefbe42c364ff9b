"""Parameters that a loop carries and updates: steps that a program runs one after the other."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autoshard


def steps(w: Any, x: Any) -> Any:
    """Run one step of gradient descent for each slice of `x`."""

    def step(w: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: jnp.mean((jax.nn.relu(x @ w["a"]) @ w["b"]) ** 2))(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grad), None

    return jax.lax.scan(step, w, x)[0]


def test_what_brings_a_parameter_to_its_loop_is_priced_and_named() -> None:
    """Price the gathers of a parameter that is split outside of its loop and whole inside: once, before the loop."""
    shape = jax.ShapeDtypeStruct
    w = {"a": shape((64, 256), "float32"), "b": shape((256, 64), "float32")}
    program = autoshard.trace(steps, (w, shape((4, 4096, 64), "float32")))
    pins = {"x": "None,data,None", "w.a": "None,data", "w.b": "data,None"}
    plan = autoshard.plan(program, topology="cpu:8", mesh="data=8", pins=pins)
    gathers = [c for c in plan.prediction.collectives if c.kind == "all-gather"]
    assert [(c.cause, c.count, c.wire_bytes) for c in gathers] == [
        (n, 1, 64 * 256 * 4 * 7 // 8) for n in ("w.a", "w.b")
    ]
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda a: 0.1 * rng.normal(size=a.shape).astype(a.dtype), program.args)
    compiled = plan.lower(steps, *values).compile().as_text()
    assert len(re.findall(r" all-gather\(", compiled)) == len(gathers)
    both = plan.jit(steps)(*values), jax.jit(steps)(*values)
    for ours, wanted in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(wanted), rtol=1e-4, atol=1e-6)


def test_a_move_inside_of_the_loop_is_named_by_the_parameter() -> None:
    shape = jax.ShapeDtypeStruct
    w = {"a": shape((1024, 4096), "float32"), "b": shape((4096, 1024), "float32")}
    program = autoshard.trace(steps, (w, shape((4, 65536, 1024), "float32")))
    plan = autoshard.plan(program, topology="v5e:2x4", mesh="data=8")
    gathered = {c.cause: c.count for c in plan.prediction.collectives if c.kind == "all-gather"}
    assert gathered == {"w.a": 4, "w.b": 4}
