"""Causes of collectives: the line of the user's code that requires each one, and the exposed part of its time."""

import importlib.util
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard
from autoshard import mlir
from autoshard.mlir.module import _shown
from autoshard.planning import Collective


OPTIMIZER = optax.adamw(1e-3)


def step(params, state, x):
    def loss(params):
        hidden = jnp.tanh(x @ params["up"])
        out = hidden @ params["down"]
        return jnp.mean(out**2)

    grads = jax.grad(loss)(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def line_of(text: str) -> str:
    lines, start = inspect.getsourcelines(step)
    (number,) = (start + k for k, line in enumerate(lines) if text in line)
    return f"{Path(__file__).name}:{number}"


@pytest.fixture(scope="module")
def program() -> autoshard.Program:
    params = {
        "up": jax.ShapeDtypeStruct((256, 16384), jnp.float32),
        "down": jax.ShapeDtypeStruct((16384, 256), jnp.float32),
    }
    args = (params, jax.eval_shape(OPTIMIZER.init, params), jax.ShapeDtypeStruct((64, 256), jnp.float32))
    return autoshard.trace(step, args)


@pytest.fixture(scope="module")
def plan(program: autoshard.Program) -> autoshard.Plan:
    pins = {"params.up": "-,model", "params.down": "model,-", "x": "data,-"}
    return autoshard.plan(program, topology="v5e:2x4", mesh={"data": 2, "model": 4}, pins=pins)


def test_the_sum_of_a_split_matmul_names_the_line_after_it(plan: autoshard.Plan):
    forward = [c for c in plan.prediction.collectives if c.axes == ("model",) and "jvp" in c.cause]
    assert forward
    assert {c.line for c in forward} <= {line_of("hidden @ params"), line_of("out**2"), line_of("jnp.tanh")}


def test_gradients_and_optimizer_are_identified_by_lines_of_the_users_file(plan: autoshard.Plan):
    lines = {c.line for c in plan.prediction.collectives}
    assert all(line.startswith(f"{Path(__file__).name}:") for line in lines)


def test_what_is_waited_for_adds_up_to_the_exposed_communication(plan: autoshard.Plan):
    waited = sum(c.waited_s for c in plan.prediction.collectives)
    assert waited == pytest.approx(plan.prediction.exposed_comm_s, rel=1e-9)
    assert all(0 <= c.waited_s <= c.seconds * (1 + 1e-12) for c in plan.prediction.collectives)
    assert all(c.hidden == (c.waited_s < 0.5 * c.seconds) for c in plan.prediction.collectives)


def test_a_plan_saved_before_says_all_or_nothing():
    assert Collective("all-gather", ("data",), 1, 8, 2.0, hidden=False).waited_s == 2.0
    assert Collective("all-gather", ("data",), 1, 8, 2.0, hidden=True).waited_s == 0.0


def lines_of(module: bytes) -> dict[str, set[str]]:
    """Return the code lines of each kind of op."""
    with mlir.new_context() as context:
        lines: dict[str, set[str]] = {}
        parsed = mlir.inline_calls(mlir.parse_module(module, context))
        for op in mlir.number_ops(parsed):
            lines.setdefault(op.name, set()).add(mlir.code_line(op))
        return lines


def test_frames_of_frameworks_are_passed_over(program: autoshard.Program):
    lines = lines_of(program.module)
    assert lines["stablehlo.dot_general"] == {line_of("x @ params"), line_of("hidden @ params")}
    assert lines["stablehlo.sqrt"] == {line_of("OPTIMIZER.update")}  # in optax, for this line


def test_a_module_without_locations_tells_its_own_lines():
    text = """func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.abs %a : tensor<8xf32>
  return %0 : tensor<8xf32>
}"""
    assert lines_of(text.encode())["stablehlo.abs"] == {"line:2"}


def test_files_of_installed_packages_keep_their_path_and_frameworks_have_none():
    transformers = importlib.util.find_spec("transformers").submodule_search_locations[0]
    assert _shown(f"{transformers}/models/llama/modeling_llama.py") == "transformers/models/llama/modeling_llama.py"
    assert _shown("/home/me/train.py") == "train.py"
    for framework in (
        jax.__file__,
        optax.__file__,
        mlir.__file__,
        inspect.__file__,
        f"{transformers}/utils/generic.py",
    ):
        assert _shown(framework) == ""
    assert _shown("<frozen importlib>") == ""
