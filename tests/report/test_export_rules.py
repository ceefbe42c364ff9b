"""Rules: patterns of paths under which every leaf of a train state has the plan's spec, matched as in big_vision."""

import dataclasses
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autoshard
from autoshard.exports import export_plan
from autoshard.planning import Plan, Spec


MESH = {"data": 4, "model": 2}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))


class ViT(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Conv(64, (8, 8), strides=(8, 8), padding="VALID", name="embedding")(images)
        x = x.reshape(x.shape[0], -1, 64)
        x = x + self.param("pos_embedding", nn.initializers.normal(0.02), (1, 16, 64))
        for number in range(2):
            x = Block(name=f"encoderblock_{number}")(x)
        return nn.Dense(16, name="head")(jnp.mean(x, axis=1))


OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def init():
    params = ViT().init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"]
    return {"params": params, "opt": OPTIMIZER.init(params)}


def step(state, batch):
    def loss(params):
        logits = ViT().apply({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


BATCH = {"image": np.ones((16, 32, 32, 3), np.float32), "labels": np.zeros(16, np.int32)}


@pytest.fixture(scope="module")
def plan() -> Plan:
    pins = {
        "*Dense_0.kernel": "data,model",
        "*Dense_1.kernel": "model,data",
        "*query.kernel": "data,model,-",
        "state.params.head.kernel": "data+model,-",
        "state.params.encoderblock_1.*.out.kernel": "model,-,data",
    }
    program = autoshard.trace(step, (jax.eval_shape(init), BATCH))
    return autoshard.plan(program, topology="cpu:8", mesh=MESH, pins=pins)


@pytest.fixture(scope="module")
def rules(plan) -> dict[str, Any]:
    said: dict[str, Any] = {}
    exec(export_plan(plan, "rules"), said)
    return said


def padded(spec: PartitionSpec, rank: int) -> tuple[Any, ...]:
    return (*spec, *(None,) * (rank - len(spec)))


@pytest.mark.heavy
def test_every_leaf_gets_the_plans_spec(plan, rules):
    state = jax.eval_shape(init)
    results = jax.tree.leaves(rules["specs"](state))
    names = [name for name in plan.arguments if name.startswith("state.")]
    assert len(names) == len(results)
    for name, spec in zip(names, results, strict=True):
        held = name.replace("state.opt.trace.", "state.params.")
        assert padded(spec, len(plan.shapes[name])) == padded(
            plan.arguments[held].partition_spec(), len(plan.shapes[name])
        ), name
    patterns = [pattern for pattern, _ in rules["RULES"]]
    assert "^(.*/)?encoderblock_\\d+[/.]Dense_0[/.]kernel$" in patterns, "layers that are alike share a rule"
    assert "^(.*/)?encoderblock_1[/.]MultiHeadDotProductAttention_0[/.]out[/.]kernel$" in patterns


def test_the_tactics_of_big_vision_say_the_same(plan, rules):
    """Apply big_vision's rule: the first pattern that matches a whole name. Each tactic splits one more dim."""
    shapes = jax.tree_util.tree_leaves_with_path(jax.eval_shape(init)["params"])
    for path, leaf in shapes:
        keys = [key.key for key in path]
        spec: list[Any] = [None] * leaf.ndim
        tactic = next((t for p, t in rules["STRATEGY"] if re.fullmatch(p, "/".join(("params", *keys)))), "")
        for each in filter(None, tactic.split("|")):
            axis, dim = eval(each, {"shard_dim": lambda axis, dim: (axis, dim)})
            assert spec[dim] is None and 0 <= dim < leaf.ndim
            spec[dim] = axis
        planned = plan.arguments[".".join(("state.params", *keys))].partition_spec()
        assert tuple(spec) == padded(planned, leaf.ndim), keys


@pytest.mark.heavy
def test_a_step_under_the_rules_computes_the_same(plan, rules):
    mesh = rules["make_mesh"]()
    state = init()
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), rules["specs"](state))
    batch = {key: NamedSharding(mesh, rules["INPUTS"][f"batch.{key}"]) for key in BATCH}
    run = jax.jit(step, in_shardings=(places, batch), out_shardings=(places, None))
    expected = jax.jit(step)(state, BATCH)
    for found, wanted in zip(jax.tree.leaves(run(state, BATCH)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_shorter_path_does_not_take_what_is_whole(plan):
    """Split `head.kernel`, but not `deep.head.kernel`, whose name ends with it."""
    tensors = {"p.head.kernel": Spec((("data",),)), "p.deep.head.kernel": Spec(((),)), "p.bias": Spec(((),))}
    changed = dataclasses.replace(
        plan,
        arguments=tensors,
        results={},
        shapes=dict.fromkeys(tensors, (8,)),
        dtypes=dict.fromkeys(tensors, "float32"),
        roles=dict.fromkeys(tensors, "parameter"),
    )
    said: dict[str, Any] = {}
    exec(export_plan(changed, "rules"), said)
    leaf = np.zeros(8)
    tree = {"head": {"kernel": leaf}, "deep": {"head": {"kernel": leaf}}, "bias": leaf, "deep.head.kernel": leaf}
    assert said["specs"](tree) == {
        "head": {"kernel": PartitionSpec("data")},
        "deep": {"head": {"kernel": PartitionSpec()}},
        "bias": PartitionSpec(),
        "deep.head.kernel": PartitionSpec(),
    }
    assert [pattern for pattern, _ in said["RULES"]] == ["^(.*/)?deep[/.]head[/.]kernel$", "^(.*/)?head[/.]kernel$"]
