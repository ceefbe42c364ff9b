"""Collectives in loops on GPUs: all but the last sum and the first gather overlap with matmuls."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.planning import Options, make_plan, read_asked
from autoshard.planning.price.analysed_program import analyse_program, reprice
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.space.decision_model import EXPOSED
from autoshard.planning.space.overlap import Overlap
from autoshard.program import Program, trace


LAYERS, ROWS = 4, 16384
S = jax.ShapeDtypeStruct


def scanned(width: int, scaled: bool = False) -> Program:
    """Trace a training step of layers in a stack, with momentum.

    If `scaled`, each layer has two weights. A scale before the first one has a gradient that waits for all matmuls.
    """

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        scale, *matrices = weights if scaled else (1, weights)
        x = x * scale
        for matrix in matrices:
            x = jnp.tanh(x @ matrix)
        return x, None

    def loss(stack: Any, x: jax.Array) -> jax.Array:
        return jnp.square(jax.lax.scan(layer, x, stack)[0]).mean()

    def step(stack: Any, state: Any, x: jax.Array) -> object:
        state = jax.tree.map(lambda old, new: 0.9 * old + new, state, jax.grad(loss)(stack, x))
        return jax.tree.map(lambda weight, change: weight - 0.1 * change, stack, state), state

    weight = S((LAYERS, width, width), jnp.bfloat16)
    stack = (S((LAYERS, width), jnp.bfloat16), weight, weight) if scaled else weight
    return trace(step, (stack, stack, S((ROWS, width), jnp.bfloat16)), donate_argnums=(0, 1), training=True)


def planned(program: Program, topology: str, mesh: str = "data=8", **specs: str) -> Plan:
    asked = read_asked({"x": "data,-"} | specs)
    return make_plan(program, Options(topology=topology, mesh=mesh, asked=asked)).plan


def exposed(plan: Plan, kind: str) -> float:
    """Return the exposed share of a plan's collectives of one kind in the trips of a loop, those of scales left out."""
    sums = [each for each in plan.prediction.collectives if each.kind == kind and each.count == LAYERS]
    sums = [each for each in sums if each.wire_bytes > 2**20]
    assert sums
    return sum(each.exposed_s for each in sums) / sum(each.seconds for each in sums)


@pytest.mark.parametrize("width", [1024, 16384])
def test_the_last_sum_of_a_trip_overlaps_with_a_matmul_that_no_sum_waits_for(width: int) -> None:
    """Compare with the compiled steps: the gradient of the activations is computed behind the sum, small or large."""
    assert exposed(planned(scanned(width), "h100:8", stack="-,data,-", state="-,data,-"), "reduce-scatter") == 0.0


@pytest.mark.parametrize(("width", "share"), [(2048, 1.0), (16384, 0.5)])
def test_the_last_sum_of_a_trip_is_exposed_if_sums_wait_for_all_matmuls(width: int, share: float) -> None:
    """Compare sizes: two sums of at most 30 MiB are one and exposed; of two larger ones the last is."""
    split = {f"{name}.{at}": "-,data,-" for name in ("stack", "state") for at in (1, 2)}
    plan = planned(scanned(width, scaled=True), "h100:8", **split)
    assert exposed(plan, "reduce-scatter") == pytest.approx(share, abs=0.01)


def test_sums_of_a_trip_over_the_network_are_exposed() -> None:
    plan = planned(scanned(4096), "h100:8*2", "data=16", stack="-,data,-", state="-,data,-")
    assert exposed(plan, "reduce-scatter") == pytest.approx(1.0)


def test_the_second_step_of_a_sum_in_a_trip_is_exposed() -> None:
    """Compare channels: a sum that is scattered and then whole over another axis hides its scatter alone."""
    program, mesh = scanned(1024), "data=4,model=2"
    plan = planned(program, "h100:8", mesh)
    model, _ = reprice(plan, program, analyse_program(program, "gpu"))
    sums = [each for each in model.reshards if each.overlap == Overlap.GRADIENTS_IN_STEPS]
    assert sums
    for each in sums:
        hidden = sum(table for channel, table in each.costs.items() if channel != EXPOSED)
        assert (hidden[each.runs] > 0).all() and (each.costs[EXPOSED][each.runs] > 0).all()


def test_sums_of_pytorchs_fsdp_wait_for_no_trip() -> None:
    """Compare forms: PyTorch sums a block's gradients while another block computes, and XLA's small sums wait."""
    program = scanned(2048)
    compiled, eager = (
        make_plan(program, Options(topology="h100:8", mesh="data=8", form=form)).plan for form in (None, "fsdp2")
    )
    summed = [each for each in eager.prediction.collectives if each.kind == "reduce-scatter" and each.count == LAYERS]
    assert summed and all(each.exposed_s < 0.01 * each.seconds for each in summed)
    assert eager.prediction.exposed_comm_s < compiled.prediction.exposed_comm_s


def test_the_first_gather_of_a_trip_is_exposed_if_no_matmul_precedes_it() -> None:
    """Compare passes: a trip of the backward pass computes the weight's gradient first, and one of the forward none."""
    plan = planned(scanned(4096), "h100:8", stack="-,data,-", state="-,data,-")
    gathers = [each for each in plan.prediction.collectives if each.kind == "all-gather" and each.count == LAYERS]
    assert sorted(each.exposed_s / each.seconds for each in gathers) == [0.0, 1.0]


def test_a_gather_for_the_update_alone_is_exposed() -> None:
    plan = planned(scanned(1024), "h100:8", stack="-,data,-", state="-,-,-")
    gathers = [each for each in plan.prediction.collectives if each.kind == "all-gather"]
    (updating,) = [each for each in gathers if each.count == 1]
    assert not updating.hidden and updating.exposed_s == pytest.approx(updating.seconds)
