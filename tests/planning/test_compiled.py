"""Whole plans against XLA's compilation of them for eight CPU devices: bytes on the wire by mesh axis."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.exec import compile_lines, compile_plan, plan_mesh, read_collectives, wire_by_axis
from autoshard.planning import Options, Plan, make_plan
from autoshard.planning.explain.plan_pins import make_pins, make_regions
from autoshard.planning.price.evaluate import evaluate, tensor_spec
from autoshard.planning.price.prediction import predict
from autoshard.planning.space.user_constraints import read_asked
from autoshard.program import Program, trace
from tests.planning import programs as made


SCALARS = 64
"""Bytes by which a plan may be off: sums of scalars are not decisions."""


def on_the_wire(program: Program, plan: Plan) -> dict[str, int]:
    compiled = plan.lower(program.fn, *program.args, donate_argnums=program.donate_argnums).compile()
    return wire_by_axis(read_collectives(compiled.as_text(), plan_mesh(plan)))


@pytest.mark.parametrize(
    ("name", "mesh", "which"),
    [
        ("mlp", "data=4,model=2", "tensor_parallel"),
        ("mlp", "data=8", "fsdp"),
        ("two matmuls", "data=4,model=2", "fsdp_tp"),
        ("decoder", "data=4,model=2", "plan"),
        pytest.param("decoder", "data=4,model=2", "tensor_parallel_sp", marks=pytest.mark.full),
        pytest.param("decoder", "data=4,model=2", "fsdp_tp_sp", marks=pytest.mark.full),
        ("convolutions", "data=8", "data_parallel"),
        ("decoding", "data=4,model=2", "tensor_parallel"),
        ("mixed", "data=4,model=2", "tensor_parallel"),
        ("views", "data=4,model=2", "data_parallel"),
        ("spectrum", "data=4,model=2", "data_parallel"),
    ],
)
def test_predicted_bytes_are_those_on_the_wire(name: str, mesh: str, which: str) -> None:
    program, result = made.program(name), made.planned(name, "cpu:8", mesh)
    plan = result.plan if which == "plan" else result.baseline_plans[which]
    wire = on_the_wire(program, plan)
    for axis, size in plan.prediction.wire_bytes.items():
        assert wire.get(axis, 0) == pytest.approx(size, rel=0.01, abs=SCALARS)


def random_plan(name: str, rng: np.random.Generator) -> Plan:
    """Build a plan of random choices with every value pinned. Most of its reshards make no sense."""
    program, model, plan = made.program(name), made.model(name), made.planned(name).plan
    choices = made.random_choices(model, rng)
    specs = {
        a.name: tensor_spec(model, choices, t) for a, t in zip(program.arguments, model.graph.arguments, strict=True)
    }
    results = {
        r.name: specs[program.arguments[r.argument].name] if r.argument is not None else tensor_spec(model, choices, t)
        for r, t in zip(program.results, model.graph.results, strict=True)
    }
    predicted = predict(model, evaluate(model, choices), plan.memory_limit_bytes)
    return dataclasses.replace(
        plan,
        arguments=specs,
        results=results,
        pins=make_pins(model, choices),
        regions=make_regions(model, choices),
        prediction=predicted,
    )


@pytest.mark.parametrize("name", ["two matmuls", pytest.param("decoding", marks=pytest.mark.full)])
def test_plans_chosen_at_random_are_predicted_too(name: str) -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(4):
        plan = random_plan(name, rng)
        wire = on_the_wire(made.program(name), plan)
        ratios.append((sum(plan.prediction.wire_bytes.values()) + 1) / (sum(wire.values()) + 1))
    assert all(0.8 < ratio < 1.25 for ratio in ratios), ratios
    assert 0.93 < np.median(ratios) < 1.08, ratios


@pytest.mark.parametrize("name", [pytest.param("mlp", marks=pytest.mark.full), "convolutions", "views"])
def test_plans_chosen_at_random_compute_the_same(name: str) -> None:
    program, rng = made.program(name), np.random.default_rng(0)
    assert program.make_args is not None
    arguments = program.make_args(0)
    wanted = jax.tree.leaves(jax.jit(program.fn)(*arguments))
    for _ in range(2):
        results = jax.tree.leaves(random_plan(name, rng).jit(program.fn)(*arguments))
        for ours, theirs in zip(results, wanted, strict=True):
            largest = np.max(np.abs(np.asarray(theirs, dtype=np.float64)))
            assert np.max(np.abs(np.asarray(ours) - np.asarray(theirs))) <= 1e-5 * largest + 1e-9


def test_sums_of_halves_go_over_the_wire_as_the_compiler_sends_them() -> None:
    """Count 4 bytes an element on the wire where sums of bfloat16 run in float32."""
    half = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 512), (512, 256))]
    program = trace(lambda x, w: x @ w, tuple(half), name="halves")
    asked = read_asked({"x": "None,data", "w": "data,None"})
    plan = make_plan(program, Options(topology="cpu:8", mesh="data=8", asked=asked)).plan
    assert plan.prediction.wire_bytes["data"] > 0
    assert on_the_wire(program, plan) == pytest.approx(plan.prediction.wire_bytes, rel=0.01)


def scanned(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """Step a selective scan within a loop over layers: each time step reads what the layer makes of its parameters."""

    def layer(h: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        decay, gain = -jnp.exp(p["decay"]), jnp.tanh(p["gain"]).reshape(-1)

        def cell(state: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.exp(u[..., None] * decay) * state + (u * gain)[..., None]
            return state, jnp.sum(state, -1)

        start = jnp.zeros((*h.shape[1:], p["decay"].shape[-1]))
        return h + jax.lax.scan(cell, start, h)[1], None

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def test_what_a_loop_does_not_change_is_gathered_once_before_it() -> None:
    """Keep parameters split that every time step reads whole, through broadcasts."""
    if importlib.util.find_spec("libtpu") is None:  # an optional extra
        pytest.skip("libtpu is not installed")
    shapes = {"decay": (2, 256, 16), "gain": (2, 8, 32)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    program = trace(scanned, (params, jax.ShapeDtypeStruct((24, 32, 256), jnp.float32)), name="scanned")
    asked = read_asked({"params.decay": "None,data,None", "params.gain": "None,data,None", "x": "None,data,None"})
    plan = make_plan(program, Options(topology="v5e:2x4", mesh="data=8", asked=asked)).plan
    found = compile_plan(program, plan, quick=True)
    assert {each.count for each in found.collectives if each.in_loop} == {2}
    assert found.wire_compiled["data"] == pytest.approx(plan.prediction.wire_bytes["data"], rel=0.2)
    assert not found.unforeseen and found.followed and "does not follow" not in "\n".join(compile_lines(found))

    unpinned = dataclasses.replace(plan, pins=tuple(pin for pin in plan.pins if pin.operand is None))
    found = compile_plan(program, unpinned, quick=True)
    assert found.wire_compiled["data"] > 5 * plan.prediction.wire_bytes["data"] and not found.followed
    assert {row.pin for row in found.unforeseen if row.count == 2 * 24} == {"params.decay=None,None,None"}
    lines = compile_lines(found)
    said = next(k for k, line in enumerate(lines) if line.startswith("The compiler does not follow the plan"))
    assert "times as much as planned" in lines[said] and "48 times a step" in lines[said]
    assert lines[said + 1] == "  against it: autoshard plan ... --pin params.decay=None,None,None"
    assert "undecided" not in lines[said - 1]
