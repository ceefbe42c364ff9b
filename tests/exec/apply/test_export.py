"""`jax.export` artifacts of plans: they run in a process without autoshard and return the unplanned step's results."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard import UserError
from autoshard.exec import jax_export
from autoshard.planning import Plan
from autoshard.program import Program


LOAD = """
import pickle, sys
import jax, numpy as np
from jax import export
from jax.sharding import AxisType

loaded = export.deserialize(bytearray(open("step.jax_export", "rb").read()))
args, wanted, sizes = pickle.load(open("values.pkl", "rb"))
mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
placed = [jax.device_put(a, s) for a, s in zip(jax.tree.leaves(args), loaded.in_shardings_jax(mesh), strict=True)]
args, _ = jax.tree.unflatten(loaded.in_tree, placed)
step = jax.jit(loaded.call)
for ours, theirs in zip(jax.tree.leaves(step(*args)), wanted, strict=True):
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-4, atol=1e-5)
assert "autoshard" not in sys.modules and loaded.nr_devices == 8
print(step.lower(*args).as_text().count("sdy.sharding_constraint"))
"""


def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def adam(params: Any, state: Any, x: jax.Array) -> Any:
    """Run a step whose state has pytree nodes that `jax.export` does not know."""
    grads = jax.grad(lambda p: jnp.mean((x @ p) ** 2))(params)
    updates, state = optax.sgd(0.1, momentum=0.9).update(grads, state)
    return optax.apply_updates(params, updates), state


def values() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) * 0.05

    params = {"up": normal(64, 256), "down": normal(256, 64)}
    square = normal(64, 64)
    return {
        "mlp": (step, (params, normal(32, 64), normal(32, 64))),
        "adam": (adam, (square, optax.sgd(0.1, momentum=0.9).init(square), normal(32, 64))),
    }


def exported(name: str, topology: str, folder: Path) -> tuple[Program, Plan]:
    fn, args = values()[name]
    program = autoshard.trace(fn, args)
    plan = autoshard.plan(program, topology=topology, mesh={"data": 4, "model": 2})
    (folder / "step.jax_export").write_bytes(jax_export(plan, program))
    wanted = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(fn)(*args))]
    flat = [np.asarray(leaf) for leaf in jax.tree.leaves(args)]
    (folder / "values.pkl").write_bytes(pickle.dumps((flat, wanted, plan.mesh)))
    return program, plan


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "topology"), [("mlp", "cpu:8"), ("mlp", "v5e:2x4"), ("adam", "v5e:2x4")])
def test_it_runs_without_autoshard(name: str, topology: str, tmp_path: Path):
    _, plan = exported(name, topology, tmp_path)
    assert plan.pins
    (tmp_path / "load.py").write_text(LOAD)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "load.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= len(plan.pins)


def test_another_program_is_refused(tmp_path: Path):
    _, plan = exported("mlp", "cpu:8", tmp_path)
    fn, args = values()["adam"]
    with pytest.raises(UserError, match="another program"):
        jax_export(plan, autoshard.trace(fn, args))


@pytest.mark.parametrize(("topology", "platform"), [("cpu:8", "cpu"), ("v5e:2x4", "tpu")])
def test_gradients_of_padded_pooling_are_in_the_form_of_the_platform(topology: str, platform: str) -> None:
    """Export the gradient of a padded pooling. JAX pads the values before it selects among them, except for TPUs."""

    def run(x: Any) -> Any:
        window = (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0))
        return jax.grad(lambda x: (jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *window) ** 2).sum())(x)

    x = np.random.default_rng(0).standard_normal((8, 8, 8, 4)).astype(np.float32)
    program = autoshard.trace(run, (x,))
    plan = autoshard.plan(program, topology=topology, mesh="data=8")
    loaded = jax.export.deserialize(bytearray(jax_export(plan, program)))
    own = jax.jit(run).trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.pad" in loaded.mlir_module()) == ("stablehlo.pad" in own) == (platform == "cpu")
    if platform == "cpu":
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        (place,) = jax.tree.leaves(loaded.in_shardings_jax(mesh))
        np.testing.assert_allclose(jax.jit(loaded.call)(jax.device_put(x, place)), jax.jit(run)(x), rtol=1e-5)
