"""Programs with one unusual type, shape or mesh each: planned, shown, run and compared."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.errors import UserError
from autoshard.exec import measure
from autoshard.exports import export_plan
from autoshard.planning import Options, explain_plan, make_plan, read_asked
from autoshard.program import Program, trace
from autoshard.report import html_report, perfetto_json, terminal_report


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def key(*dims: int, impl: str | None = None) -> Any:
    return jax.eval_shape(lambda: jnp.broadcast_to(jax.random.key(0, impl=impl), dims))


def sgd(loss: Callable[..., Any], params: Any, *batch: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g.conj(), params, grads), value


def mlp() -> Program:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)

    params = {"up": shape(32, 64), "down": shape(64, 32)}
    return trace(lambda params, x: sgd(loss, params, x), (params, shape(16, 32)), name="mlp")


def fourier() -> Program:
    """Trace one layer of a Fourier neural operator, with complex weights and a complex scalar, and its gradient."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        hidden = x @ params["lift"]
        modes = jnp.fft.rfft2(hidden, axes=(1, 2)) * (1 + 0.5j)
        low = jnp.einsum("bxyi,xyio->bxyo", modes[:, :4, :3], params["modes"])
        modes = jnp.zeros_like(modes).at[:, :4, :3].set(low)
        hidden = jnp.fft.irfft2(modes, s=hidden.shape[1:3], axes=(1, 2))
        return jnp.mean((jax.nn.gelu(hidden) @ params["project"] - y) ** 2)

    params = {"lift": shape(2, 8), "modes": shape(4, 3, 8, 8, dtype=jnp.complex64), "project": shape(8, 1)}
    data = shape(8, 8, 8, 2), shape(8, 8, 8, 1)
    return trace(lambda params, x, y: sgd(loss, params, x, y), (params, *data), name="fourier")


def complex_loop() -> Program:
    def fn(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (jnp.fft.fft(c @ w, axis=1) * (0.1 + 0.2j), jnp.abs(c).sum()), x, None, 3)

    return trace(fn, (shape(8, 8, dtype=jnp.complex64), shape(8, 8, dtype=jnp.complex64)), name="complex loop")


def keyed_step() -> Program:
    """Trace a training step whose donated state has a typed random key, and that reads a key of another generator."""

    def step(state: Any, x: Any, other: Any, rows: Any) -> Any:
        following, mine = jax.random.split(state["key"])

        def loss(w: Any) -> Any:
            noise = jax.vmap(lambda k: jax.random.normal(k, (16,)))(rows)
            return jnp.mean(((jax.random.bernoulli(mine, 0.5, x.shape) * x + noise) @ w) ** 2)

        value, grad = jax.value_and_grad(loss)(state["w"])
        return {"key": following, "w": state["w"] - 0.1 * grad}, value, jax.random.split(other)[0], rows

    state = {"key": key(), "w": shape(16, 16)}
    args = (state, shape(8, 16), key(impl="rbg"), key(8))
    return trace(step, args, name="keyed step", donate_argnums=0, roles={"rows": "batch"})


ORDINARY: dict[str, Callable[[], Program]] = {
    "identity": lambda: trace(lambda x, y: (x, {"a": y, "b": x}), (shape(8, 8), shape(16))),
    "donated identity": lambda: trace(lambda x: x, (shape(8, 8),), donate_argnums=0),
    "a loop without work": lambda: trace(lambda x: jax.lax.scan(lambda c, _: (c, None), x, None, 3), (shape(8, 8),)),
    "no arguments": lambda: trace(lambda: jnp.ones((8, 8)) * 2, ()),
    "no results": lambda: trace(lambda x: None, (shape(8, 8),)),
    "nothing": lambda: trace(lambda: None, ()),
    "scalars": lambda: trace(lambda a, b: (a * b + 1, b), (shape(), 2.0)),
    "an empty array": lambda: trace(lambda x: (x * 2, x.sum()), (shape(0, 8),)),
    "fourier": fourier,
    "complex loop": complex_loop,
    "keyed step": keyed_step,
}


def check(program: Program, topology: str, mesh: str | None = None, run: bool = True, **asked: Any) -> Any:
    """Plan a program, write every report and export, and compare the planned run with the unplanned one."""
    plan = make_plan(program, Options(**asked, topology=topology, mesh=mesh)).plan
    assert html_report(plan) and terminal_report(plan, {}) and perfetto_json(plan)
    for form in ("jax", "flax", "maxtext", "torch-xla", "dtensor", "hlo"):
        export_plan(plan, form, force=True)
    for name in [*plan.arguments, *plan.results][:1]:
        explain_plan(plan, name, program)
    for end in program.arguments:
        assert len(plan.arguments[end.name].dims) == len(end.shape)
    for end in program.results:
        assert len(plan.results[end.name].dims) == len(end.shape)
    if run:
        measured = measure(program, plan, steps=1, check=True)
        assert measured.check is not None and measured.check.passed, measured.check
    return plan


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_are_planned_shown_and_run(name: str) -> None:
    program = ORDINARY[name]()
    mesh = "data=8" if program.name in ("fourier", "keyed step") else None  # a search of the mesh takes long
    check(program, "cpu:8", mesh)
    check(program, "v5e:2x4", mesh, run=False)


def recurrent() -> Program:
    """Trace a recurrence whose weights its loop reads in every step, with gradients that the loop adds up."""

    def loss(params: Any, x: Any) -> Any:
        def cell(h: Any, x: Any) -> Any:
            h = jnp.tanh(x @ params["in"] + h @ params["state"] + params["bias"])
            return h, h

        return jnp.mean(jax.lax.scan(cell, jnp.zeros((x.shape[1], 32)), x)[1] ** 2)

    params = {"in": shape(16, 32), "state": shape(32, 32), "bias": shape(32)}
    return trace(lambda params, x: sgd(loss, params, x), (params, shape(5, 16, 16)), name="recurrent")


@pytest.mark.few(1)
@pytest.mark.parametrize("pins", [{}, {"in": "-,data", "state": "data,-", "bias": "data", "x": "-,data,-"}])
def test_weights_that_a_loop_does_not_change_are_resharded_before_it(pins: dict[str, str]) -> None:
    check(recurrent(), "cpu:8", "data=8", asked=read_asked(pins))
    check(recurrent(), "cpu:8", "data=4,model=2", asked=read_asked(pins))


# Axes of size 1


@pytest.mark.parametrize("topology", ["v6e:1x1", "cpu:1", "h100:1"])
def test_one_device_needs_no_communication(topology: str) -> None:
    plan = check(mlp(), topology, run=topology == "cpu:1")
    assert plan.prediction.collectives == () and list(plan.baselines) == ["data_parallel"]
    assert not any("not compared" in line for line in plan.warnings)


def test_slices_of_one_chip_are_one_axis() -> None:
    assert check(mlp(), "v6e:1x1*2", run=False).mesh == {"data": 2}


@pytest.mark.few(3)
@pytest.mark.parametrize("mesh", ["data=8,model=1", "model=1,data=8", "a=1,data=8,b=1"])
@pytest.mark.parametrize("topology", ["cpu:8", "v5e:2x4"])
def test_an_axis_of_size_one_is_free(mesh: str, topology: str) -> None:
    plan = check(mlp(), topology, mesh, run=topology == "cpu:8")
    bare = make_plan(mlp(), Options(topology=topology, mesh="data=8")).plan
    assert plan.prediction.step_time_s == bare.prediction.step_time_s
    assert {n: s.axes for n, s in plan.arguments.items()} == {n: s.axes for n, s in bare.arguments.items()}
    assert {n: p.step_time_s for n, p in plan.baselines.items()} == {
        n: p.step_time_s for n, p in bare.baselines.items()
    }


def test_an_axis_of_size_one_may_be_asked_for() -> None:
    pins = {"up": "model,data", "down": "model+data,-"}
    asked = read_asked(pins, None, {"x": "model"}, {"model": "batch"})
    plan = check(mlp(), "cpu:8", "data=8,model=1", asked=asked)
    assert str(plan.arguments["params.up"]) == "[-, data]" and str(plan.arguments["params.down"]) == "[data, -]"
    with pytest.raises(UserError, match="uses the axis `model` twice"):
        make_plan(mlp(), Options(topology="cpu:8", mesh="data=8,model=1", asked=read_asked({"up": "model,model"})))


def test_a_program_may_name_an_axis_of_size_one() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(8, 1), ("data", "model"))

    def loss(params: Any, x: Any) -> Any:
        hidden = jax.nn.relu(x @ params["up"])
        hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, P("data", "model")))

        @jax.shard_map(mesh=mesh, in_specs=(P("data", "model"), P("model", None)), out_specs=P("data", None))
        def matmul(a: Any, b: Any) -> Any:
            return jax.lax.psum(a @ b, "model")

        out = jax.lax.with_sharding_constraint(
            matmul(hidden, params["down"]), NamedSharding(mesh, P(("model", "data"), None))
        )
        return jnp.mean(out**2)

    params = {"up": shape(32, 64), "down": shape(64, 32)}
    program = trace(lambda params, x: sgd(loss, params, x), (params, shape(16, 32)), name="constrained")
    assert check(program, "cpu:8").mesh == {"data": 8, "model": 1}
    check(program, "v5e:2x4", run=False)
