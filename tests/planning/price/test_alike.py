"""Warnings about work that several devices repeat."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from autoshard.planning import Options, make_plan
from autoshard.program import Program, trace
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


def said(program: Program) -> list[str]:
    plan = make_plan(program, Options(topology="v5e:2x4", mesh="data=2,model=4")).plan
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
