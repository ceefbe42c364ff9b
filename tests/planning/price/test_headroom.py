"""Charge for nearly full memory, and its effect on plans."""

import functools
import json
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from autoshard.cost import Topology
from autoshard.planning import Options, Plan, make_plan
from autoshard.planning.price.device_memory import FORWARD, load_headroom, lower_memory_targets, tight_seconds
from autoshard.program import Program, trace


def devices(topology: str, eager: bool = False) -> Any:
    """Return what the charge reads of a model."""
    return SimpleNamespace(mesh=SimpleNamespace(topology=Topology.parse(topology)), eager=eager)


V5E = devices("v5e:2x4")
USABLE = V5E.mesh.topology.usable_bytes
ON: dict[str, Any] = {"topology": "v5e:2x4", "mesh": "data=8", "time_limit": 60}


def charged(share: float, compute_s: float = 1.0, hidden_s: float = 0.0) -> float:
    """Return the seconds that are charged at a predicted share of the chip's memory."""
    return tight_seconds(V5E, int(share * USABLE), compute_s, hidden_s)


def test_room_to_spare_costs_nothing():
    assert charged(0.0, 1.0, 1.0) == charged(0.5, 1.0, 1.0) == charged(0.8, 1.0, 1.0) == 0.0


def test_the_memory_of_cpus_has_no_charge():
    cpu = devices("cpu:8")
    assert tight_seconds(cpu, cpu.mesh.topology.usable_bytes, 1.0, 1.0) == 0.0
    assert lower_memory_targets(cpu) == ()


def test_frameworks_that_run_op_by_op_are_charged_the_chance_to_run_out():
    gpu = devices("h100:8", eager=True)
    usable = gpu.mesh.topology.usable_bytes
    shares = [0.80, 0.85, 0.90, 0.95, 1.0, 1.2]
    charges = [tight_seconds(gpu, int(share * usable), 1.0, 1.0) for share in shares]
    assert charges == sorted(charges)
    assert charges[0] == pytest.approx(0.0, abs=1e-4) and charges[-1] == pytest.approx(FORWARD, rel=1e-3)
    even, roomy = lower_memory_targets(gpu)
    assert tight_seconds(gpu, even, 1.0, 1.0) == pytest.approx(FORWARD / 2, rel=0.02)
    assert tight_seconds(gpu, roomy, 1.0, 1.0) == pytest.approx(0.023 * FORWARD, rel=0.05)


def test_the_compiler_for_gpus_recomputes_earlier_than_that_for_tpus():
    gpu = devices("h100:8")
    usable = gpu.mesh.topology.usable_bytes
    charges = [tight_seconds(gpu, int(share * usable), 1.0, 0.0) for share in (0.5, 0.7, 0.85, 0.92, 1.2)]
    assert charges[0] < 1e-6 and charges == sorted(charges) and charges[-1] == pytest.approx(FORWARD)
    # XLA recomputed 8 % of the step of a decoder at 85 % of the memory, and 14 % at 92 %.
    assert 0.05 <= charges[2] <= 0.15 and 0.1 <= charges[3] <= 0.24


def test_the_charge_grows_with_the_peak_up_to_the_forward_pass():
    charges = [charged(share / 100) for share in range(80, 140)]
    assert charges == pytest.approx(sorted(charges), rel=1e-9)
    assert 0 <= charges[0] < 1e-3 < charged(0.95) < charged(0.97) < charged(1.0) < FORWARD
    assert charges[-1] == pytest.approx(FORWARD)


def test_it_is_the_mean_over_the_errors_of_our_memory_model():
    headroom = load_headroom("TPU")
    errors = NormalDist(headroom.error_mean, headroom.error_deviation).samples(200_000, seed=1)
    begins = headroom.recompute_from
    assert begins is not None
    for share in (0.92, 0.96, 1.0):
        needed = [share + error for error in errors]
        again = [min(1.0, max(0.0, (n - begins) / (1 - begins))) for n in needed]
        assert charged(share) == pytest.approx(FORWARD * sum(again) / len(again), rel=0.05)
        chance = sum(n > begins for n in needed) / len(needed)
        assert charged(share, 0.0, 1.0) == pytest.approx(headroom.unhidden * chance, rel=0.05)


def test_the_constants_are_those_of_the_data():
    from experiments.fidelity.headroom import CONSTANTS, RESULTS, constants

    assert constants(json.loads((RESULTS / "headroom.json").read_text())) == json.loads(CONSTANTS.read_text())


@functools.cache
def layers() -> Program:
    """Trace matmuls that are fastest with whole weights, and a little slower with weights gathered one by one."""

    def forward(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jax.nn.relu(x @ w)
        return x

    half = [jax.ShapeDtypeStruct((2048, 2048), jax.numpy.bfloat16)] * 6
    return trace(forward, (half, jax.ShapeDtypeStruct((8 * 512, 2048), jax.numpy.bfloat16)), name="layers")


def plan_with(memory: int, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Plan for a chip with so many bytes of memory and a memory limit that does not bind."""
    with monkeypatch.context() as patch:
        patch.setattr(Topology, "usable_bytes", property(lambda self: memory))
        return make_plan(layers(), Options(**ON, memory_limit=1 << 30)).plan


def blind(memory: int, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Plan without the charge, by step time alone."""
    with monkeypatch.context() as patch:
        patch.setattr("autoshard.planning.solve.weight_search.tight_seconds", lambda *_: 0.0)
        return plan_with(memory, patch)


def test_a_plan_that_needs_less_is_chosen_where_full_memory_costs_more(monkeypatch: pytest.MonkeyPatch):
    memory = blind(1 << 30, monkeypatch).prediction.peak_bytes
    full, plan = blind(memory, monkeypatch), plan_with(memory, monkeypatch)
    assert full.prediction.peak_bytes == memory > plan.prediction.peak_bytes
    assert full.prediction.step_time_s <= plan.prediction.step_time_s
    assert plan.prediction.expected_s < full.prediction.expected_s
    assert plan.provenance["bound_s"] <= plan.prediction.step_time_s * (1 + 1e-9)


def test_a_full_plan_says_what_it_is_charged(monkeypatch: pytest.MonkeyPatch):
    full = blind(blind(1 << 30, monkeypatch).prediction.peak_bytes, monkeypatch)
    (line,) = [line for line in full.warnings if line.startswith("memory is tight: ")]
    assert line.endswith(f"({full.prediction.tight_s / full.prediction.step_time_s:.1%}) more a step.")


def test_nothing_changes_with_room_to_spare(monkeypatch: pytest.MonkeyPatch):
    plan = plan_with(1 << 30, monkeypatch)
    assert plan.prediction.tight_s == 0.0 and plan.prediction.expected_s == plan.prediction.step_time_s
    assert blind(1 << 30, monkeypatch) == plan
    assert not any(line.startswith("memory is tight") for line in plan.warnings)


def test_peaks_to_look_below_are_where_the_charge_falls():
    even, roomy = lower_memory_targets(V5E)
    assert roomy < even < USABLE
    assert tight_seconds(V5E, roomy, 1.0, 1.0) < 0.1 * tight_seconds(V5E, even, 1.0, 1.0)
