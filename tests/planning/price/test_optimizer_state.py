"""Memory of optimizer state, by its role, also inside nested `nnx.jit`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard


def test_adamw_in_nested_jits_has_a_row_of_its_own() -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Mlp(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.up = nnx.Linear(64, 256, rngs=rngs)
            self.down = nnx.Linear(256, 64, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.down(nnx.relu(self.up(x)))

    @nnx.jit
    def update(model: Any, optimizer: Any, x: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
        optimizer.update(model, grads)
        return value

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        return update(model, optimizer, x)

    model = Mlp(nnx.Rngs(0))
    args = model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    plan = autoshard.plan(autoshard.trace(step, args), topology="cpu:1")
    weights = 64 * 256 * 2 + 256 + 64
    assert plan.prediction.memory["parameters"] == 4 * weights
    # Two moments of each weight; two counters of 4 bytes have no cluster.
    assert plan.prediction.memory["optimizer_state"] == 2 * 4 * weights
