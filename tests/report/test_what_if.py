"""Alternatives: each one for which a plan has a time, with the plan's own figures."""

import dataclasses

import pytest

from autoshard.planning import MeshTried, Plan
from autoshard.report.terminal.explanation_report import alternatives, chosen_per_element


TRIED = [
    {"choices": {"batch": 64, "remat": "full"}, "verdict": "", "step_time_s": 3.22, "peak_bytes": 44, "bound_s": 3.0,
     "frontier": True, "seconds_per_element": 0.05},
    {"choices": {"batch": 32, "remat": "none"}, "verdict": "20.0% slower", "step_time_s": 1.92, "peak_bytes": 60,
     "bound_s": 1.8, "frontier": False, "seconds_per_element": 0.06},
    {"choices": {"batch": 96, "remat": None}, "verdict": "not planned: does not fit", "step_time_s": None,
     "peak_bytes": None, "bound_s": 1.0, "frontier": False, "foreseen": {"step_time_s": 5.0, "peak_bytes": 99}},
    {"choices": {"batch": 99}, "verdict": "not planned", "step_time_s": None, "peak_bytes": None, "bound_s": None,
     "frontier": False},
]  # fmt: skip


def chosen(plan: Plan) -> Plan:
    """Return the plan with rows of other recipes and meshes."""
    meshes = (
        MeshTried("data=32,model=8", "", 3.22, 3.1, "chosen"),
        MeshTried("data=256", "", None, 3.9, "no plan of it is faster"),
    )
    return dataclasses.replace(plan, meshes=meshes, provenance={"recipe": {"tried": TRIED}})


def test_every_alternative_with_a_time_is_there_and_no_other(plan: Plan):
    rows = alternatives(chosen(plan))
    assert [(row["group"], row["name"]) for row in rows if row["group"] != "baselines"] == [
        ("recipes", "batch 32, remat none"), ("recipes", "batch 96"), ("meshes", "data=256"),
    ]  # fmt: skip
    assert {row["name"]: (row["step_s"], row["peak_bytes"]) for row in rows if row["group"] == "baselines"} == {
        name: (each.step_time_s, each.peak_bytes) for name, each in plan.baselines.items()
    }
    planned, foreseen, mesh = rows[:3]
    assert (planned["step_s"], planned["peak_bytes"], planned["per_element_s"]) == (1.92, 60, 0.06)
    assert (foreseen["step_s"], foreseen["peak_bytes"], foreseen["foreseen"]) == (5.0, 99, True)
    assert (mesh["step_s"], mesh["bound_s"], mesh["peak_bytes"]) == (None, 3.9, None)
    assert chosen_per_element(chosen(plan)) == 0.05 and chosen_per_element(plan) is None


def test_a_plan_without_any_has_none(plan: Plan):
    assert alternatives(dataclasses.replace(plan, baselines={})) == []


@pytest.mark.parametrize("step", [float("inf"), float("nan")])
def test_a_time_that_is_none_is_left_out(plan: Plan, step: float):
    never = dataclasses.replace(plan.prediction, step_time_s=step)
    assert alternatives(dataclasses.replace(plan, baselines={"never": never})) == []
