"""Validation of the cost model: answers to worked questions, and step times of published runs."""

import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.errors import UserError
from autoshard.report.display import clean
from autoshard.validation.published_runs import is_published
from autoshard.validation.published_tables import error_groups, published_figures, published_pass, published_report
from autoshard.validation.rebuilt_runs import PublishedRow, validate_published
from autoshard.validation.worked_questions import QuestionRow, validate_questions


@dataclasses.dataclass(frozen=True, slots=True)
class Validation:
    """Worked questions and published runs, each with our answer and the known one."""

    questions: tuple[QuestionRow, ...]
    runs: tuple[PublishedRow, ...]
    bad: tuple[str, ...] = ()
    """A sentence for each row that is left out because its form differs from that of its file."""


def validate(path: str | pathlib.Path | None = None, progress: Callable[[str], None] | None = None) -> Validation:
    """Answer the questions or rebuild the runs of a file; None answers and rebuilds all shipped ones.

    `progress` receives a line of text for each run.

    Rows of unknown form are left out and listed in `bad`. Raises: UserError for a file that cannot be read, or without
    a usable row.
    """
    if path is None:
        return Validation(validate_questions(), validate_published(progress=progress))
    bad: list[str] = []
    if is_published(path):
        validation = Validation((), validate_published(path, progress, bad))
    else:
        validation = Validation(validate_questions(path, bad), ())
    if bad and not validation.questions and not validation.runs:
        raise UserError(f"{bad[0]}; no row of the file can be used.")
    return dataclasses.replace(validation, bad=tuple(bad))


def validation_figures(found: Validation) -> dict[str, Any]:
    """Return the JSON object of `autoshard validate --json`: all rows, errors by kind, chip and source, `passed`."""
    return {
        "rows": _question_figures(found.questions) + published_figures(found.runs),
        "groups": _groups(found.questions),
        "step_times": error_groups(found.runs, lambda row: "all")
        | error_groups(found.runs, lambda row: row.chip or "no chip named"),
        "sources": error_groups(found.runs, lambda row: row.group),
        "bad_rows": list(found.bad),
        "passed": passes(found),
    }


def _question_figures(rows: Sequence[QuestionRow]) -> list[dict[str, Any]]:
    """Return the JSON objects of the questions; one without our answer has the reason in its place."""
    return [
        {"id": row.id, "kind": row.kind, "theirs": row.theirs, "unit": row.unit, "source": row.source}
        | (
            {"skipped": row.skipped}
            if row.ours is None
            else {"ours": row.ours, "delta_percent": row.delta_percent, "within": row.within}
        )
        for row in rows
    ]


_ENOUGH = {"training": 0.9, "inference": 0.9}
"""Share of a kind's questions that must be within tolerance; 1 for other kinds.

An answer about a whole step contains roundings and assumptions of its author that a single collective does not.
"""


def passes(found: Validation) -> bool:
    """Return True if enough answers are within tolerance, and the errors of step times are within their limits."""
    return _questions_pass(found.questions) and published_pass(found.runs)


def _questions_pass(rows: Sequence[QuestionRow]) -> bool:
    """Return True if the share `_ENOUGH` of the questions of every kind is within their tolerances.

    Only answered questions whose `trust` is `use` count; without any the result is True.
    """
    counted = [row for row in rows if row.trust == "use" and row.ours is not None]
    return all(
        group["within"] >= _ENOUGH.get(kind, 1.0) * group["answered"] for kind, group in _groups(counted).items()
    )


def _groups(rows: Sequence[QuestionRow]) -> dict[str, dict[str, Any]]:
    """Return, for each kind of question, the numbers of rows, of answers and of those within tolerance, and the errors.

    Errors are median and worst in percent, without sign; None without answers.
    """
    groups: dict[str, list[QuestionRow]] = {}
    for row in rows:
        groups.setdefault(row.kind, []).append(row)
    figures = {}
    for kind, members in groups.items():
        deltas = [abs(row.delta_percent) for row in members if row.delta_percent is not None]
        figures[kind] = {
            "rows": len(members),
            "answered": len(deltas),
            "within": sum(row.within for row in members),
            "median_percent": statistics.median(deltas) if deltas else None,
            "worst_percent": max(deltas, default=None),
        }
    return figures


def validation_report(found: Validation) -> RenderableType:
    """Render every row, the median and the largest error of each group, and the rows that cannot be read."""
    parts = [_questions_report(found.questions)] if found.questions else []
    runs = [published_report(found.runs)] if found.runs else []
    count = len(found.bad)
    heading = [Text(f"{count} {'row' if count == 1 else 'rows'} that cannot be read, left out:", style="yellow")]
    return Group(*parts, *runs, *(heading if count else []), *(Text(clean(line)) for line in found.bad))


def _questions_report(rows: Sequence[QuestionRow]) -> RenderableType:
    """Tabulate the questions with both answers, and the errors of each kind of question.

    A question without our answer shows the reason. Answers outside of their tolerance are coloured.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("question")
    for column in ("ours", "theirs", "delta"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if row.ours is None or row.delta_percent is None:
            table.add_row(row.id, Text(clean(row.skipped), style="dim"), "-", f"{row.theirs:.4g}", "skipped")
            continue
        style = "" if row.within else "yellow"
        question = Text(f"{clean(row.question)} ({clean(row.unit)})")
        delta = Text(f"{row.delta_percent:+.1f} %", style=style)
        table.add_row(row.id, question, f"{row.ours:.4g}", f"{row.theirs:.4g}", delta)
    summary = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for column in ("group", "rows", "within tolerance", "median", "worst"):
        summary.add_column(column, justify="left" if column == "group" else "right")
    for kind, group in _groups(rows).items():
        numbers = [
            f"{group[key]:.2g} %" if group[key] is not None else "-" for key in ("median_percent", "worst_percent")
        ]
        summary.add_row(kind, str(group["rows"]), str(group["within"]), *numbers)
    sources = sorted({row.source.split(":")[0] for row in rows})
    return Group(table, Text(), summary, Text(f"Source: {', '.join(sources)}", style="dim"))
