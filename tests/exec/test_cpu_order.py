"""The code that compares predicted with measured order, and a slice of its table.

`python experiments/fidelity/cpu_order.py` makes the whole table.
"""

import itertools as it
import json
import sys

import pytest

from autoshard.exec.run.planned_steps import PlannedStep, first_arguments, quartiles, run_in_turn
from autoshard.planning import Options, make_plan
from experiments.fidelity import cpu_order
from experiments.lib import harness
from experiments.lib.programs.jax_case import infer_program, train_program
from experiments.lib.programs.jax_programs import CASES
from experiments.lib.quiet_machine import held


def _plans(predicted: list[float], measured: list[float], spread: float = 0.0) -> list:
    return [(p, (m - spread, m, m + spread)) for p, m in zip(predicted, measured, strict=True)]


@pytest.mark.parametrize(
    ("predicted", "measured", "spread", "tau"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 0, 1.0),
        ([1, 2, 3, 4], [40, 30, 20, 10], 0, -1.0),
        ([1, 2, 4, 3], [10, 20, 30, 40], 0, 4 / 6),
        # 10 and 11 count as equal; the other two pairs are in order.
        ([2, 1, 3], [10, 11, 30], 1, 1.0),
        # Equal predictions of different times agree with neither order.
        ([1, 1, 3], [10, 20, 30], 0, 2 / 3),
        ([1, 2], [10, 11], 1, None),
    ],
)
def test_tau_of_known_orders(predicted: list[float], measured: list[float], spread: float, tau: float | None):
    found = cpu_order.kendall(_plans(predicted, measured, spread))
    assert found == (None if tau is None else pytest.approx(tau))


def test_tau_is_scipys_where_nothing_is_tied():
    stats = pytest.importorskip("scipy.stats")
    for order in it.permutations(range(5)):
        plans = _plans(list(order), [10.0 * i for i in range(5)])
        assert cpu_order.kendall(plans) == pytest.approx(stats.kendalltau(range(5), order).statistic)


def test_plans_take_turns():
    program = infer_program("mlp", CASES["mlp"]())
    made = make_plan(program, Options(topology="cpu:8", mesh={"data": 8}))
    ran: list[str] = []

    class Noted(PlannedStep):
        name = ""

        def run(self):
            ran.append(self.name)
            return super().run()

    arguments = first_arguments(program, 0)
    steps = {}
    for name, plan in {"plan": made.plan, "data_parallel*": made.baseline_plans["data_parallel"]}.items():
        steps[name] = Noted(program, plan, arguments)
        steps[name].name = name[0]
    times = run_in_turn(steps, rounds=3, warmup=1)
    assert "".join(ran) == "pd" + "pd" + "dp" + "pd"
    assert {name: len(each) for name, each in times.items()} == {"plan": 3, "data_parallel*": 3}
    assert len(run_in_turn(steps, rounds=9, warmup=0, seconds=0.0)["plan"]) == 3
    low, middle, high = quartiles(times["plan"])
    assert 0 < low <= middle <= high


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "mode"), [("mlp", "train"), ("moe einsum", "infer")])
def test_a_row_has_predicted_and_measured_times(name: str, mode: str):
    wanted = {"plan", "data_parallel*", "fsdp*"}
    case = CASES[name]()
    program = infer_program(name, case) if mode == "infer" else train_program(name, case, mode)
    row, bills = cpu_order.row_of(program, {"data": 4, "model": 2}, wanted=wanted, rounds=3)
    labels = [label for own, plan in row["plans"].items() for label in (own, *plan["also"])]
    assert sorted(labels) == sorted(wanted)
    assert set(bills) == set(row["plans"])
    for plan in row["plans"].values():
        low, middle, high = plan["measured_s"]
        assert plan["rounds"] == 3 and 0 < low <= middle <= high and plan["predicted_s"] > 0
    assert len(cpu_order.predicted(row)) == len(row["plans"])
    json.dumps([row, bills])


def test_rows_that_are_there_are_not_run_again(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys):
    plan = {"predicted_s": 0.010, "measured_s": (0.011, 0.012, 0.013), "rounds": 5, "also": ["fsdp*"]}
    other = {"predicted_s": None, "measured_s": (0.021, 0.022, 0.023), "rounds": 5, "also": []}
    row = {"plans": {"plan": plan, "fsdp": other}, "cores": 2, "date": "2026-01-02", "jax": "0"}
    out = tmp_path / "cpu_order.json"
    out.write_text(json.dumps(dict.fromkeys(cpu_order.ROWS[1:], row)))
    started: list[list[str]] = []

    class Done:
        returncode = 0
        stdout = json.dumps(row)

    monkeypatch.setattr(harness.subprocess, "run", lambda command, **_: started.append(command) or Done())
    monkeypatch.setattr(harness, "checked_out", lambda: "abc")
    monkeypatch.setattr(sys, "argv", ["cpu_order.py", "--out", str(tmp_path)])
    assert cpu_order.main() == 0
    (command,) = started
    assert command[command.index("--inside") + 1 :] == [cpu_order.ROWS[0]]
    assert json.loads(out.read_text())[cpu_order.ROWS[0]]["code"] == "abc"
    text = out.with_suffix(".md").read_text()
    assert text == capsys.readouterr().out.rstrip("\n") + "\n"
    assert "| plan = fsdp* | 10.0 | 12.0 | 11.0 to 13.0 |" in text and "| fsdp | - | 22.0 |" in text


def test_a_command_runs_during_steps():
    with held("cat"):
        pass
    with held(None):
        pass
    with pytest.raises(SystemExit, match="'true' ended or did not copy"), held("true"):
        pass
