"""The best of several variants of a program."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.errors import InfeasibleError
from autoshard.plan import Options, make_plan, plan_variants
from autoshard.program import Program, trace
from tests.graph.programs import f32
from tests.plan import programs as made


ON: dict[str, Any] = {"topology": "v5e:2x4", "mesh": "data=2,model=4", "time_limit": 20}
VARIANTS: dict[str, Callable[[], Program]] = {
    "none": lambda: made.program("mlp"),
    "full": lambda: made.program("two matmuls"),
}


def test_the_fastest_is_taken_and_the_others_are_said() -> None:
    name, result = plan_variants(VARIANTS, Options(**ON))
    steps = {n: make_plan(make(), Options(**ON)).plan.prediction.step_time_s for n, make in VARIANTS.items()}
    assert result.plan.prediction.step_time_s == min(steps.values())
    assert steps[name] == min(steps.values())
    assert result.plan.words[-1].startswith(f"remat {name} (instead: ")
    assert set(result.plan.provenance["remat"]) == set(VARIANTS)
    assert set(result.wall_s) >= {"extract", "price", "solve"}


def test_a_variant_that_does_not_fit_is_passed_over() -> None:
    def first() -> Program:
        return trace(lambda w, x: x @ w, (f32(2048, 2048), f32(2048, 2048)), name="large")

    small = {"large": first, "small": lambda: made.program("mlp")}
    limit = make_plan(made.program("mlp"), Options(**ON)).plan.prediction.peak_bytes + 1000
    name, result = plan_variants(small, Options(**ON, memory_limit=limit), what="size")
    assert name == "small" and result.plan.words[-1] == "size small (instead: large does not fit)"


def test_when_none_fits_the_last_says_what_would_help() -> None:
    only: dict[str, Callable[[], Program]] = {"none": lambda: made.program("two matmuls")}
    with pytest.raises(InfeasibleError, match="the least found is"):
        plan_variants(only, Options(**ON, memory_limit=200))


LAYERS = 8


def chain(again: int) -> Program:
    """A training step of layers whose first `again` ones are computed again in the backward pass."""

    def step(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h = x
            for number, w in enumerate(p):
                layer = functools.partial(lambda w, h: jnp.tanh(h @ w["up"]) @ w["down"], w)
                h = (jax.checkpoint(layer) if number < again else layer)(h)
            return (h * h).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    layer = {"up": f32(256, 2048), "down": f32(2048, 256)}
    program = trace(step, ([layer] * LAYERS, f32(16384, 256)), name=f"chain {again}")
    return dataclasses.replace(program, layers=LAYERS)


@pytest.mark.full
def test_a_mixture_that_fits_is_faster_than_what_computes_everything_again() -> None:
    variants = {"none": lambda: chain(0), "full": lambda: chain(LAYERS)}
    peaks = {name: make_plan(make(), Options(**ON)).plan.prediction.peak_bytes for name, make in variants.items()}
    limit = int(1.4 * peaks["full"])

    def mix(slow: str, count: int, fast: str) -> tuple[str, Callable[[], Program]]:
        return f"{slow}:{count}+{fast}", lambda: chain(count)

    plain = plan_variants(variants, Options(**ON, memory_limit=limit))
    name, mixed = plan_variants(variants, Options(**ON, memory_limit=limit), mix=mix)
    assert plain[0] == "full" and name not in variants
    assert mixed.plan.prediction.peak_bytes <= limit
    assert mixed.plan.prediction.step_time_s < plain[1].plan.prediction.step_time_s
    assert mixed.plan.words[-1].startswith(f"remat {name} (instead: none does not fit, full ")
    count = int(name.removeprefix("full:").removesuffix("+none"))
    said = mixed.plan.provenance["remat"]
    less = said.get(f"full:{count - 1}+none", "does not fit")
    assert less == "does not fit" or float(less.removesuffix(" ms")) > 1e3 * mixed.plan.prediction.step_time_s
