"""Flax NNX and Equinox modules under a plan: called as the user calls them, updated as the library updates them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autoshard
from autoshard.exports import export_plan


MESH = {"data": 4, "model": 2}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.down = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.norm(self.up(x))))


def spec_of(array) -> jax.sharding.PartitionSpec:
    assert isinstance(array.sharding, jax.sharding.NamedSharding)
    return array.sharding.spec


def make_nnx():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


traces = []


@nnx.jit
def nnx_step(model, optimizer, batch):
    traces.append(1)
    loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(batch["x"]) - batch["y"]) ** 2))(model)
    optimizer.update(model, grads)
    return loss


BATCH = {"x": np.linspace(-1, 1, 32 * 16, dtype=np.float32).reshape(32, 16), "y": np.ones((32, 8), np.float32)}
SHAPES = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), BATCH)


def nnx_program():
    return autoshard.trace(nnx_step, (*nnx.eval_shape(make_nnx), SHAPES))


@pytest.fixture(scope="module")
def nnx_plan():
    pins = {"*.up.kernel": "-,model"}
    return autoshard.plan(nnx_program(), topology="cpu:8", mesh=MESH, replicate=["*.bias"], pins=pins)


@pytest.mark.parametrize("form", ["jax", "explicit"])
def test_exported_code_updates_nnx_objects_in_place(nnx_plan, form):
    code, ours, theirs = {}, make_nnx(), make_nnx()
    exec(export_plan(nnx_plan, form, nnx_program(), force=True), code)  # noqa: S102
    step = code["jit" if form == "jax" else "jit_unchanged"](nnx_step, (*ours, BATCH))
    found = [float(step(*ours, BATCH)) for _ in range(3)]
    np.testing.assert_allclose(found, [float(nnx_step(*theirs, BATCH)) for _ in range(3)], rtol=1e-5)
    assert spec_of(ours[0].up.kernel.get_value()) == jax.sharding.PartitionSpec(None, "model")


@pytest.mark.parametrize("donate", [None, (0, 1)])
def test_an_nnx_step_updates_its_objects_in_place(nnx_plan, donate):
    ours, theirs = make_nnx(), make_nnx()
    step = nnx_plan.jit(nnx_step, donate_argnums=donate)
    before = ours[0].up.kernel.get_value()
    found = [float(step(*ours, BATCH)) for _ in range(3)]
    expected = [float(nnx_step(*theirs, BATCH)) for _ in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for mine, other in zip(jax.tree.leaves(nnx.state(ours)), jax.tree.leaves(nnx.state(theirs)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)
    assert spec_of(ours[0].up.kernel.get_value()) == jax.sharding.PartitionSpec(None, "model")
    assert not before.is_deleted()  # it was resharded first: only arrays that are in the planned sharding are donated
    step(*ours, BATCH)  # an array that numpy views is not donated
    held = ours[0].up.kernel.get_value()
    step(*ours, BATCH)
    assert held.is_deleted() == (donate is not None)


def test_an_nnx_step_is_traced_for_its_first_call_only(nnx_plan):
    ours = make_nnx()
    step = nnx_plan.jit(nnx_step)
    step(*ours, BATCH)
    count = len(traces)
    step(*ours, BATCH)
    assert len(traces) == count


@pytest.mark.full
def test_an_equinox_step_gives_modules_back_with_their_static_leaves():
    optimizer = optax.sgd(0.1)

    def make():
        model = eqx.nn.MLP(16, 8, 64, 1, activation=jax.nn.gelu, key=jax.random.key(0))
        return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def step(model, state, batch):
        def loss(net):
            return jnp.mean((jax.vmap(net)(batch["x"]) - batch["y"]) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    program = autoshard.trace(step, (*eqx.filter_eval_shape(make), SHAPES))
    plan = autoshard.plan(program, topology="cpu:8", mesh=MESH, pins={"model.layers.0.weight": "model,-"})
    planned = plan.jit(step)
    model, state = make()
    found = []
    for _ in range(3):
        model, state, value = planned(model, state, BATCH)
        found.append(float(value))
    other, state = make()
    expected = []
    for _ in range(3):
        other, state, value = eqx.filter_jit(step)(other, state, BATCH)
        expected.append(float(value))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert spec_of(model.layers[0].weight)[0] == "model"
    assert model(jnp.ones(16)).shape == (8,)  # the module is whole: its activation is there


def test_another_activation_is_another_program():
    def apply(model, x):
        return jax.vmap(model)(x)

    def make(activation):
        return eqx.nn.MLP(16, 8, 64, 1, activation=activation, key=jax.random.key(0))

    plan = autoshard.plan(autoshard.trace(apply, (make(jax.nn.relu), SHAPES["x"])), topology="cpu:8", mesh=MESH)
    planned = plan.jit(apply)
    planned(make(jax.nn.relu), BATCH["x"])
    with pytest.raises(autoshard.UserError, match="the computation has changed"):
        planned(make(jnp.sin), BATCH["x"])


def test_dropout_of_nnx_keeps_its_key_in_the_plan() -> None:
    """Store the module's generator in the plan: a typed key, and a counter that every step changes."""

    class Dropped(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.up, self.drop = nnx.Linear(16, 32, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.drop(nnx.relu(self.up(x)))

    program = autoshard.trace(lambda model, x: model(x).sum(), (Dropped(), jax.ShapeDtypeStruct((8, 16), jnp.float32)))
    assert any(a.dtype.startswith("key<") for a in program.arguments)
    found = autoshard.exec.measure(
        program, autoshard.plan(program, topology="cpu:4", mesh="data=4"), steps=1, warmup=0, check=True
    )
    assert found.check is not None and found.check.passed, found.check
