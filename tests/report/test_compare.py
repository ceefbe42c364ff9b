"""Plans in comparison: differences below the estimates' accuracy are marked."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autoshard.cli import main
from autoshard.cli.outputs import print_rich
from autoshard.exec.hlo.schedule_estimate import estimator_error
from autoshard.planning import Plan
from autoshard.report import ComparisonRow, comparison_figures, comparison_report


def compiled(seconds: float, vector: float = 0.0) -> dict[str, Any]:
    return {
        "step_time_s": {"predicted": 1.0, "estimated": seconds, "error": estimator_error().within},
        "time": {"by_kind": {"matmul": seconds, "vector": vector}},
        "peak_bytes": {"compiled": 1 << 30, "reserved": 3 << 29},
        "verdict": "fits",
    }


def shown(plan: Plan, rows: list[ComparisonRow]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(comparison_report(plan, rows))
    return out.getvalue()


def test_what_differs_by_less_than_the_error_is_undecided(plan: Plan) -> None:
    near = 1.0 - 0.5 * estimator_error().pairs
    rows = [
        ComparisonRow("plan", plan.prediction, compiled(1.0)),
        ComparisonRow("fsdp*", plan.prediction, compiled(near)),
        ComparisonRow("data_parallel*", plan.prediction, compiled(2.0)),
        ComparisonRow("fsdp", None, failed="it does not compile"),
    ]
    figures = comparison_figures(rows)["plans"]
    assert figures["plan"]["undecided"] == ["fsdp*"] and figures["fsdp*"]["undecided"] == ["plan"]
    assert figures["data_parallel*"]["undecided"] == figures["fsdp"]["undecided"] == []
    error = f"{estimator_error().pairs:.0%}"
    said = f"undecided among fsdp*, plan: the ratio of two estimates from schedules may be {error} wrong"
    assert said in shown(plan, rows)
    assert "reserved" in shown(plan, rows) and "1.50 GiB" in shown(plan, rows)


def test_time_that_was_never_measured_widens_the_error_by_what_two_plans_do_not_share(plan: Plan) -> None:
    far = 1.0 - 1.2 * estimator_error().pairs
    for vector, close in ((0.0, []), (0.3, ["fsdp*"])):
        rows = [
            ComparisonRow("plan", plan.prediction, compiled(1.0, 0.1 + vector)),
            ComparisonRow("fsdp*", plan.prediction, compiled(far, 0.1)),
        ]
        assert comparison_figures(rows)["plans"]["plan"]["undecided"] == close


def test_predictions_within_the_error_of_ratios_are_undecided(plan: Plan) -> None:
    slower = dataclasses.replace(plan.prediction, step_time_s=1.05 * plan.prediction.step_time_s, fits=True)
    for error, close in ((0.09, ["fsdp*"]), (0.01, []), (None, [])):
        rows = [
            ComparisonRow("plan", dataclasses.replace(plan.prediction, fits=True), ratio_error=error),
            ComparisonRow("fsdp*", slower, ratio_error=error),
        ]
        assert comparison_figures(rows)["plans"]["plan"]["undecided"] == close
        said = "undecided among plan, fsdp*: the ratio of two predictions may be 9% wrong"
        assert (said in shown(plan, rows)) is bool(close)


def test_a_measurement_decides(plan: Plan) -> None:
    rows = [ComparisonRow(name, plan.prediction, compiled(1.0), {"step_time_s": 1.0}) for name in ("plan", "fsdp*")]
    assert "undecided" not in shown(plan, rows)


def test_a_table_in_a_file_or_pipe_is_whole(plan: Plan) -> None:
    rows = [ComparisonRow(name, plan.prediction, compiled(1.0)) for name in ("plan", "tensor_parallel_sp*")]
    out = io.StringIO()
    print_rich(comparison_report(plan, rows), out, whole=True)
    assert "\N{HORIZONTAL ELLIPSIS}" not in out.getvalue()
    for word in ("tensor_parallel_sp*", "predicted", "reserved", "1.50 GiB"):
        assert word in out.getvalue()


OPEN = """
import jax, jax.numpy as jnp

choices = {"parts": (1, 4)}


def program(parts):
    def step(w, x):
        return sum(jnp.tanh(x[part::parts] @ w).sum() for part in range(parts))

    return step, (jax.ShapeDtypeStruct((64, 256), "float32"), jax.ShapeDtypeStruct((512, 64), "float32"))
"""


def test_a_comparison_chooses_the_recipe_as_a_plan_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "open.py").write_text(OPEN)
    figures = []
    for command in ("plan", "compare"):
        assert main([command, str(tmp_path / "open.py"), *"--topology cpu:2 --mesh data=2 --json --quiet".split()]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    planned, compared = figures
    own = compared["plans"]["plan"]["predicted"]
    assert own["step_time_s"] == planned["step_time_s"] and own["peak_bytes"] == planned["peak_bytes"]
