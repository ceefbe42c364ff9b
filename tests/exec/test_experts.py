"""Mixtures of experts on 8 devices in every form: values and gradients equal those of a plain mixture."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.planning import Options, PlanResult, make_plan, read_asked
from autoshard.program import Program, parse_experts, trace
from autoshard.program.moe.experts import capacity, mix
from autoshard.program.moe.hf_routers import softmax_router
from tests.exec.planned_programs import assert_close, f32


BATCH, LENGTH, WIDTH, INNER, EXPERTS, ACTIVE = 16, 8, 64, 512, 8, 2
FORMS = ("slots:all", "sorted", "sorted:4", "sorted:8", "ragged:4", "ragged:8")
CASES = [(form, which) for form in FORMS for which in ("", "fsdp_tp")]
KEPT = [("slots:all", ""), ("sorted", "fsdp_tp"), ("ragged:4", "fsdp_tp")]


def routing(weights: Any, x: Any) -> tuple[Any, Any]:
    return softmax_router(x @ weights["router"], ACTIVE)


def plain(weights: Any, x: Any) -> Any:
    """Compute every token by every expert, weighted."""
    share, _ = routing(weights, x)
    gate, up = (jnp.einsum("bsd,eid->bsei", x, half) for half in jnp.split(weights["gate_up"], 2, axis=1))
    return jnp.einsum("bse,bsei,edi->bsd", share, jax.nn.silu(gate) * up, weights["down"])


def formed(form: str, factor: float | None, weights: Any, x: Any) -> Any:
    with capacity(factor, [], parse_experts(form)):
        return mix(x, *routing(weights, x), weights["gate_up"], weights["down"], jax.nn.silu, ACTIVE)


def step(mixture: Callable[[Any, Any], Any], weights: Any, x: Any) -> Any:
    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean((mixture(weights, x) - jnp.cos(x)) ** 2)

    value, (grads, of_x) = jax.value_and_grad(loss, (0, 1))(weights, x)
    return jax.tree.map(lambda w, g: w - g, weights, grads), of_x, value


@functools.cache
def program(form: str, factor: float | None = None, length: int = LENGTH, times: int = 1) -> Program:
    width, inner = times * WIDTH, times * INNER
    weights = {
        "router": f32(width, EXPERTS),
        "gate_up": f32(EXPERTS, 2 * inner, width),
        "down": f32(EXPERTS, width, inner),
    }
    args = (weights, f32(BATCH, length, width))
    return trace(
        functools.partial(step, functools.partial(formed, form, factor)), args, name="mixture", roles={"x": "batch"}
    )


SPLIT = {"gate_up": "data,None,None", "down": "data,None,None", "x": "data,None,None"}
"""Tokens and experts are split over the same axis."""


@functools.cache
def planned(form: str) -> PlanResult:
    asked = read_asked(pins=SPLIT)
    return make_plan(program(form), Options(topology="cpu:8", mesh="data=4,model=2", asked=asked, refine_axes=False))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("form", "which"), [case if case in KEPT else pytest.param(*case, marks=pytest.mark.full) for case in CASES]
)
def test_values_and_gradients_are_those_of_a_plain_mixture(form: str, which: str) -> None:
    result = planned(form)
    plan = result.baseline_plans[which] if which else result.plan
    rng = np.random.default_rng(0)
    given = jax.tree.map(lambda leaf: (rng.normal(size=leaf.shape) / 4).astype(np.float32), program(form).args)
    compiled = plan.lower(program(form).fn, *program(form).args).compile()
    placed = jax.tree.unflatten(jax.tree.structure(given), plan.in_shardings)
    found = compiled(*jax.device_put(given, placed))
    wanted = jax.jit(functools.partial(step, plain))(*given)
    assert_close(found, wanted, 1e-5)


def test_devices_send_the_rows_that_there_are() -> None:
    large = program("ragged:4", None, 1024, 16)
    options = Options(topology="v5e:2x2", mesh="data=4", asked=read_asked(pins=SPLIT), refine_axes=False)
    exchanged = [c for c in make_plan(large, options).plan.prediction.collectives if c.kind == "all-to-all"]
    assert sum(c.count for c in exchanged) == 4, "there and back, and their gradients"
    rows = BATCH // 4 * ACTIVE * 1024  # no token is dropped or padded
    assert {c.wire_bytes / c.count for c in exchanged} == {3 / 4 * rows * 1024 * 4}


def test_tokens_reach_groups_of_experts_by_an_all_to_all() -> None:
    large = program("sorted:4", 1.25, 1024, 16)
    options = Options(topology="v5e:2x2", mesh="data=4", asked=read_asked(pins=SPLIT), refine_axes=False)
    exchanged = [c for c in make_plan(large, options).plan.prediction.collectives if c.kind == "all-to-all"]
    assert sum(c.count for c in exchanged) == 4, "there and back, and their gradients"
    rows = BATCH // 4 * 1.25 * ACTIVE * 1024  # a device's tokens, padded; three quarters of them are sent
    assert {c.wire_bytes / c.count for c in exchanged} == {3 / 4 * rows * 1024 * 4}
