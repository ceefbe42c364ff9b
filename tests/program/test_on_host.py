"""Optimizer state on the hosts: the offloaded values, the step's results, and refusals."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.errors import UserError
from autoshard.graph import TO_HOST, analyse, read_graph
from autoshard.program import Program, Role, on_host, open_source, streamed, trace


LAYERS, WIDTH, TOKENS = 3, 16, 8
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, mu_dtype="bfloat16"))


def step_of(rule: Any, scanned: bool = True) -> Callable[..., Any]:
    """Return a step on layers, scanned or unrolled, with a bias outside of the scan."""

    def run(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w["up"]) @ w["down"], None

    def loss(params: Any, x: Any) -> Any:
        if scanned:
            x, _ = jax.lax.scan(jax.checkpoint(run), x, params["layers"])
        else:
            for number in range(LAYERS):
                x, _ = run(x, jax.tree.map(lambda stack, number=number: stack[number], params["layers"]))
        return jnp.mean(jnp.square(x + params["bias"]))

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, x)
        updates, state = rule.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def arguments(rule: Any) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    layers = {
        "up": jnp.asarray(rng.normal(size=(LAYERS, WIDTH, 2 * WIDTH)) / 4, jnp.float32),
        "down": jnp.asarray(rng.normal(size=(LAYERS, 2 * WIDTH, WIDTH)) / 4, jnp.float32),
    }
    params = {"layers": layers, "bias": jnp.zeros(WIDTH)}
    return params, rule.init(params), jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), jnp.float32)


def hosted(rule: Any, **more: Any) -> Program:
    shapes = jax.eval_shape(lambda: arguments(rule))
    return trace(step_of(rule, **more), shapes, donate_argnums=(0, 1), host="optimizer")


RULES = {
    "adamw": CLIPPED,
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-2, weight_decay=0.1),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", RULES)
def test_a_step_with_its_state_on_the_host_computes_the_same(name: str) -> None:
    rule = RULES[name]
    plain, away = jax.jit(step_of(rule)), jax.jit(hosted(rule).fn)
    *wanted, x = arguments(rule)
    found = wanted
    for _ in range(3):
        *wanted, value = plain(*wanted, x)
        *found, same = away(*jax.device_put(found, jax.memory.Space.Device), x)
        assert float(value) == pytest.approx(float(same), rel=1e-6)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a, "f4"), np.asarray(b, "f4"), rtol=1e-5, atol=1e-6)


def test_the_state_of_stacks_waits_on_the_host_and_the_rest_stays() -> None:
    program = hosted(CLIPPED)
    graph = read_graph(program.module)
    away = analyse(graph).hosted
    names = [a.name for a, t in zip(program.arguments, graph.arguments, strict=True) if t in away]
    state = [a for a in program.arguments if a.role is Role.OPTIMIZER_STATE]
    assert names == [a.name for a in state if ".layers." in a.name] and len(names) == 4
    assert {r.name for r, t in zip(program.results, graph.results, strict=True) if t in away} == set(names)
    assert any("2 tensors stay on the devices" in note for note in program.notes)
    assert on_host(program, "optimizer") is program


def test_master_weights_among_the_state_wait_with_it() -> None:
    """Offload master weights with the state. Narrow parameters are slices of them, so no second stack is needed."""
    rule = optax.adamw(1e-2)

    def step(params: Any, state: Any, x: Any) -> Any:
        inner, master = state

        def loss(params: Any) -> Any:
            y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        gradient = jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss)(params))
        updates, inner = rule.update(gradient, inner, master)
        master = optax.apply_updates(master, updates)
        return jax.tree.map(lambda m: m.astype(jnp.bfloat16), master), (inner, master)

    master = jnp.asarray(np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)), jnp.float32)
    args = master.astype(jnp.bfloat16), (rule.init(master), master), jnp.ones((TOKENS, WIDTH), jnp.bfloat16)
    program = trace(step, args, arg_names=("params", "opt_state", "x"), donate_argnums=(0, 1), host="optimizer")
    graph = read_graph(program.module)
    away = analyse(graph).hosted
    names = [a.name for a, t in zip(program.arguments, graph.arguments, strict=True) if t in away]
    assert names == ["opt_state.0.mu", "opt_state.0.nu", "opt_state.1"]
    carried = {c.init for loop in graph.loops for c in loop.carries}
    assert {t for t, a in zip(graph.arguments, program.arguments, strict=True) if a.name == "params"} <= carried
    for a, b in zip(jax.tree.leaves(jax.jit(program.fn)(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(np.asarray(a, "f4"), np.asarray(b, "f4"), rtol=1e-5, atol=1e-6)


def test_only_slices_are_fetched_and_sent() -> None:
    graph = read_graph(hosted(CLIPPED).module)
    moved = [op for op in graph.ops if op.kind in (TO_HOST, "to_device")]
    assert len(moved) == 8  # two weights with two moments each, in both directions
    assert all(op.loop >= 0 and len(graph.tensors[op.results[0]].shape) == 2 for op in moved)


def test_nothing_of_the_update_is_computed_for_whole_stacks() -> None:
    graph = read_graph(hosted(optax.adamw(1e-2)).module)
    used = {c.init for loop in graph.loops for c in loop.carries} | {t for op in graph.ops for t in op.operands}
    whole = [
        op.kind
        for op in graph.ops
        if op.loop < 0
        and len(graph.tensors[op.results[0]].shape) == 3
        and op.results[0] in used
        and op.results[0] not in graph.results
    ]
    assert set(whole) <= {"broadcast_in_dim"}  # the empty stacks that loops begin with


def test_a_step_that_is_so_already_is_not_made_so_twice() -> None:
    program = hosted(CLIPPED)
    ties = {n: a.result for n, a in enumerate(program.arguments) if a.result is not None}
    held = [n for n, a in enumerate(program.arguments) if ".layers." in a.name and a.role is Role.OPTIMIZER_STATE]
    again = streamed(lambda *args: program.fn(*args), ties, held)
    assert len(jax.make_jaxpr(again)(*program.args).eqns) == len(jax.make_jaxpr(program.fn)(*program.args).eqns)


def test_another_step_than_the_planned_one_is_refused() -> None:
    program = hosted(CLIPPED)
    ties = {n: a.result for n, a in enumerate(program.arguments) if a.result is not None}
    held = [n for n, a in enumerate(program.arguments) if a.role is Role.OPTIMIZER_STATE and a.shape]
    with pytest.raises(UserError, match="updates 4 of the 6 tensors that wait in the hosts' memory .* plan it again"):
        jax.eval_shape(streamed(step_of(CLIPPED), ties, held), *program.args)


REFUSED = {
    "no state": (optax.sgd(0.1), True, "`step` updates no optimizer state .* with an optimizer that has moments"),
    "no stack": (CLIPPED, False, "`step` has no stack of layers with an element-wise update of optimizer state"),
    "by norms": (optax.lamb(1e-2), True, "`step` has no stack of layers .* an optimizer such as adamw"),
    "by rows": (optax.adafactor(1e-2, min_dim_size_to_factor=8), True, "`step` has no stack of layers"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_wait_on_the_host_is_refused(why: str) -> None:
    rule, scanned, message = REFUSED[why]
    with pytest.raises(UserError, match=message):
        hosted(rule, scanned=scanned)


def test_a_place_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="--host `disk` does not exist; use `none` or `optimizer`"):
        trace(step_of(CLIPPED), jax.eval_shape(lambda: arguments(CLIPPED)), host="disk")


def test_a_step_returns_to_the_devices() -> None:
    shapes = jax.eval_shape(lambda: arguments(CLIPPED))
    plain = trace(step_of(CLIPPED), shapes, donate_argnums=(0, 1))
    back = on_host(on_host(plain, "optimizer"), "none")
    assert (back.fingerprint, back.notes) == (plain.fingerprint, plain.notes)
    assert back.on_host == "none" and back.fn is plain.fn and not analyse(read_graph(back.module)).hosted
    unknown = dataclasses.replace(on_host(plain, "optimizer"), fn=step_of(CLIPPED))
    with pytest.raises(UserError, match="the step of `step` updates its state in the hosts' memory; trace it with"):
        on_host(unknown, "none")


def test_an_option_overrides_the_host_that_a_file_chooses(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(FILE)
    assert open_source(str(file)).on_host == "optimizer"
    assert open_source(str(file), host="optimizer").on_host == "optimizer"
    assert open_source(str(file), host="none").on_host == "none"


FILE = """
import autoshard, jax, optax

rule = optax.adamw(1e-2)


def step(params, state, x):
    grads = jax.grad(lambda p: (jax.lax.scan(lambda x, w: (x @ w, None), x, p)[0] ** 2).mean())(params)
    updates, state = rule.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def program():
    params = jax.ShapeDtypeStruct((3, 16, 16), "float32")
    args = params, jax.eval_shape(rule.init, params), jax.ShapeDtypeStruct((8, 16), "float32")
    return autoshard.trace(step, args, donate_argnums=(0, 1), host="optimizer")
"""


def test_sources_take_it() -> None:
    program = open_source("hf:llama-tiny", train=True, batch=4, seq=16, host="optimizer")
    assert program.on_host == "optimizer" and program.source["options"]["host"] == "optimizer"
    assert open_source("hf:llama-tiny", train=True, batch=4, seq=16, host="none").on_host == "none"
    with pytest.raises(UserError, match="updates no optimizer state"):
        open_source("hf:llama-tiny", train=False, batch=4, seq=16, host="optimizer")
