"""Measuring planned programs on 8 CPU devices, and the devices themselves."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.exec import ensure_devices, measure, measurement_figures, plan_devices
from autoshard.exec.apply import plan_agreement
from autoshard.exec.devices.local_devices import by_coordinates
from autoshard.planning import Collective, Options, Pin, make_plan
from autoshard.program import Program, trace
from tests.exec import planned_programs as made
from tests.exec.planned_programs import handmade, spec


MESH = {"data": 4, "model": 2}
TENSOR_PARALLEL = {"params.up": "-,model", "params.down": "model,-", "arg1": "data,-", "arg2": "data,-"}


@pytest.fixture(scope="module")
def mlp():
    return made.mlp()


def test_a_measurement_has_times_communication_and_agreement(mlp):
    plan = handmade(mlp, MESH, TENSOR_PARALLEL)
    predicted = dataclasses.replace(
        plan.prediction,
        wire_bytes={"data": 7},
        collectives=(Collective("all-reduce", ("data",), 3, 7, 1e-6, False),),
    )
    measured = measure(mlp, dataclasses.replace(plan, prediction=predicted), steps=3, warmup=1, check=True)
    assert len(measured.step_times_s) == 3 and min(measured.step_times_s) <= measured.step_time_s
    assert measured.check is not None and measured.check.passed and measured.check.max_rel_diff > 0
    weights = 2 * 32 * 64 * 4 // 2
    # Gradients over data (4 devices), one activation of 4 x 32 floats over model.
    assert measured.wire_compiled["data"] == pytest.approx(2 * weights * 3 / 4, rel=0.02)
    assert measured.wire_compiled["model"] == pytest.approx(2 * 4 * 32 * 4 / 2, rel=0.02)
    assert measured.memory["donated"] == weights
    figures = measurement_figures(measured)
    assert figures["collectives"]["wire_bytes"]["data"]["predicted"] == 7
    assert figures["collectives"]["counts"]["all-reduce"]["predicted"] == 3
    assert figures["max_rel_diff"] == measured.check.max_rel_diff and figures["passed"] is True
    json.dumps(figures)


def test_the_check_catches_a_wrong_program(mlp, monkeypatch: pytest.MonkeyPatch):
    import autoshard.exec.run.measurement as room

    right = room.PlannedStep.run

    def wrong(planned: Any) -> Any:
        elapsed, results = right(planned)
        return elapsed, [value * 1.001 for value in results]

    monkeypatch.setattr(room.PlannedStep, "run", wrong)
    measured = measure(mlp, handmade(mlp, MESH, TENSOR_PARALLEL), steps=1, warmup=0, check=True)
    assert measured.check is not None and not measured.check.passed
    assert measured.check.max_rel_diff == pytest.approx(1e-3, rel=0.01)


def test_adamw_agrees_with_state_that_feeds_back():
    optimizer = optax.adamw(1e-2)

    def loss(params, x, y):
        return made.mlp_loss(params, x, y) + 0 * params["up"].sum()

    def step(params, opt_state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = {"down": made.f32(64, 32), "up": made.f32(32, 64)}
    state = jax.eval_shape(optimizer.init, params)
    program = trace(step, (params, state, made.f32(16, 32), made.f32(16, 32)), name="adamw", donate_argnums=(0, 1))
    names = {a.name for a in program.arguments}
    specs = {name: "model,-" if "down" in name else "-,model" for name in names if "down" in name or "up" in name}
    measured = measure(program, handmade(program, MESH, specs | {"x": "data,-", "y": "data,-"}), steps=2, check=True)
    assert measured.check is not None and measured.check.passed
    compared = {d.name: d.compared for d in measured.check.differences}
    assert 0.5 < compared["params.up"] <= 1.0
    assert all(share == 1.0 for name, share in compared.items() if ".mu." in name)
    assert sum(".mu." in name for name in compared) == 2


def test_another_program_is_refused(mlp):
    plan = handmade(mlp, MESH, TENSOR_PARALLEL)
    with pytest.raises(UserError, match="the plan is for mlp, not for this program: argument `params.layers.down`"):
        measure(made.decoder(), plan)
    wider = trace(
        made.sgd(made.mlp_loss),
        ({"down": made.f32(64, 32), "up": made.f32(32, 64)}, made.f32(32, 32), made.f32(32, 32)),
        donate_argnums=(0,),
    )
    with pytest.raises(
        UserError, match=r"argument `arg1` is float32\[16,32\] in the plan, but args\[1\] is float32\[32"
    ):
        measure(wider, plan)
    other = dataclasses.replace(mlp, fingerprint="0")
    with pytest.raises(UserError, match="but the computation has changed"):
        measure(other, plan)
    with pytest.raises(UserError, match="measure: 0 steps"):
        measure(mlp, plan, steps=0)


def test_a_program_whose_constants_differ_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_with(seed: int) -> Program:
        drawn = np.random.default_rng(seed).normal(size=(8, 8)).astype("float32")
        return trace(lambda x: jnp.dot(x, drawn), (made.f32(16, 8),), name="drawn")

    planned = made_with(0)
    plan = handmade(planned, MESH, {})
    monkeypatch.setattr(plan_agreement, "kept_program", lambda plan: planned)
    with pytest.raises(UserError, match="but a constant in the computation differs, such as a random buffer"):
        measure(made_with(1), plan)
    with pytest.raises(UserError, match="but a constant in the computation differs"):
        plan.lower(made_with(1).fn, *planned.args)
    tanh = trace(lambda x: jnp.tanh(x), (made.f32(16, 8),), name="drawn")
    with pytest.raises(UserError, match="but the computation has changed"):
        measure(dataclasses.replace(tanh, results=planned.results), plan)


def test_pins_that_do_not_exist_are_refused(mlp):
    plan = handmade(mlp, MESH, TENSOR_PARALLEL, pins=(Pin(9999, 0, spec("-,-")),))
    with pytest.raises(UserError, match="the plan pins result 0 of op 9999, which is not in this program of"):
        measure(mlp, plan)


def test_ensure_devices_before_and_after_jax_starts():
    ensure_devices(8)
    with pytest.raises(UserError, match="9 devices are needed but JAX has started with 8 .cpu.: set XLA_FLAGS="):
        ensure_devices(9)
    code = (
        "import os; os.environ.pop('XLA_FLAGS', None); os.environ['JAX_PLATFORMS'] = 'cpu'\n"
        "{first}from autoshard.exec import ensure_devices; ensure_devices(5)\nimport jax; print(len(jax.devices()))"
    )
    for first in ("", "import jax; "):
        out = subprocess.run([sys.executable, "-c", code.format(first=first)], capture_output=True, text=True)
        assert out.stdout.strip() == "5", out.stderr


@dataclasses.dataclass(frozen=True)
class FakeTpu:
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0
    id: int = 0
    process_index: int = 0
    platform: str = "tpu"


def test_tpus_are_found_by_their_coordinates(mlp):
    host_major = [
        FakeTpu((x + 2 * hx, y + 2 * hy, 0)) for hy in (0, 1) for hx in (0, 1) for y in (0, 1) for x in (0, 1)
    ]
    numbered = by_coordinates(Topology.parse("v5e:4x4"), host_major)
    assert [numbered[i].coords for i in range(16)] == [(i // 4, i % 4, 0) for i in range(16)]
    plan = handmade(mlp, {"data": 4, "model": 4}, {}, topology="v5e:4x4", device_order=tuple(range(16)))
    assert [d.coords[:2] for d in plan_devices(plan, host_major)][:5] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    line = [FakeTpu((i, 0, 0)) for i in range(16)]
    with pytest.raises(
        UserError, match=r"the devices here do not form that shape: there is none at \(0, \(0, 1, 0\), 0"
    ):
        plan_devices(plan, line)


def test_tpu_slices_and_cores_are_distinguished():
    topology = Topology.parse("v5e:2x2*2")
    pool = [FakeTpu((x, y, 0), slice_index=s) for s in (1, 0) for x in (0, 1) for y in (0, 1)]
    numbered = by_coordinates(topology, pool)
    assert [(numbered[i].slice_index, numbered[i].coords[:2]) for i in (0, 3, 4)] == [
        (0, (0, 0)),
        (0, (1, 1)),
        (1, (0, 0)),
    ]
    cores = [FakeTpu((x, y, z), core) for core in (0, 1) for z in (0, 1) for y in (0, 1) for x in (0, 1)]
    numbered = by_coordinates(Topology.parse("tpu7x:2x2x2"), cores)
    assert sorted(numbered) == list(range(16))
    assert (numbered[1].coords, numbered[1].core_on_chip) == ((0, 0, 0), 1)


def test_inference_with_integer_results_agrees():
    def choose(params, x):
        return jnp.argmax(x @ params["up"], axis=-1)

    program = trace(choose, ({"up": made.f32(32, 64)}, made.f32(16, 32)), name="choose")
    plan = handmade(program, MESH, {"params.up": "-,model", "x": "data,-"})
    measured = measure(program, plan, steps=1, warmup=0, check=True)
    assert measured.check is not None and measured.check.max_rel_diff == 0
    assert np.isfinite(measured.step_time_s)


def test_device_arrays_that_the_program_gives_survive_a_donated_step() -> None:
    tx = optax.adamw(1e-2)

    def step(params, state, batch):  # noqa: ANN001, ANN202
        grads = jax.grad(lambda p: jnp.mean((batch @ p["w"] + p["b"]) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones((16, 8)), "b": jnp.zeros((8,))}
    args = (params, tx.init(params), jnp.ones((8, 16)))
    program = trace(step, args, name="given arrays", donate_argnums=(0, 1), training=True, make_args=lambda seed: args)
    measurement = measure(program, make_plan(program, Options(topology="cpu:8")).plan, steps=2, warmup=0, check=True)
    assert measurement.check is not None and measurement.check.passed
    assert params["w"].sum() == 128.0 and not params["b"].is_deleted()


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes", "mlp ran out of memory on the devices here: RESOURCE"),
        ("INTERNAL: no such\nluck", "mlp failed on the devices here: INTERNAL: no such luck"),
    ],
)
def test_what_the_runtime_says_is_one_sentence(mlp, monkeypatch: pytest.MonkeyPatch, message: str, sentence: str):
    def fail(*_):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr("autoshard.exec.run.planned_steps.place", fail)
    with pytest.raises(UserError, match=sentence):
        measure(mlp, handmade(mlp, MESH, TENSOR_PARALLEL), steps=1, warmup=0)


def test_an_unplanned_step_that_does_not_fit_is_reported_and_the_planned_one_is_timed(
    mlp, monkeypatch: pytest.MonkeyPatch
):
    def too_large(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr("autoshard.exec.run.measurement._unplanned_step", too_large)
    measurement = measure(mlp, handmade(mlp, MESH, TENSOR_PARALLEL), steps=2, warmup=0, check=True)
    assert measurement.check is None and len(measurement.step_times_s) == 2
    skipped = measurement_figures(measurement)["check_skipped"]
    assert skipped.startswith("the unplanned step ran out of memory on one device, so that nothing was compared: RESO")

    def broken(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: no such luck")

    monkeypatch.setattr("autoshard.exec.run.measurement._unplanned_step", broken)
    with pytest.raises(UserError, match="mlp failed on the devices here: INTERNAL"):
        measure(mlp, handmade(mlp, MESH, TENSOR_PARALLEL), steps=1, warmup=0, check=True)
