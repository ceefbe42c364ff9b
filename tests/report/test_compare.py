"""Plans side by side: what the estimates cannot tell apart is said."""

import io
from typing import Any

from rich.console import Console

from autoshard.exec._estimate import estimator_error
from autoshard.plan import Plan
from autoshard.report import Row, comparison_figures, comparison_report


def compiled(seconds: float) -> dict[str, Any]:
    return {
        "step_time_s": {"predicted": 1.0, "estimated": seconds, "error": estimator_error().within},
        "peak_bytes": {"compiled": 1 << 30},
        "verdict": "fits",
    }


def shown(plan: Plan, rows: list[Row]) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(comparison_report(plan, rows))
    return out.getvalue()


def test_what_differs_by_less_than_the_error_is_undecided(plan: Plan) -> None:
    near = 1.0 - 0.5 * estimator_error().within
    rows = [
        Row("plan", plan.prediction, compiled(1.0)),
        Row("fsdp*", plan.prediction, compiled(near)),
        Row("data_parallel*", plan.prediction, compiled(2.0)),
        Row("fsdp", None, failed="it does not compile"),
    ]
    figures = comparison_figures(rows)["plans"]
    assert figures["plan"]["undecided"] == ["fsdp*"] and figures["fsdp*"]["undecided"] == ["plan"]
    assert figures["data_parallel*"]["undecided"] == figures["fsdp"]["undecided"] == []
    error = f"{estimator_error().within:.0%}"
    assert f"undecided among fsdp*, plan: estimates from schedules may be {error} wrong" in shown(plan, rows)


def test_a_measurement_decides(plan: Plan) -> None:
    rows = [Row(name, plan.prediction, compiled(1.0), {"step_time_s": 1.0}) for name in ("plan", "fsdp*")]
    assert "undecided" not in shown(plan, rows)
