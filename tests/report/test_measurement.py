"""A measurement on a terminal: medians and spread, collectives' times, and values that were not available."""

import dataclasses
import io
from typing import Any

from rich.console import Console

from autoshard.exec.run.check_inputs import BEYOND, ENDS, UNDEFINED
from autoshard.planning import Plan
from autoshard.planning.record.plan_parts import Unsure
from autoshard.report import measurement_report


FIGURES: dict[str, Any] = {
    "step_time_s": 2.0,
    "step_times_s": [1.8, 2.0, 2.2],
    "spread": 0.1,
    "device": "8 x cpu",
    "check_skipped": "",
    "collectives": {
        "wire_bytes": {"data": {"predicted": 1024, "compiled": 2048}},
        "counts": {"all-gather": {"predicted": 1, "compiled": 2}},
        "times": [
            {"kind": "all-to-all", "axes": ["model"], "seconds": 0.08, "count": 64},
            {"kind": "all-reduce", "axes": ["data"], "seconds": 0.5, "count": 1},
        ],
    },
    "profiler": "",
}


def shown(plan: Plan, **changes: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(measurement_report(plan, FIGURES | changes))
    return out.getvalue()


def row(text: str, beginning: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(beginning))
    return line.removeprefix(beginning).split("  ")


def test_times_stand_with_the_prediction(plan: Plan) -> None:
    text = shown(plan)
    assert "10%" in row(text, "between its quartiles")[-1]
    assert [cell.strip() for cell in row(text, "all-to-all over model (time, waiting included)") if cell] == [
        "40 ms",
        "80 ms",
    ]
    assert [cell.strip() for cell in row(text, "all-reduce over data (time, waiting included)") if cell.strip()] == [
        "-",
        "500 ms",
    ]
    assert "between its quartiles" not in shown(plan, step_times_s=[2.0])


def test_what_is_missing_is_reported(plan: Plan) -> None:
    text = shown(plan, profiler="the profiler did not start: busy", check_skipped="nothing was compared")
    assert "No time of each collective: the profiler did not start: busy" in text and "nothing was compared" in text


def test_a_difference_that_rounding_could_hide_is_undecided(plan: Plan) -> None:
    check = {"max_rel_diff": 0.5, "tolerance": 1e-5, "passed": True, "worst": "mu", "worst_rel_diff": 0.5}
    check |= {"noise": [], "floor_note": "", "edges": {}}
    coarse = shown(plan, **check, worst_allowed=0.6)
    assert "UNDECIDED in this precision: the largest difference is 5.0e-01" in coarse
    assert "check the step in float32" in " ".join(coarse.split()) and "AGREES" not in coarse
    fine = shown(plan, **check | {"worst_rel_diff": 1e-3}, worst_allowed=2e-3)
    assert "AGREES with the unplanned run" in fine and "UNDECIDED" not in fine
    exact = shown(plan, **check, worst_allowed=0.6, float64=1e-12)
    assert "AGREES with the unplanned run" in exact and "in float64 the largest difference is 1.0e-12" in exact
    assert "DIFFERS with" in shown(plan, **check | {"passed": False}, worst_allowed=0.2)


def test_edge_cases_are_told_in_words(plan: Plan) -> None:
    check = {"max_rel_diff": 1e-6, "tolerance": 1e-5, "passed": True, "worst": "mu", "worst_rel_diff": 1e-6}
    check |= {"noise": [], "floor_note": "", "worst_allowed": 1e-5}
    edges = {ENDS: check, BEYOND: check | {"passed": False}, UNDEFINED: None}
    text = " ".join(shown(plan, **check, edges=edges).split())
    assert "AGREES with the unplanned run also for inputs that have first and last indices and equal values" in text
    assert "DIFFERS with the unplanned run also for inputs that have indices out of range: by 1.0e-06 at mu" in text
    assert "Not compared for inputs that have NaN: collectives of CPUs drop it" in text


def test_rounding_and_faults_are_told_apart_in_float64(plan: Plan) -> None:
    check = {
        "max_rel_diff": 1.2e-3,
        "tolerance": 1e-5,
        "worst": "mu",
        "worst_rel_diff": 1.2e-3,
        "noise": [],
        "edges": {},
    }
    check |= {"floor_note": "the program has no batch", "worst_allowed": 1e-5}
    rounding = " ".join(shown(plan, **check, passed=True, rounding=True, float64=1e-13).split())
    assert "AGREES with the unplanned run" in rounding
    assert "1.2e-03 of a tensor's maximum (at mu); both agree to 1e-13 in float64, so it is rounding" in rounding
    fault = " ".join(shown(plan, **check, passed=False, rounding=False, float64=1.1e-3).split())
    assert "DIFFERS" in fault and "in float64 the largest difference is 1.1e-03" in fault


def test_a_measured_time_outside_of_the_stated_factor_is_told(plan: Plan) -> None:
    unsure = dataclasses.replace(plan, unsure=(Unsure("convolutions", 0.9, 0.5, 1.4, 1.2, 7),))
    predicted = plan.prediction.step_time_s
    told = "outside of the factor 1.4 that the plan states for convolutions (90% of the predicted step)"
    assert told in " ".join(shown(unsure, step_time_s=predicted * 1.5).split())
    assert told not in " ".join(shown(unsure, step_time_s=predicted * 1.3).split())
    assert "outside" not in shown(plan, step_time_s=predicted * 9)
