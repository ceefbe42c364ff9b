"""Stencils written with slices: shards exchange the elements past their edges, as XLA's partitioner does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.exec import measure
from autoshard.planning import Options, Spec, make_plan
from autoshard.planning.xla.spatial_splits import _reaches
from autoshard.program import trace
from tests.graph.programs import f32


def laplacian(u: Any) -> Any:
    return u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]


def heat(u: Any) -> Any:
    return u + 0.1 * jnp.pad(laplacian(u), 1)


def marching(u: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, u: heat(u), u)


def upwind(u: Any) -> Any:
    """Compute one-sided differences, two places wide, and a step along their gradient."""

    def energy(u: Any) -> Any:
        return ((3 * u[2:] - 4 * u[1:-1] + u[:-2]) ** 2).mean()

    return u - 0.1 * jax.grad(energy)(u)


CASES: dict[str, tuple[Callable[..., Any], str, str, str]] = {
    "rows": (heat, "data=8", "data,None", "collective-permute"),
    "rows and columns": (heat, "x=4,y=2", "x,y", "collective-permute"),
    "steps": (marching, "x=2,y=4", "x,y", "collective-permute"),
    "gradient": (upwind, "data=8", "data,None", "collective-permute"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_grid_that_is_split_is_computed_right_and_costs_what_was_predicted(name: str) -> None:
    fn, mesh, pin, kind = CASES[name]
    program = trace(fn, (f32(1024, 1024),), name="grid", donate_argnums=0, roles={"u": "other"})
    plan = autoshard.plan(program, topology="cpu:8", mesh=mesh, pins={"u": pin})
    measurement = measure(program, plan, steps=1, warmup=0, check=True)
    assert measurement.check is not None and measurement.check.passed, measurement.check
    assert kind in {c.kind for c in plan.prediction.collectives}
    assert not any(c.kind == "all-gather" for c in plan.prediction.collectives)
    assert measurement.counts_compiled.get("all-gather", 0) == 0, "nothing is gathered"


def test_the_halos_of_a_stencil_are_counted_to_the_byte() -> None:
    program = trace(heat, (f32(1024, 1024),), name="grid", donate_argnums=0)
    plan = autoshard.plan(program, topology="cpu:8", mesh="data=8", pins={"u": "data,None"})
    measurement = measure(program, plan, steps=1, warmup=0)
    assert measurement.wire_compiled == measurement.wire_predicted and measurement.wire_predicted["data"] > 0
    assert measurement.counts_compiled == measurement.counts_predicted


def test_a_large_grid_is_split_without_a_request() -> None:
    program = trace(heat, (f32(4096, 4096),), name="grid", donate_argnums=0)
    plan = make_plan(program, Options(topology="v5e:2x4", mesh="data=8")).plan
    whole = make_plan(program, Options(topology="v5e:1x1")).plan
    assert plan.arguments["u"] == Spec((("data",), ()))
    assert plan.prediction.step_time_s < whole.prediction.step_time_s / 2
    assert {c.kind for c in plan.prediction.collectives} == {"collective-permute"}


@pytest.mark.parametrize(
    ("before", "after", "places", "parts", "reaches"),
    [
        (64, 62, 0, 8, (0, 0)),  # only the end is cut: nothing moves
        (64, 62, 1, 8, (0, 1)),
        (64, 62, 2, 8, (0, 2)),
        (64, 62, 1, 2, (0, 0)),  # 31 of each half's 32
        (62, 64, -1, 8, (1, 0)),
        (64, 56, 0, 8, (7, 0)),  # seven elements of the last shard are from the shard before it
        (64, 32, 16, 4, (8, 8)),
        (64, 66, -1, 4, (0, 2)),
    ],
)
def test_reaches_are_what_xla_exchanges(
    before: int, after: int, places: int, parts: int, reaches: tuple[int, int]
) -> None:
    """Compare the reaches with those of the op compiled alone for so many CPU devices."""
    assert _reaches(before, after, places, parts) == reaches


def test_a_half_of_a_dim_is_no_stencil() -> None:
    """Leave the dim whole: elements that move past the next shard would need several rounds of permutes."""
    program = trace(lambda u: jnp.tanh(u[:, :256]) * u[:, 256:], (f32(512, 512),), name="halves")
    plan = make_plan(program, Options(topology="cpu:8", mesh="data=8")).plan
    assert plan.results["result"].dims[1] == () and not plan.prediction.collectives
