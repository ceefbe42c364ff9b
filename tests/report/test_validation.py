"""When enough answers are right."""

import pytest

from autoshard.cost import QuestionRow
from autoshard.report import passes, validation_figures


def row(kind: str, ours: float | None, trust: str = "use") -> QuestionRow:
    return QuestionRow(
        "id", kind, "How long?", ours, 100.0, "us", 0.01, trust, "book:page", "" if ours else "no such chip"
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row("collective", 100.5)], True),
        ([row("collective", 102.0)], False),
        ([row("collective", 102.0, trust="loose")], True),
        ([row("collective", None)], True),
        ([row("training", 100.0)] * 9 + [row("training", 150.0)], True),
        ([row("training", 100.0)] * 8 + [row("training", 150.0)] * 2, False),
        ([row("training", 100.0)] * 9 + [row("training", 150.0), row("memory", 150.0)], False),
    ],
)
def test_enough_rows_of_every_group_must_be_within(rows: list[QuestionRow], expected: bool):
    assert passes(rows) is expected


def test_figures_of_a_group():
    figures = validation_figures([row("memory", 101.0), row("memory", 90.0), row("memory", None)])
    assert figures["groups"] == {
        "memory": {"rows": 3, "answered": 2, "within": 1, "median_percent": 5.5, "worst_percent": 10.0}
    }
    assert figures["rows"][2]["skipped"] == "no such chip"
    assert figures["passed"] is False
