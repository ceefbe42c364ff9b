"""Grouped convolutions in the exports `jax` and `explicit`, whose gradients XLA's partitioner computes wrongly."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.exports import export_plan
from autoshard.planning import Plan


DIMS = ("NHWC", "HWIO", "NHWC")


@jax.jit
def grouped(kernel: Any, x: Any) -> Any:
    groups = x.shape[3] // kernel.shape[2]
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=DIMS, feature_group_count=groups)


def step(params: Any, x: Any) -> Any:
    """Return a step of gradient descent on groups, depthwise layers under a scan, and a plain convolution."""

    def loss(params: Any) -> Any:
        h = jax.nn.relu(grouped(params["groups"], x))
        h, _ = jax.lax.scan(lambda h, kernel: (jnp.tanh(grouped(kernel, h)), None), h, params["depthwise"])
        h = jax.lax.conv_general_dilated(h, params["plain"], (1, 1), "SAME", dimension_numbers=DIMS)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def arguments(rows: int) -> Any:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"groups": (3, 3, 2, 8), "depthwise": (2, 3, 3, 1, 8), "plain": (3, 3, 8, 8)}
    params = {name: jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys, strict=False)}
    return params, jax.random.normal(keys[3], (rows, 8, 8, 8))


def planned(rows: int, spec: str) -> tuple[Plan, Any]:
    args = arguments(rows)
    program = autoshard.trace(step, args)
    return autoshard.plan(program, topology="cpu:8", mesh="data=4,model=2", pins={"x": spec}), args


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ["jax", "explicit"])
@pytest.mark.parametrize(("rows", "spec"), [(8, "data,None,None,None"), (8, "data+model,None,None,None")])
def test_gradients_are_those_of_one_device(form: str, rows: int, spec: str) -> None:
    plan, args = planned(rows, spec)
    text = export_plan(plan, form, force=True)
    assert "gradients" not in text.partition("\nimport")[0]
    code: dict[str, Any] = {}
    exec(text, code)
    wanted = jax.tree.leaves(jax.jit(step)(*args))
    for name in ("jit",) if form == "jax" else ("jit", "jit_unchanged"):
        for want, got in zip(wanted, jax.tree.leaves(code[name](step, args)(*args)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_images_that_are_split_in_space_have_a_remark() -> None:
    plan, _ = planned(8, "data,model,None,None")
    assert "images split in space" in export_plan(plan, "jax", force=True).partition("\nimport")[0]
