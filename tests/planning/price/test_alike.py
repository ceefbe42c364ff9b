"""Warnings about work that several devices repeat."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

import autoshard
from autoshard.program import Program, trace
from tests.graph.programs import f32
from tests.planning.programs import wide_mlp


ROWS, INNER = 1024, 2048


def multiplied(a: Any, b: Any, out: Any) -> None:
    out[...] = jnp.dot(a[...], b[...])


def rows_kernel(parts: int, layers: int = 1) -> Program:
    """Trace a Pallas kernel over `parts` blocks of rows, once for each layer. Only its rows can be split."""

    def fn(params: Any, x: Any) -> Any:
        block = pl.BlockSpec((ROWS // parts, INNER), lambda i: (i, 0))
        for weights in params:
            x = pl.pallas_call(
                multiplied, grid=(parts,), in_specs=[block, pl.BlockSpec((INNER, INNER), lambda i: (0, 0))],
                out_specs=block, out_shape=jax.ShapeDtypeStruct((ROWS, INNER), jnp.bfloat16), name="rows_kernel",
            )(x, weights)  # fmt: skip
        return x

    weights = jax.ShapeDtypeStruct((INNER, INNER), jnp.bfloat16)
    return trace(fn, ([weights] * layers, jax.ShapeDtypeStruct((ROWS, INNER), jnp.bfloat16)), name="rows")


def said(program: Program, **constraints: Any) -> list[str]:
    plan = autoshard.plan(program, topology="v5e:2x4", mesh="data=2,model=4", **constraints)
    return [line for line in plan.warnings if "do the same work" in line]


def test_a_kernel_that_too_few_devices_share_is_reported_once() -> None:
    for layers in (1, 3):
        (line,) = said(rows_kernel(2, layers))
        assert line.startswith("the 4 devices along model do the same work in `rows_kernel` at ")
        assert "test_alike.py:" in line and float(line.split("%")[0].rsplit(" ", 1)[1]) > 90


def test_for_a_kernel_with_an_opaque_grid_a_rule_is_proposed() -> None:
    (line,) = said(rows_kernel(1))
    assert line.startswith("the 8 devices along data x model do the same work in `rows_kernel` at ")
    assert line.endswith("neither its grid nor a rule says what may be split there; `autoshard.register_rule` can.")


def test_nothing_is_reported_where_every_device_has_its_own_part() -> None:
    assert said(rows_kernel(8)) == []
    assert said(wide_mlp()) == []


def products() -> Program:
    """Trace two products, so small that every device computes them whole where the result must be whole."""

    def step(x: Any, w: Any, v: Any) -> Any:
        inner = x @ w
        return jnp.tanh(inner) @ v

    return trace(step, (f32(64, 64), f32(64, 128), f32(128, 32)), name="products")


WHOLE = ["x", "w", "v", "result"]


def test_a_pin_is_named_only_where_it_splits_the_work() -> None:
    inner, last = sorted(said(products(), replicate=WHOLE), key=lambda line: "--pin" in line)
    assert inner.endswith("`with_sharding_constraint` on its result shows at what cost.")
    assert last.endswith("; `--pin 'result=data+model,None'` shows at what cost.")
    pinned = said(products(), replicate=WHOLE[:-1], pins={"result": "data+model,None"})
    assert not any("--pin" in line for line in pinned)


def test_without_jax_code_no_constraint_is_named() -> None:
    lines = said(dataclasses.replace(products(), lowerings=None), replicate=WHOLE)
    assert any("it can be split by" in line and line.endswith(").") for line in lines)
    assert not any("with_sharding_constraint" in line for line in lines)
