"""The fit recovers figures of synthetic machines, changes only figures with observations, and ignores their order."""

import dataclasses
import random

import pytest

from autoshard.cost import (
    Calibration,
    Database,
    Observation,
    Topology,
    compiler_version,
    fit,
    fit_record,
    hidden_shares,
    learned_fit,
    load_calibration,
    recorded_calibration,
)
from tests.cost.observed import bill, observation


CPU = load_calibration("cpu")
STEPS = [
    bill(matmul=40, traffic=1e7),
    bill(matmul=5, traffic=2e8),
    bill(matmul=60, traffic=3e8, reduced=4e6, launches=10),
    bill(traffic=4e8, reduced=1e3, launches=200),
    bill(matmul=200, traffic=5e7, reduced=2e7, launches=4),
    bill(matmul=10, reduced=3e7, launches=8),
]
TRUE = {"matmul_efficiency": 0.5, "memory_efficiency": 0.45, "hop_s": 4e-5, "shared_memory_traffic": 1.4}


def seen_on(machine: Calibration, noise: float = 0.0) -> list[Observation]:
    draw = random.Random(0)
    return [observation(b, b.seconds(machine) * (1 + draw.gauss(0, noise)), f"{k}") for k, b in enumerate(STEPS)]


def test_the_figures_of_a_machine_are_found():
    machine = dataclasses.replace(CPU, **TRUE)
    fitted = fit(CPU, "cpu", seen_on(machine))
    assert fitted.residual < 0.05 < fitted.residual_before and fitted.observations == len(STEPS)
    for each in fitted.figures:
        if each.figure in TRUE:
            assert each.value == pytest.approx(TRUE[each.figure], rel=0.3) and each.shipped == getattr(CPU, each.figure)
    assert {each.figure for each in fitted.figures} >= set(TRUE)
    new = bill(matmul=30, traffic=1e8, reduced=1e7, launches=5)
    assert new.seconds(fitted.calibration) == pytest.approx(new.seconds(machine), rel=0.05)


def test_one_wild_observation_does_not_pull_far():
    machine = dataclasses.replace(CPU, **TRUE)
    wild = observation(STEPS[0], 30 * STEPS[0].seconds(machine), "wild")
    fitted = fit(CPU, "cpu", [*seen_on(machine, noise=0.02), wild])
    new = bill(matmul=30, traffic=1e8, reduced=1e7, launches=5)
    assert new.seconds(fitted.calibration) == pytest.approx(new.seconds(machine), rel=0.15)


def test_only_chosen_values_move():
    one = bill(traffic=4e8)
    fitted = fit(CPU, "cpu", [observation(one, 3 * one.seconds(CPU))])
    (moved,) = fitted.figures
    assert moved.figure == "memory_efficiency" and CPU.memory_efficiency / 3 < moved.value < CPU.memory_efficiency
    unmoved = {name: value for name, value in CPU.values().items() if name != "memory_efficiency"}
    assert unmoved.items() <= fitted.calibration.values().items()


def test_what_is_fixed_does_not_move():
    fitted = fit(CPU, "cpu", seen_on(dataclasses.replace(CPU, **TRUE)), fixed={"memory_efficiency"})
    assert fitted.calibration.memory_efficiency == CPU.memory_efficiency
    assert "memory_efficiency" not in {each.figure for each in fitted.figures}


def test_nothing_seen_changes_nothing():
    fitted = fit(CPU, "cpu", [])
    assert fitted.calibration == CPU and fitted.calibration.hash() == CPU.hash() and not fitted.figures


def test_order_does_not_matter():
    seen = seen_on(dataclasses.replace(CPU, **TRUE), noise=0.1)
    assert fit(CPU, "cpu", seen) == fit(CPU, "cpu", seen[::-1])


def test_seeing_one_thing_often_tells_no_more_than_once():
    one = seen_on(dataclasses.replace(CPU, **TRUE))
    again = [dataclasses.replace(one[0], seen={"seconds": one[0].seen["seconds"] * (1 + k * 1e-9)}) for k in range(20)]
    often = fit(CPU, "cpu", [*one, *again])
    for name, value in fit(CPU, "cpu", one).calibration.values().items():
        assert often.calibration.values()[name] == pytest.approx(value, rel=1e-4)


def test_a_schedule_tells_overlap_and_nothing_else():
    shipped = load_calibration("v5e")
    one = bill(matmul=1e4, reduced=1e6, launches=4, topology="v5e:2x4")
    seen = [observation(one, 1.0, judge="compile", seen={"hidden_share": 0.8, "seconds": 1e-9})]
    fitted = fit(shipped, "tpu", seen)
    (moved,) = fitted.figures
    assert moved.figure == "reduction_overlap" and 0.4 < moved.value <= 0.8
    assert fitted.residual < fitted.residual_before == pytest.approx(0.8)


def test_a_schedule_tells_gathers_from_sums():
    shipped = load_calibration("v5e")
    one = bill(matmul=1e4, reduced=1e6, gathered=1e6, launches=4, topology="v5e:2x4")
    hidden = {"gathers": 0.0, "sums": 0.4, "network": 0.3}
    seen = [observation(one, 1.0, judge="compile", seen={"hidden_share": 0.2, "hidden": hidden})]
    moved = {each.figure: each.value for each in fit(shipped, "tpu", seen).figures}
    assert set(moved) == {"gather_overlap", "reduction_overlap"}
    assert moved["gather_overlap"] < 0.5 * shipped.gather_overlap and 0.2 < moved["reduction_overlap"] <= 0.4


def test_a_class_that_hardly_sends_tells_nothing():
    assert hidden_shares({"gathers": (9.0, 3.0), "sums": (0.5, 0.0)}) == {"gathers": pytest.approx(2 / 3)}
    assert hidden_shares({"sums": (0.0, 0.0)}) == {}
    # Collectives that queue behind others are exposed for longer than they run.
    assert hidden_shares({"others": (1.0, 2.0)}) == {"others": 0.0}


def test_what_the_database_has_seen_is_learned(tmp_path, monkeypatch: pytest.MonkeyPatch):
    topology = Topology.parse("cpu:8")
    monkeypatch.setenv("AUTOSHARD_DATA_DIR", str(tmp_path / "data"))
    assert learned_fit(topology).calibration == CPU and not list(tmp_path.iterdir())
    database = Database.of_user()
    seen = seen_on(dataclasses.replace(CPU, **TRUE))
    database.add([dataclasses.replace(one, compiler=compiler_version(topology)) for one in seen])
    fitted = learned_fit(topology)
    assert fitted.calibration.memory_efficiency == pytest.approx(0.45, rel=0.15) and fitted.observations == len(seen)
    assert learned_fit(Topology.parse("cpu:4")).calibration == CPU, "another topology"
    assert recorded_calibration("cpu", fit_record(fitted)) == fitted.calibration
    assert recorded_calibration("cpu", None) == CPU


def test_the_users_own_figures_win(tmp_path, monkeypatch: pytest.MonkeyPatch):
    from autoshard.cost import save_calibration

    topology = Topology.parse("cpu:8")
    monkeypatch.setenv("AUTOSHARD_DATA_DIR", str(tmp_path))
    seen = seen_on(dataclasses.replace(CPU, **TRUE))
    Database.of_user().add([dataclasses.replace(one, compiler=compiler_version(topology)) for one in seen])
    mine = tmp_path / "mine.json"
    save_calibration(mine, "cpu", {"memory_efficiency": 0.7}, "mine", "2026-01-01")
    monkeypatch.setenv("AUTOSHARD_CALIBRATION", str(mine))
    fitted = learned_fit(topology)
    assert fitted.calibration.memory_efficiency == 0.7
    assert fitted.calibration.matmul_efficiency != CPU.matmul_efficiency
