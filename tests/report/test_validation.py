"""Threshold of right answers in a validation."""

import dataclasses
import io
import json
import pathlib

import pytest
from rich.console import Console

from autoshard.errors import UserError
from autoshard.validation import (
    PublishedRow,
    QuestionRow,
    Validation,
    passes,
    validate,
    validation_figures,
    validation_report,
)


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
    assert passes(Validation(tuple(rows), ())) is expected


def test_figures_of_a_group():
    rows = (row("memory", 101.0), row("memory", 90.0), row("memory", None))
    figures = validation_figures(Validation(rows, ()))
    assert figures["groups"] == {
        "memory": {"rows": 3, "answered": 2, "within": 1, "median_percent": 5.5, "worst_percent": 10.0}
    }
    assert figures["rows"][2]["skipped"] == "no such chip"
    assert figures["passed"] is False


def run(name: str, ours: float | None, chip: str = "v5e", source: str = "a/b@0:x/v5e/README.md") -> PublishedRow:
    return PublishedRow(
        name, "model", chip, source, theirs=10.0, ours=ours, their_mfu=0.5, our_mfu=0.5,
        skipped="" if ours else "not stated: seq",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("times", "expected"),
    [([10.9, 9.2], True), ([11.5, 11.5], False), ([10.0] * 8 + [14.0] * 2, False), ([None], True), ([], True)],
)
def test_step_times_must_be_near_in_the_middle_and_at_the_90th(times: list[float | None], expected: bool):
    rows = tuple(run(str(k), time) for k, time in enumerate(times))
    assert passes(Validation((), rows)) is expected


def test_figures_of_step_times():
    rows = (run("one", 11.0), run("two", 9.5, "v5p", "a/b@0:x/v5p/README.md"), run("three", None))
    figures = validation_figures(Validation((), rows))
    assert [r["delta_percent"] for r in figures["rows"][:2]] == pytest.approx([10.0, -5.0])
    assert figures["rows"][2]["skipped"] == "not stated: seq" and "ours" not in figures["rows"][2]
    assert figures["step_times"]["all"]["median_percent"] == pytest.approx(7.5)
    assert figures["step_times"]["v5e"]["answered"] == 1 and figures["step_times"]["v5e"]["rows"] == 2
    assert set(figures["sources"]) == {"a/b: x/v5e", "a/b: x/v5p"}
    assert figures["bad_rows"] == []


def test_figures_of_predictors_are_of_the_same_training_runs():
    matmul, one, two = run("gemm", 20.0), run("one", 11.0), run("two", 9.5)
    one = dataclasses.replace(one, unseen=12.0, by_mfu=10.1, by_other_rows=10.2)
    two = dataclasses.replace(two, unseen=9.0, by_mfu=9.7)
    assumed = dataclasses.replace(one, id="assumed", ours=30.0, complete=False)
    figures = validation_figures(Validation((), (matmul, one, two, assumed)))["step_times"]["v5e"]
    assert figures["answered"] == 3 and figures["worst_percent"] == pytest.approx(100.0)
    medians = {name: each["median_percent"] for name, each in figures["training"].items()}
    assert medians == pytest.approx({"ours": 7.5, "unseen": 15.0, "by_mfu": 2.0, "by_other_rows": 2.0})
    assert {name: each["answered"] for name, each in figures["training"].items()} == {
        "ours": 2, "unseen": 2, "by_mfu": 2, "by_other_rows": 1,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["runs", "questions"])
def test_one_bad_row_is_named_and_the_rest_is_validated(tmp_path: pathlib.Path, kind: str):
    good = {"id": "small", "model": "m", "metric": "MFU %", "value": 50, "source": "a/b@0:x/README.md"}
    if kind == "questions":
        good = {
            "id": "none", "kind": "memory", "setting": {}, "answer": 1.0, "unit": "s", "tolerance": 0.1,
            "trust": "use", "source": "a book",
        }  # fmt: skip
    wrong = {"value": "much"} if kind == "runs" else {"answer": "much"}
    path = tmp_path / "data.json"
    path.write_text(json.dumps([good | wrong | {"id": "wrong"}, good]))
    validated = validate(path)
    (name,) = wrong
    assert len(validated.runs) + len(validated.questions) == 1 and passes(validated)
    assert validation_figures(validated)["bad_rows"] == list(validated.bad)
    assert len(validated.bad) == 1 and f"row 0 (wrong): {name} is 'much', expected a number" in validated.bad[0]
    screen = io.StringIO()
    Console(file=screen, width=200).print(validation_report(validated))
    assert "1 row that cannot be read, left out:" in screen.getvalue() and "is 'much'" in screen.getvalue()
    path.write_text(json.dumps([good | wrong | {"id": "wrong"}, good | wrong]))
    with pytest.raises(UserError, match=r"row 0 \(wrong\): .* is 'much', .*; no row of the file can be used."):
        validate(path)


def test_the_report_shows_rows_groups_and_what_was_left_out():
    screen = io.StringIO()
    rows = (run("one", 11.0), run("three", None))
    Console(file=screen, width=100).print(validation_report(Validation((), rows)))
    text = screen.getvalue()
    assert "+10.0 %" in text and "a/b: x/v5e" in text
    assert "1 incomplete rows, not rebuilt:" in text and "three: not stated: seq" in text
