"""Arguments as `jax.jit` takes them: static ones, keywords, partial functions and donation, in programs and steps."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autoshard
from autoshard import UserError
from autoshard.exports import export_plan


def step(params: Any, x: Any, depth: int, scale: float = 2.0, *, kind: str = "relu") -> Any:
    for _ in range(depth):
        x = getattr(jax.nn, kind)(x @ params["w"]) * scale
    return {"w": params["w"] - x.mean()}, x.sum()


def named_last(params: Any, x: Any, depth: int, kind: str = "relu") -> Any:
    return step(params, x, depth, kind=kind)


def by_name(params: Any, *, y: Any, x: Any) -> Any:
    return {"w": params["w"] - x.mean()}, ((x @ params["w"]) * y).sum()


def values() -> tuple[Any, Any]:
    return {"w": jax.random.normal(jax.random.key(0), (16, 16))}, jax.random.normal(jax.random.key(1), (8, 16))


def planned(fn: Any, args: Any) -> tuple[autoshard.Plan, autoshard.Program]:
    program = autoshard.trace(fn, args)
    return autoshard.plan(program, topology="cpu:8", mesh="data=8"), program


def same(got: Any, want: Any) -> None:
    for each, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-5, atol=1e-5)


def test_static_arguments_are_those_of_jit() -> None:
    fn = jax.jit(step, static_argnums=(2,), static_argnames=("kind",))
    params, x = values()
    plan, program = planned(fn, {"params": params, "x": x, "depth": 2, "kind": "tanh"})
    assert list(plan.arguments) == ["params.w", "x"]
    want = fn(params, x, 2, kind="tanh")
    run = plan.jit(fn)
    same(run(params, x, 2, kind="tanh"), want)
    same(run(params, depth=2, x=x, kind="tanh"), want)
    same(plan.jit(program)(params, x, 2), want)
    # Another value makes another program.
    with pytest.raises(UserError, match="the computation has changed"):
        run(params, x, 3, kind="tanh")
    with pytest.raises(UserError, match="the computation has changed"):
        run(params, x, 2)


@pytest.mark.parametrize(
    "fn",
    [
        jax.jit(step, static_argnames=("depth", "kind")),
        functools.partial(jax.jit, static_argnames="depth")(step),
        jax.jit(step, static_argnums=-3 + 5),
    ],
)
def test_static_names_count_by_position_too(fn: Any) -> None:
    params, x = values()
    plan, _ = planned(fn, (params, x, 2))
    same(plan.jit(fn)(params, x, 2), step(params, x, 2))


@pytest.mark.parametrize(
    "fn",
    [
        functools.partial(step, depth=2, kind="tanh"),
        jax.jit(functools.partial(step, depth=2, kind="tanh")),
        functools.partial(jax.jit(step, static_argnames=("depth", "kind")), depth=2, kind="tanh"),
    ],
)
def test_partial_functions_have_the_rest_of_the_arguments(fn: Any) -> None:
    params, x = values()
    plan, _ = planned(fn, (params, x))
    same(plan.jit(fn)(params, x), step(params, x, 2, kind="tanh"))


@pytest.mark.parametrize("options", [{"static_argnums": (0, -2)}, {"static_argnames": ("depth", "kind")}])
def test_static_arguments_may_stand_first(options: Any) -> None:
    def first(depth: int, params: Any, kind: str, x: Any) -> Any:
        return step(params, x, depth, kind=kind)

    params, x = values()
    fn = jax.jit(first, **options)
    plan, _ = planned(fn, (2, params, "tanh", x))
    same(plan.jit(fn)(2, params, "tanh", x), first(2, params, "tanh", x))
    same(plan.jit(fn)(2, params, x=x, kind="tanh"), first(2, params, "tanh", x))


def test_a_partial_function_shifts_static_positions() -> None:
    params, x = values()
    fn = functools.partial(jax.jit(step, static_argnums=2), params)
    plan, _ = planned(fn, (x, 2))
    same(plan.jit(fn)(x, 2), step(params, x, 2))


def test_arguments_that_have_names_alone_follow_the_others() -> None:
    params, x = values()
    plan, program = planned(by_name, {"y": 2 * x, "x": x, "params": params})
    assert list(plan.arguments) == ["params.w", "x", "y"]
    want = by_name(params, x=x, y=2 * x)
    same(plan.jit(by_name)(params, x=x, y=2 * x), want)
    same(plan.jit(by_name)(y=2 * x, x=x, params=params), want)
    same(plan.jit(program)(params, y=2 * x, x=x), want)


@pytest.mark.parametrize("donation", [{"donate_argnums": 0}, {"donate_argnames": "params"}])
def test_donation_is_that_of_jit(donation: Any) -> None:
    fn = jax.jit(step, static_argnames="depth", **donation)
    params, x = values()
    plan, program = planned(fn, (params, x, 2))
    assert program.donate_argnums == (0,) and [a.donated for a in program.arguments] == [True, False]
    run = plan.jit(fn)
    want = step(params, x, 2)
    there = jax.device_put(params, run.shardings(params, x, 2)[0])
    same(run(there, x, 2), want)
    assert there["w"].is_deleted()
    kept = jax.device_put(values()[0], run.shardings(params, x, 2)[0]) if params["w"].is_deleted() else params
    same(plan.jit(fn, donate_argnums=())(kept, x, 2), want)
    assert not kept["w"].is_deleted()


@pytest.mark.parametrize("donation", [{"donate_argnums": (0, 1)}, {"donate_argnames": ("model", "optimizer")}])
def test_donation_is_that_of_nnx(donation: Any) -> None:
    def train(model: Any, optimizer: Any, x: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return value

    def made() -> tuple[Any, Any, Any]:
        model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), jnp.ones((8, 8))

    fn = nnx.jit(train, **donation)
    plan = autoshard.plan(autoshard.trace(fn, made()), topology="cpu:8", mesh={"data": 8})
    assert {name.partition(".")[0] for name in plan.donated} == {"model", "optimizer"}
    run, (model, *others), (alone, *apart) = plan.jit(fn), made(), made()
    for _ in range(2):
        before = model.kernel.get_value()
        np.testing.assert_allclose(run(model, *others), nnx.jit(train)(alone, *apart), rtol=1e-5)
    assert before.is_deleted()


def trained(w: Any, key: Any, x: Any, rate: Any) -> Any:
    """Return the updated weights and key of a step of `jax.grad` alone."""
    gradient = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2))(w)
    noise = jax.random.normal(key, x.shape[-1:]).sum() * 0
    return jax.tree.map(lambda value, each: value - rate * each + noise, w, gradient), jax.random.split(key)[0]


@pytest.mark.parametrize("form", ["plan", "jax", "explicit"])
def test_planned_steps_donate_as_traced_and_go_round(form: str) -> None:
    """Call a step with a raw key and a Python number three times; weights and key are donated by `trace` alone."""
    params, x = values()
    made = lambda: ({"up": params["w"] * 1, "down": params["w"] * 2}, jax.random.PRNGKey(0))  # noqa: E731
    program = autoshard.trace(trained, (*made(), x, 0.1), donate_argnums=(0, 1))
    pins = {"w.up": "None,model", "x": "data,None"}
    plan = autoshard.plan(program, topology="cpu:8", mesh={"data": 4, "model": 2}, pins=pins)
    assert plan.donated == ("w.down", "w.up", "key")
    run = plan.jit(trained)
    if form != "plan":
        code: dict[str, Any] = {}
        exec(export_plan(plan, form, program, force=True), code)
        run = code["jit" if form == "jax" else "jit_unchanged"](trained, (*made(), x, 0.1))
        assert form == "jax" or code["HINTS"], "the loss is used by nothing"
    state, expected = made(), made()
    for _ in range(3):
        before, state, expected = state, run(*state, x, 0.1), trained(*expected, x, 0.1)
    same(state, expected)
    assert before[0]["up"].is_deleted()


@pytest.mark.parametrize("given", [{}, {"kind": "relu"}, {"kind": "tanh"}])
def test_static_names_beside_static_positions_are_given_by_name(given: Any) -> None:
    fn = jax.jit(named_last, static_argnums=(2,), static_argnames=("kind",))
    params, x = values()
    plan, _ = planned(fn, {"params": params, "x": x, "depth": 2} | given)
    for kind in ("relu", "tanh"):
        if kind == given.get("kind", "relu"):
            same(plan.jit(fn)(params, x, 2, kind=kind), named_last(params, x, 2, kind))
        else:
            with pytest.raises(UserError, match="the computation has changed"):
                plan.jit(fn)(params, x, 2, kind=kind)


def test_a_static_value_without_a_hash_is_refused() -> None:
    params, x = values()

    def scaled(params: Any, x: Any, factors: Any) -> Any:
        return {"w": params["w"] * factors[0]}, x.sum() * factors[1]

    fn = jax.jit(scaled, static_argnums=2)
    with pytest.raises(ValueError, match="Non-hashable"):
        fn(params, x, [2.0, 3.0])
    with pytest.raises(UserError, match="static argument without a hash"):
        planned(fn, (params, x, [2.0, 3.0]))


def test_names_that_a_function_lacks_are_refused() -> None:
    params, x = values()
    with pytest.raises(UserError, match="`by_name` cannot be called so: .*'z'"):
        autoshard.trace(by_name, {"params": params, "x": x, "y": x, "z": x})
    assert jnp.isfinite(by_name(params, x=x, y=x)[1])
