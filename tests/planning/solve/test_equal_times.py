"""Among plans of equal times the one that holds least: weights and data stored as they are used."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.planning import Plan
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.solve.equal_times import with_least_memory
from tests.planning import programs as made


def like(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def one_token(params: Any, token: Any) -> Any:
    """Return the logits of one token; its batch has no dim to split."""
    hidden = params["table"][token]
    hidden = hidden + jax.nn.relu(hidden @ params["up"]) @ params["down"]
    return hidden @ params["table"].T


@functools.cache
def planned() -> Plan:
    params = {"table": like(32000, 4096), "up": like(4096, 16384), "down": like(16384, 4096)}
    program = autoshard.trace(one_token, (params, jax.ShapeDtypeStruct((1, 1), jnp.int32)))
    return autoshard.plan(program, topology="v5e:2x4", mesh="model=8")


def test_weights_are_stored_as_their_matmuls_take_them() -> None:
    plan = planned()
    assert plan.arguments["params.up"].dims == ((), ("model",))
    assert plan.arguments["params.down"].dims == (("model",), ())
    # An eighth of each of both weights, and the table whole, which a gather on shards would have to sum.
    assert plan.prediction.memory["parameters"] == 2 * (2 * 4096 * 16384 // 8 + 32000 * 4096)
    best = min(each.step_time_s for each in plan.baselines.values())
    assert plan.prediction.step_time_s <= best * (1 + 1e-9)


@pytest.mark.parametrize(("name", "topology", "mesh"), made.CASES)
def test_no_change_takes_longer_or_holds_more(name: str, topology: str, mesh: str) -> None:
    model = made.model(name, topology, mesh)
    random = np.random.default_rng(0)
    for _ in range(5):
        choices = np.array([random.integers(len(node.states)) for node in model.nodes])
        try:
            before = evaluate(model, choices)
        except ValueError:  # a forbidden pair
            choices = np.zeros(len(model.nodes), dtype=np.int64)
            before = evaluate(model, choices)
        kept = choices.copy()
        after = evaluate(model, with_least_memory(model, choices))
        assert (choices == kept).all()
        assert after.step_time_s <= before.step_time_s * (1 + 1e-9)
        assert after.solved_bytes <= before.solved_bytes


def test_masks_hold() -> None:
    model = made.model(*made.CASES[1])
    start = np.zeros(len(model.nodes), dtype=np.int64)
    only = {number: np.arange(len(node.states)) == 0 for number, node in enumerate(model.nodes)}
    assert (with_least_memory(model, start, only) == start).all()


@pytest.mark.parametrize("rows", [1, 3, 13])
def test_batches_that_do_not_divide_are_planned(rows: int) -> None:
    def step(params: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    keys = jax.random.split(jax.random.key(rows), 4)
    shapes = {"up": (31, 1024), "down": (1024, 16)}
    params = {name: jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys, strict=False)}
    args = params, jax.random.normal(keys[2], (rows, 31)), jax.random.normal(keys[3], (rows, 16))
    plan = autoshard.plan(autoshard.trace(step, args), topology="cpu:8", mesh="data=8")
    assert plan.prediction.fits
    for got, want in zip(*(jax.tree.leaves(each(*args)) for each in (plan.jit(step), jax.jit(step))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_ids_are_loaded_by_rows_where_that_costs_next_to_nothing() -> None:
    """Look at a table whose columns are split: every device needs all ids, so whole ones save a small gather."""

    def step(params: Any, ids: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = params["table"][ids]
            for weight in params["layers"]:
                hidden = hidden + jax.nn.relu(hidden @ weight) @ weight.T
            picked = jnp.take_along_axis(hidden @ params["table"].T, labels[..., None], -1)
            return picked.astype(jnp.float32).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    params = {"table": like(32000, 2048), "layers": [like(2048, 8192) for _ in range(8)]}
    ids = jax.ShapeDtypeStruct((64, 1024), jnp.int32)
    program = autoshard.trace(step, (params, ids, ids), donate_argnums=0, roles={"labels": "batch"})
    pins = {"params.table": "-,data"}
    plan = autoshard.plan(program, topology="v6e:2x4", mesh="data=8", pins=pins)
    whole = autoshard.plan(program, topology="v6e:2x4", mesh="data=8", pins=pins, replicate=["ids"])
    assert plan.arguments["ids"].dims == plan.arguments["labels"].dims == (("data",), ())
    assert plan.prediction.step_time_s == pytest.approx(whole.prediction.step_time_s, rel=1e-3)
    assert plan.prediction.step_time_s >= whole.prediction.step_time_s * (1 - 1e-9)
