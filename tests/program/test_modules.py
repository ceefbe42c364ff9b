"""Equinox and Flax NNX modules, TrainState-like states, kernels and shardings inside a program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.errors import UserError
from autoshard.program import trace
from autoshard.program.jax.jax_modules import functional


S = jax.ShapeDtypeStruct
F = jnp.float32


def _table(program):
    return {a.name: (a.role.value, a.result) for a in program.arguments}


def _equinox():
    import equinox as eqx

    class Net(eqx.Module):
        first: eqx.nn.Linear
        rest: eqx.nn.MLP
        drop: eqx.nn.Dropout
        act: object = jax.nn.relu

        def __init__(self, key):
            self.first, self.rest = eqx.nn.Linear(8, 16, key=key), eqx.nn.MLP(16, 4, 32, 1, key=key)
            self.drop = eqx.nn.Dropout(0.5, inference=True)

        def __call__(self, x):
            return self.rest(self.drop(self.act(self.first(x))))

    optimizer = optax.adamw(1e-3)

    @eqx.filter_jit
    def step(model, opt_state, x, y):
        def loss(net):
            return jnp.mean((jax.vmap(net)(x) - y) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, value

    return eqx, Net, optimizer, step


@pytest.mark.parametrize("abstract", [True, False])
def test_equinox_step(abstract):
    eqx, net, optimizer, step = _equinox()
    model = net(jax.random.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x, y = jnp.ones((4, 8)), jnp.zeros((4, 4))
    args = (model, state, x, y)
    if abstract:
        args = tuple(eqx.filter_eval_shape(lambda a: a, arg) for arg in args)
    program = trace(step, args, donate_argnums=(0, 1))
    table = _table(program)
    assert table["model.first.weight"] == ("parameter", 0) and table["model.rest.layers.1.bias"] == ("parameter", 5)
    assert table["opt_state.mu.first.weight"][0] == "optimizer_state" and table["x"] == ("batch", None)
    assert all(result is not None for role, result in table.values() if role != "batch")
    if not abstract:
        expected = step(model, state, x, y)
        got = jax.jit(program.fn)(*program.args)
        np.testing.assert_allclose(got[2], expected[2], rtol=1e-6)
        np.testing.assert_allclose(got[0].first.weight, expected[0].first.weight, rtol=1e-5, atol=1e-6)
        assert got[0].rest.activation is None and len(jax.tree.leaves(program.args)) == len(program.arguments)


def _nnx():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(8, 16, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)
            self.last = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))

    @nnx.jit
    def step(model, optimizer, batch):
        def loss(net):
            return jnp.mean((net(batch["x"]) - batch["y"]) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    def make():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    return nnx, make, step


@pytest.mark.parametrize("abstract", [True, False])
def test_nnx_step_that_updates_in_place(abstract):
    nnx, make, step = _nnx()
    model, optimizer = nnx.eval_shape(make) if abstract else make()
    batch = {"x": S((4, 8), F), "y": S((4, 4), F)}
    program = trace(step, (model, optimizer, batch), donate_argnums=(0, 1))
    table = _table(program)
    assert table["model.first.kernel"][0] == "parameter"
    assert table["model.norm.mean"][0] == "other" and table["model.drop.rngs.key"][0] == "other"
    assert table["optimizer.opt_state.mu.last.kernel"][0] == "optimizer_state"
    assert all(result is not None for role, result in table.values() if role != "batch")
    assert program.training and [r.name for r in program.results][-1] == "result.2"
    if not abstract:
        args = program.make_args(0)
        args[2]["x"] = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
        state, _, loss = jax.jit(program.fn)(*args)
        expected = step(model, optimizer, args[2])
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        np.testing.assert_allclose(state["first"]["kernel"].get_value(), model.first.kernel, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state["norm"]["mean"].get_value(), model.norm.mean, rtol=1e-5, atol=1e-6)


def test_nnx_inference_returns_no_state():
    nnx, make, _ = _nnx()

    def forward(model, x):
        return model.last(nnx.relu(model.first(x)))

    program = trace(forward, (nnx.eval_shape(lambda: make()[0]), S((4, 8), F)))
    assert [r.shape for r in program.results] == [(4, 4)] and not program.training
    assert _table(program)["model.first.kernel"] == ("parameter", None)


def _swapped(nnx, one, two, x):
    # A state refers to the variables of its object, so the values are copied out of it.
    first, second = (jax.tree.map(lambda value: value, nnx.state(each)) for each in (one, two))
    nnx.update(one, second)
    nnx.update(two, first)


def _copied(nnx, one, two, x):
    nnx.update(two, nnx.state(one))


def _moved_within(nnx, one, two, x):
    low, high = one.low.get_value(), one.high.get_value()
    one.low.set_value(high)
    one.high.set_value(low)


def _constant(nnx, one, two, x):
    two.count.set_value(jnp.float32(3))


def _from_batch(nnx, one, two, x):
    one.low.set_value(x)


@pytest.mark.parametrize("write", [_swapped, _copied, _moved_within, _constant, _from_batch])
def test_nnx_state_that_becomes_another_value_is_written(write):
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, start):
            self.low, self.high = (nnx.Param(jnp.arange(start + k, start + k + 4.0)) for k in (0, 10))
            self.count = nnx.Variable(jnp.float32(start))

    def step(one, two, x):
        write(nnx, one, two, x)
        return x.sum()

    x = jnp.full(4, 7.0)
    expected, given = ((Net(0), Net(100)) for _ in range(2))
    step(*expected, x)
    made = functional(step, (*given, x))
    made.finish((*given, x), jax.jit(made.fn)(*made.args))
    for wanted, found in zip(expected, given, strict=True):
        jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(wanted))
    assert made.changed == {_swapped: (0, 1), _moved_within: (0,), _from_batch: (0,)}.get(write, (1,))
    assert len(trace(step, (*given, x)).results) == 1 + 3 * len(made.changed)


def test_nnx_split_state_by_hand():
    nnx, make, _ = _nnx()
    graph, state = nnx.split(nnx.eval_shape(lambda: make()[0]))
    program = trace(lambda params, x: nnx.merge(graph, params).first(x), (state, S((4, 8), F)))
    assert _table(program)["params.first.kernel"] == ("parameter", None)


def test_train_state_of_one_pytree():
    import flax.struct

    @flax.struct.dataclass
    class State:
        step: jax.Array
        params: dict
        opt_state: tuple

    optimizer = optax.adam(1e-3)

    def train(state, batch):
        grads = jax.grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state)
        return State(state.step + 1, optax.apply_updates(state.params, updates), opt_state), {"loss": jnp.float32(0)}

    params = {"w": S((8, 4), F)}
    state = State(S((), jnp.int32), params, jax.eval_shape(optimizer.init, params))
    program = trace(train, (state, S((4, 8), F)), donate_argnums=0)
    assert _table(program) == {
        "state.step": ("other", 0),
        "state.params.w": ("parameter", 1),
        "state.opt_state.count": ("optimizer_state", 2),
        "state.opt_state.mu.w": ("optimizer_state", 3),
        "state.opt_state.nu.w": ("optimizer_state", 4),
        "batch": ("batch", None),
    }
    assert program.results[-1].name == "result.1.loss"


def test_tpu_kernels_can_be_traced_without_a_tpu():
    from jax.experimental import pallas as pl

    def kernel(x, o):
        o[...] = x[...] * 2

    def double(x):
        return pl.pallas_call(kernel, out_shape=S((8, 128), F))(x)

    program = trace(double, (S((8, 128), F),))
    assert b"autoshard.call" in program.module  # one op, which is lowered for its shards when a plan is applied


def test_shardings_in_the_program_are_noted():
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))

    def constrained(x):
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, PartitionSpec("data")))

    program = trace(constrained, (S((8, 4), F),))
    assert program.notes == ("The program itself holds 1 sharding constraint; it is respected.",)

    def mapped(x):
        spec = PartitionSpec("data")
        return jax.shard_map(lambda v: v * 2, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    notes = trace(mapped, (S((8, 4), F),)).notes
    assert notes == ("The program itself holds 1 region sharded by hand (shard_map); it is respected.",)


def test_errors_inside_modules_are_one_sentence():
    nnx, make, _ = _nnx()
    with pytest.raises(UserError, match="`forward` could not be traced by JAX: AttributeError: .*nothing"):
        trace(lambda model: model.nothing, (nnx.eval_shape(lambda: make()[0]),), name="forward")


def test_loops_and_checkpoints_are_preserved():
    def fn(params, x):
        def body(h, w):
            return jax.checkpoint(lambda a: jnp.tanh(a @ w))(h), None

        h, _ = jax.lax.scan(body, x, params["w"])
        return jax.lax.associative_scan(jnp.add, h)

    program = trace(fn, ({"w": S((3, 8, 8), F)}, S((4, 8), F)))
    assert _table(program) == {"params.w": ("parameter", None), "x": ("batch", None)}
    assert "stablehlo.while" in jax.jit(program.fn).lower(*program.args).as_text()
