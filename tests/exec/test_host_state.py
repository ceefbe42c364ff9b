"""Optimizer state on the hosts: its memory, its transfers, and equal results under a plan."""

import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.base.units import format_bytes, format_seconds
from autoshard.cost import Compute, Topology
from autoshard.errors import UserError
from autoshard.exec import jax_export
from autoshard.exec.apply import planned_lowering
from autoshard.exports import export_plan
from autoshard.planning import Options, Plan, load_plan, make_plan
from autoshard.program import Program, trace
from autoshard.report.terminal.explanation_report import WAITS_FOR_HOST, step_limits


LAYERS, WIDTH, INNER, TOKENS = 4, 64, 256, 128
RULE = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))  # otherwise rounding decides signs


def step(params: Any, state: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w["up"]) @ w["down"] + x, None

    def loss(params: Any) -> Any:
        return jnp.mean(jnp.square(jax.lax.scan(jax.checkpoint(layer), x @ params["first"], params["layers"])[0]))

    value, gradient = jax.value_and_grad(loss)(params)
    updates, state = RULE.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


def arguments() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    sizes = {"up": (LAYERS, WIDTH, INNER), "down": (LAYERS, INNER, WIDTH)}
    layers = {name: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32) for name, shape in sizes.items()}
    params = {"first": jnp.eye(WIDTH), "layers": layers}
    return params, RULE.init(params), jnp.asarray(rng.normal(size=(TOKENS, WIDTH)), jnp.float32)


def shapes(times: int) -> tuple[Any, ...]:
    """Return parameters, optimizer state and batch of layers that are `times` as wide."""
    width, inner = times * WIDTH, times * INNER
    layers = {"up": jnp.zeros((LAYERS, width, inner)), "down": jnp.zeros((LAYERS, inner, width))}
    params = {"first": jnp.zeros((width, width)), "layers": layers}
    return params, RULE.init(params), jnp.zeros((TOKENS, width))


@functools.cache
def program(host: str, times: int = 1) -> Program:
    return trace(step, jax.eval_shape(lambda: shapes(times)), donate_argnums=(0, 1), host=host)


@functools.cache
def planned(host: str, topology: str, mesh: str) -> Plan:
    """Plan the program. For TPUs it is wide enough for the host's link to matter."""
    times = 1 if topology.startswith("cpu") else 16
    return make_plan(program(host, times), Options(topology=topology, mesh=mesh)).plan


HELD = {f"state.1.{moment}.layers.{w}" for moment in ("mu", "nu") for w in ("up", "down")}


def local_bytes(plan: Plan) -> int:
    """Return the bytes of one device's part of the layers' optimizer state."""
    return sum(4 * math.prod(plan.arguments[name].local_shape(plan.shapes[name], plan.mesh)) for name in HELD)


def test_a_device_holds_no_state_of_layers() -> None:
    plain, away = (planned(host, "v5e:2x2", "data=4") for host in ("none", "optimizer"))
    assert set(away.host) == HELD and not plain.host
    assert away.prediction.host_bytes == local_bytes(away) and not plain.prediction.host_bytes
    assert plain.prediction.peak_bytes - away.prediction.peak_bytes > 0.9 * local_bytes(plain)
    assert "parameters" in away.prediction.memory
    assert f"optimizer state on the hosts, {format_bytes(local_bytes(away))} for each device" in away.words


def test_every_byte_goes_both_ways_and_nothing_hides_it() -> None:
    plain, away = (planned(host, "v5e:2x2", "data=4") for host in ("none", "optimizer"))
    both_ways = float(Compute(Topology.parse("v5e:2x2")).host_seconds(2 * local_bytes(away)))
    more = away.prediction.step_time_s - plain.prediction.step_time_s
    assert 0.8 * both_ways < more <= both_ways  # the update itself overlaps with the transfers


@pytest.mark.few(1)
@pytest.mark.parametrize("given", ["the step", "the program"])
def test_a_plan_with_state_on_the_host_computes_what_the_plain_step_does(given: str, tmp_path: Path) -> None:
    plan = planned("optimizer", "cpu:8", "data=4,model=2")
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    fn = step if given == "the step" else program("optimizer").fn
    ours, plain = load_plan(tmp_path / "plan.json").jit(fn, donate_argnums=(0, 1)), jax.jit(step)
    *found, x = arguments()
    *wanted, _ = arguments()
    for _ in range(3):
        *found, value = ours(*found, x)
        *wanted, same = plain(*wanted, x)
        assert float(value) == pytest.approx(float(same), rel=1e-5)
    kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(found)]
    assert kinds == ["pinned_host" if name in HELD else "device" for name in list(plan.results)[:-1]]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        largest = max(float(np.abs(b).max()), 1e-30)
        assert float(np.abs(np.asarray(a) - np.asarray(b)).max()) <= 1e-5 * largest


def test_arrays_are_asked_for_where_they_wait() -> None:
    plan = planned("optimizer", "cpu:8", "data=4,model=2")
    kinds = dict(zip(plan.arguments, (s.memory_kind for s in plan.in_shardings), strict=True))
    assert {name for name, kind in kinds.items() if kind == "pinned_host"} == HELD


def test_a_plan_file_without_state_on_the_host_says_nothing_of_it(tmp_path: Path) -> None:
    plan = planned("none", "cpu:8", "data=4,model=2")
    plan.save(tmp_path / "plan.json")
    assert '"host"' not in (tmp_path / "plan.json").read_text()


def test_devices_without_memory_of_a_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("optimizer", "cpu:8", "data=4,model=2")

    class Device:
        device_kind = "toy"

        def addressable_memories(self) -> list[Any]:
            return []

    check = planned_lowering.check_host_memory
    monkeypatch.setattr(planned_lowering, "check_host_memory", lambda device: check(Device()))
    with pytest.raises(UserError, match="toy devices have no memory there .* and without `--host`"):
        plan.jit(step)(*arguments())


def test_another_step_is_refused() -> None:
    plan = planned("optimizer", "cpu:8", "data=4,model=2")

    def other(params: Any, state: Any, x: Any) -> Any:
        params, state, value = step(params, state, x)
        return params, jax.tree.map(lambda s: s * jnp.sum(s).astype(s.dtype), state), value

    with pytest.raises(UserError, match="is not the step that was planned; plan it again"):
        plan.jit(other)(*arguments())


def test_what_a_step_itself_has_on_the_host_is_found() -> None:
    """Plan a step that offloads its own state: the plan stores the state's arguments on the host, as the step does."""
    made = program("optimizer")
    own = trace(made.fn, made.args, donate_argnums=(0, 1), arg_names=("params", "state", "x"))
    plan = make_plan(own, Options(topology="cpu:8", mesh="data=4,model=2")).plan
    assert own.on_host == "none" and "on_host" not in plan.provenance and set(plan.host) == HELD
    found, wanted = plan.jit(made.fn)(*arguments()), jax.jit(step)(*arguments())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def test_an_artifact_cannot_say_where_state_waits() -> None:
    with pytest.raises(UserError, match="`step` keeps 4 tensors in the hosts' memory, .* plan it without `--host`"):
        jax_export(planned("optimizer", "cpu:8", "data=4,model=2"), program("optimizer"))


def test_an_export_says_what_it_leaves_on_the_devices() -> None:
    text = export_plan(planned("optimizer", "cpu:8", "data=4,model=2"), "jax")
    assert "the 4 tensors that the plan has in the hosts' memory; they stay on the devices." in text


def test_the_step_laid_out_in_time_waits_for_the_hosts() -> None:
    plan = planned("optimizer", "v5e:2x2", "data=4")
    assert plan.timeline is not None
    assert plan.timeline.end_s == pytest.approx(plan.prediction.step_time_s, rel=1e-6)
    waits = sum(span.seconds for span in plan.timeline.spans if span.name == WAITS_FOR_HOST)
    both_ways = float(Compute(Topology.parse("v5e:2x2")).host_seconds(2 * local_bytes(plan)))
    assert 0.8 * both_ways < waits < both_ways
    said = [line for line in step_limits(plan) if "the hosts' memory" in line]
    assert len(said) == 1 and format_seconds(waits) in said[0]
    assert not any("hosts" in line for line in step_limits(planned("none", "v5e:2x2", "data=4")))


def test_a_compiler_that_counts_the_hosts_memory_is_forbidden_to() -> None:
    """Warn and name the flag: the TPU compiler counts host memory too, so it would see more than the device's 15.75
    GiB.
    """
    flag = "--xla_jf_rematerialization_percent_shared_memory_limit"
    wide = program("optimizer", 288)
    plan = make_plan(wide, Options(topology="v5e:2x4", mesh="data=8")).plan
    assert plan.prediction.fits and plan.prediction.host_bytes + plan.prediction.peak_bytes > 15.75 * 2**30
    (said,) = (line for line in plan.warnings if flag in line)
    assert said.endswith(f"plan and run with `--xla-flags={flag}=150`.")
    told = make_plan(wide, Options(topology="v5e:2x4", mesh="data=8", xla_flags=f"{flag}=150")).plan
    assert not any(f"-flags={flag}" in line for line in told.warnings)
    assert not any(flag in line for line in planned("optimizer", "v5e:2x2", "data=4").warnings)
