"""Memory of gathered operands, of operands that wait for their sum, and of combined collectives."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost import Topology
from autoshard.planning import Options, Plan, make_plan
from autoshard.planning.price.analysed_program import analyse_program, reprice
from autoshard.planning.price.combined_collectives import JOINED
from autoshard.planning.price.device_memory import _Buffered, _joined
from autoshard.planning.price.evaluate import Outcome, evaluate, live_buffers
from autoshard.program import Program, trace


LAYERS, WIDTH, ROWS = 6, 1024, 8192
MESH = "data=8"


def deep(rows: int = ROWS, width: int = WIDTH) -> Program:
    """Trace gradients of unrolled layers whose weights have one size."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x.astype(jnp.float32).sum()

    weights = [jax.ShapeDtypeStruct((width, width), jnp.bfloat16) for _ in range(LAYERS)]
    args = (weights, jax.ShapeDtypeStruct((rows, width), jnp.bfloat16))
    return trace(jax.grad(loss), args, name="deep", donate_argnums=0)


def test_small_collectives_are_joined_and_wait_for_one_another() -> None:
    third, large = JOINED // 3, JOINED + 1
    group = ("all-gather", ("data",), -1)
    held = [_Buffered(at, at + 5, third, 7, third) for at in (0, 10, 20, 30)] + [_Buffered(40, 45, large, 8, large)]
    gathers = sorted((each.start, each.stop) for each in _joined({group: held}, first=True))
    assert gathers == [(0, 5), (0, 15), (0, 25), (30, 35), (40, 45)]
    sums = sorted((each.start, each.stop) for each in _joined({group: held}, first=False))
    assert sums == [(0, 25), (10, 25), (20, 25), (30, 35), (40, 45)]
    scattered = [_Buffered(at, at + 5, large, 7, large // 8) for at in (0, 10)]
    assert [each.stop for each in _joined({group: scattered}, first=False)] == [15, 15]


def priced(program: Program, plan: Plan) -> Outcome:
    return evaluate(*reprice(plan, program, analyse_program(program, Topology.parse(plan.topology).backend)))


@pytest.mark.parametrize("topology", ["h100:8", "cpu:8"])
def test_gathered_weights_are_stored_between_their_uses_on_gpus(topology: str) -> None:
    program = deep()
    outcome = priced(program, make_plan(program, Options(topology=topology, mesh=MESH)).baseline_plans["fsdp"])
    beside = outcome.peak_bytes - outcome.solved_bytes
    # All weights but the first are gathered in the forward pass and again in the backward pass. One is partly live
    # already.
    whole = 2 * WIDTH * WIDTH
    assert (LAYERS - 2) * whole <= beside <= (LAYERS + 1) * whole if topology.startswith("h100") else beside == 0


def test_gathered_weights_are_kept_for_the_backward_pass_on_tpus() -> None:
    """Keep the gathered weights, as the live ranges of a mixer's four layers on v5e show.

    libtpu copies four of these to main memory. The last one is read by both passes in turn, and stays on the chip.
    """
    program = deep(64 * ROWS)  # the weights of fewer rows stay in on-chip memory
    plan = make_plan(program, Options(topology="v5e:2x4", mesh=MESH)).baseline_plans["fsdp"]
    model, choices = reprice(plan, program, analyse_program(program, "tpu"))
    kept = [each for each in live_buffers(model, choices) if each.kind == "gathered"]
    products = [op.id for op in model.graph.ops if op.kind == "dot_general"]
    # The first weight is gathered for the forward pass alone.
    assert [(each.start, each.size) for each in kept] == [(at, 2 * WIDTH * WIDTH) for at in products[1 : LAYERS - 1]]
    assert all(each.stop > products[LAYERS] for each in kept)


def test_a_plan_fits_with_what_its_collectives_hold() -> None:
    program = deep(width=4096)  # the free plan of narrower layers needs least memory already
    free = make_plan(program, Options(topology="h100:8", mesh=MESH)).plan
    outcome = priced(program, free)
    limit = (outcome.solved_bytes + outcome.peak_bytes) // 2  # the solver alone would choose this plan again
    made = make_plan(program, Options(topology="h100:8", mesh=MESH, memory_limit=limit)).plan
    assert made.prediction.fits and made.prediction.peak_bytes <= limit < outcome.peak_bytes
    assert sum(made.prediction.memory.values()) == made.prediction.peak_bytes
    assert made.prediction.step_time_s >= free.prediction.step_time_s
