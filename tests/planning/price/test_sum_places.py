"""Sums over devices in loops on GPUs: small ones run at the end of a trip, and large ones during it."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.planning import Options, make_plan, read_asked
from autoshard.planning.price.device_memory import JOINED
from autoshard.planning.record.plan_record import Plan
from autoshard.program import Program, trace


LAYERS, ROWS = 4, 16384
S = jax.ShapeDtypeStruct


def scanned(width: int) -> Program:
    """Trace a training step of layers in a stack, with momentum."""

    def loss(stack: jax.Array, x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)
        return jnp.square(y).mean()

    def step(stack: jax.Array, state: jax.Array, x: jax.Array) -> object:
        state = 0.9 * state + jax.grad(loss)(stack, x)
        return stack - 0.1 * state, state

    stack = S((LAYERS, width, width), jnp.bfloat16)
    return trace(step, (stack, stack, S((ROWS, width), jnp.bfloat16)), donate_argnums=(0, 1), training=True)


def planned(program: Program, topology: str, **specs: str) -> Plan:
    asked = read_asked({"x": "data,-"} | specs)
    return make_plan(program, Options(topology=topology, mesh="data=8", asked=asked)).plan


@pytest.mark.parametrize("width", [1024, 16384])
def test_small_sums_of_a_trip_wait_for_its_end(width: int) -> None:
    plan = planned(scanned(width), "h100:8", stack="-,-,-", state="-,-,-")
    sums = [each for each in plan.prediction.collectives if each.kind in ("all-reduce", "reduce-scatter")]
    (summed,) = [each for each in sums if each.count == LAYERS]
    result = 2 * width * width // (8 if summed.kind == "reduce-scatter" else 1)
    assert summed.exposed_s == (pytest.approx(summed.seconds) if result <= JOINED else 0.0)


def test_sums_of_pytorchs_fsdp_wait_for_no_trip() -> None:
    """Compare forms: PyTorch sums a block's gradients while another block computes, and XLA's small sums wait."""
    program = scanned(2048)
    compiled, eager = (
        make_plan(program, Options(topology="h100:8", mesh="data=8", form=form)).plan for form in (None, "fsdp2")
    )
    summed = [each for each in eager.prediction.collectives if each.kind == "reduce-scatter" and each.count == LAYERS]
    assert summed and all(each.exposed_s < 0.01 * each.seconds for each in summed)
    assert eager.prediction.exposed_comm_s < compiled.prediction.exposed_comm_s


def test_a_gather_for_the_update_alone_is_exposed() -> None:
    plan = planned(scanned(1024), "h100:8", stack="-,data,-", state="-,-,-")
    gathers = [each for each in plan.prediction.collectives if each.kind == "all-gather"]
    (updating,) = [each for each in gathers if not each.hidden]
    assert updating.count == 1 and updating.exposed_s == pytest.approx(updating.seconds)
    assert all(each.exposed_s == 0 for each in gathers if each is not updating)
