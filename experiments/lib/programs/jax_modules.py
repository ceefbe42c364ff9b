"""Modules that are pytrees: Flax NNX and Equinox."""

from typing import Any

import jax
import jax.numpy as jnp

from autoshard.program import Program, trace
from experiments.lib.programs.jax_case import Tree, f32, optimizer_of


def nnx_program(mode: str) -> Program:
    """Trace a Flax NNX module with a batch norm, updated in place."""
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Linear(64, 128, rngs=rngs)
            self.norm = nnx.BatchNorm(128, rngs=rngs)
            self.last = nnx.Linear(128, 32, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.last(nnx.relu(self.norm(self.first(x))))

    def make() -> Any:
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optimizer_of(mode), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, state: Any, batch: Tree) -> Any:
        value, grads = nnx.value_and_grad(lambda net: jnp.mean((net(batch["x"]) - batch["y"]) ** 2))(model)
        state.update(model, grads)
        return value

    model, state = nnx.eval_shape(make)
    batch = {"x": f32(128, 64), "y": f32(128, 32)}
    if mode == "infer":
        model.eval()
        return trace(nnx.jit(lambda model, x: model(x)), (model, batch["x"]), name="nnx module")
    return trace(step, (model, state, batch), name="nnx module", donate_argnums=(0, 1))


def equinox_program(mode: str) -> Program:
    """Trace an Equinox module, whose activation is a static leaf."""
    import equinox as eqx

    tx = optimizer_of(mode)

    def make() -> Any:
        model = eqx.nn.MLP(64, 32, 128, 2, activation=jax.nn.gelu, key=jax.random.key(0))
        return model, tx.init(eqx.filter(model, eqx.is_inexact_array))

    model, state = eqx.filter_eval_shape(make)
    batch = {"x": f32(128, 64), "y": f32(128, 32)}

    def step(model: Any, opt_state: Any, batch: Tree) -> Any:
        def loss(net: Any) -> Any:
            return jnp.mean((jax.vmap(net)(batch["x"]) - batch["y"]) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, value

    if mode == "infer":
        return trace(lambda model, x: jax.vmap(model)(x), (model, batch["x"]), name="equinox module")
    return trace(step, (model, state, batch), name="equinox module", donate_argnums=(0, 1))
