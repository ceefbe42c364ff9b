"""Matmuls that write the gradient of an activation over the pre-activation, as compiled MLPs have it."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from autoshard.exec.ahead.ahead_process import compile_without_devices
from autoshard.exec.ahead.live_ranges import reserved_bytes
from autoshard.planning import Options, Plan, make_plan
from autoshard.planning.price.evaluate import live_buffers
from autoshard.program import Program, trace


ROWS, WIDTH, HIDDEN, DEVICES = 16384, 512, 4096, 8


def planned(topology: str) -> tuple[Program, Plan]:
    """Plan the gradients of an MLP with one hidden layer, whose rows are split."""

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        first, bias, second = params
        return jnp.mean((jax.nn.relu(x @ first + bias) @ second).astype(jnp.float32) ** 2)

    shapes = ((WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, WIDTH), (DEVICES * ROWS, WIDTH))
    *params, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    program = trace(jax.grad(loss), (params, x))
    return program, make_plan(program, Options(topology=topology, mesh=f"d={DEVICES}")).plan


@pytest.mark.parametrize(("topology", "most"), [("v5e:2x4", 2), ("v6e:2x4", 1), ("v5p:2x2x2", 1)])
def test_pre_activation_and_its_gradient_share_their_memory(topology: str, most: int) -> None:
    program, plan = planned(topology)
    priced = plan.graph(program).priced
    size = ROWS * HIDDEN * 2
    held = [each for each in live_buffers(priced.model, priced.choices) if each.size == size]
    assert max(sum(each.start <= op.id < each.stop for each in held) for op in priced.model.graph.ops) == most


@pytest.mark.few(1)
@pytest.mark.heavy
@pytest.mark.parametrize("topology", ["v6e:2x4", "v5p:2x2x2"])
def test_memory_of_an_mlp_is_what_the_compiler_reserves(topology: str) -> None:
    if importlib.util.find_spec("libtpu") is None:  # an optional extra
        pytest.skip("libtpu is not installed")
    program, plan = planned(topology)
    compiled = compile_without_devices(program, plan, 300.0, quick=True)
    assert plan.prediction.peak_bytes == pytest.approx(reserved_bytes(compiled), rel=0.15)
