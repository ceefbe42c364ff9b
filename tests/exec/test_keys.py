"""Typed PRNG keys as arguments, in state and as results: one element to JAX, a vector of words in the module."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.exec import measure
from autoshard.exec.apply.jax_application import Application
from autoshard.exec.apply.planned_lowering import donated_aliases, lower_module
from autoshard.exec.devices.local_devices import place
from autoshard.planning import Options, Spec, explain_plan, make_plan
from autoshard.program import Program, Role, load_artifact, trace


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def keys(*shape: int, impl: str | None = None) -> Any:
    """Return the shape of a key, or of an array of keys."""
    return jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl=impl), shape) if shape else jax.random.key(0))


def dropout(key: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def layer(params: Any, key: Any, x: Any) -> Any:
    hidden = dropout(key, jnp.tanh(x @ params["up"]))
    return hidden @ params["down"], jax.random.fold_in(key, 1)


def step(params: Any, state: Any, x: Any) -> Any:
    key, now = jax.random.split(state["key"])
    value, gradients = jax.value_and_grad(lambda p: (layer(p, now, x)[0] ** 2).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), {"key": key, "steps": state["steps"] + 1}, value


def by_row(params: Any, each: Any, x: Any) -> Any:
    """Use a key for each row, and return a new key for each."""
    hidden = jax.vmap(dropout)(each, jnp.tanh(x @ params["up"]))
    return hidden, jax.vmap(lambda key: jax.random.split(key)[1])(each)


def by_layer(stack: Any, each: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, both: (dropout(both[1], jnp.tanh(h @ both[0])), None), x, (stack, each))[0]


PARAMS = {"up": f32(64, 128), "down": f32(128, 64)}
CASES = {
    "made": (layer, (PARAMS, jax.random.key(3), f32(32, 64))),
    "state": (step, (PARAMS, {"key": keys(), "steps": jax.ShapeDtypeStruct((), jnp.int32)}, f32(32, 64))),
    "rows": (by_row, (PARAMS, keys(32), f32(32, 64))),
    "layers": (by_layer, (f32(4, 64, 64), keys(4, impl="rbg"), f32(32, 64))),
}


def numbers(tree: Any) -> list[Any]:
    typed = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(tree)]
    pairs = zip(jax.tree.leaves(tree), typed, strict=True)
    return [np.asarray(jax.random.key_data(leaf) if is_key else leaf) for leaf, is_key in pairs]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_a_program_with_keys_is_planned_saved_run_and_checked(name: str, tmp_path: pathlib.Path) -> None:
    fn, args = CASES[name]
    program = trace(fn, args)
    made = make_plan(program, Options(topology="cpu:4", mesh="data=4")).plan
    made.save(tmp_path / "plan.json")
    plan = autoshard.load(tmp_path / "plan.json")
    for argument in program.arguments:
        assert len(plan.arguments[argument.name].dims) == len(argument.shape)
        if argument.dtype.startswith("key<"):
            assert argument.role is Role.OTHER
    check = measure(program, plan, steps=1, warmup=0, check=True).check
    assert check is not None and check.passed, check
    values = program.make_args(1)  # type: ignore[misc]
    wanted, got = jax.jit(fn)(*values), plan.jit(fn)(*values)
    assert jax.tree.map(lambda leaf: leaf.dtype, got) == jax.tree.map(lambda leaf: leaf.dtype, wanted)
    for a, b in zip(numbers(got), numbers(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))
    lowered = lower_module(Application(plan), program.module, donated_aliases(program, plan))
    assert "sharding" in lowered.as_text(), "what compilers without the function are given"


def test_an_array_of_keys_is_split_by_key_and_never_by_word() -> None:
    fn, args = CASES["rows"]
    program = trace(fn, args)
    plan = autoshard.plan(program, topology="cpu:2", mesh="data=2", pins={"each": "data"})
    assert plan.arguments["each"] == Spec((("data",),))
    check = measure(program, plan, steps=1, warmup=0, check=True).check
    assert check is not None and check.passed, check
    with pytest.raises(autoshard.UserError, match=r"each of shape \[32\] has 1 dim: write an entry for each"):
        autoshard.plan(program, topology="cpu:2", mesh="data=2", pins={"each": "None,data"})
    reasons = explain_plan(plan, "each", program, time_limit=5.0)
    assert all(len(one.spec.dims) == 1 for one in reasons.alternatives)


def test_a_file_with_keys_is_planned_as_words(tmp_path: pathlib.Path) -> None:
    fn, args = CASES["rows"]
    (tmp_path / "rows.mlir").write_text(jax.jit(fn, keep_unused=True).lower(*args).as_text())
    (tmp_path / "rows.export").write_bytes(jax.export.export(jax.jit(fn, keep_unused=True))(*args).serialize())
    for file, shape in (("rows.mlir", (32, 2)), ("rows.export", (32,))):
        program: Program = load_artifact(tmp_path / file)
        plan = make_plan(program, Options(topology="cpu:4", mesh="data=4")).plan
        assert shape in plan.shapes.values()
        check = measure(program, plan, steps=1, warmup=0, check=True).check
        assert check is not None and check.passed, check


def test_made_keys_have_the_generator_and_the_shape_of_the_program_s() -> None:
    fn, args = CASES["layers"]
    made = trace(fn, args).make_args(0)[1]  # type: ignore[misc]
    assert (made.shape, str(made.dtype)) == ((4,), "key<rbg>")
    assert len(np.unique(np.asarray(jax.random.key_data(made)), axis=0)) == 4


def test_keys_are_placed_where_several_processes_each_put_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.make_mesh((4,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    key = jax.random.split(jax.random.key(7), 8)
    with monkeypatch.context() as patch:
        patch.setattr(type(sharding), "is_fully_addressable", False)
        put = place(key, sharding)
    assert put.dtype == key.dtype
    np.testing.assert_array_equal(numbers(put), numbers(key))
