"""Our answers to worked questions of others, beside theirs."""

import statistics
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.cost import QuestionRow
from autoshard.report._names import clean


def validation_figures(rows: Sequence[QuestionRow]) -> dict[str, Any]:
    """The JSON object of `autoshard validate --json`."""
    return {
        "rows": [
            {"id": row.id, "kind": row.kind, "theirs": row.theirs, "unit": row.unit, "source": row.source}
            | (
                {"skipped": row.skipped}
                if row.ours is None
                else {"ours": row.ours, "delta_percent": row.delta_percent, "within": row.within}
            )
            for row in rows
        ],
        "groups": _groups(rows),
        "passed": passes(rows),
    }


_ENOUGH = {"training": 0.9, "inference": 0.9}
"""Share of a group's rows that must be within tolerance, 1 where nothing is said: a whole step hides roundings and
assumptions of its author that a single collective does not."""


def passes(rows: Sequence[QuestionRow]) -> bool:
    """Whether enough rows of every group are within their tolerances; rows that are not to be trusted do not count."""
    counted = [row for row in rows if row.trust == "use" and row.ours is not None]
    return all(
        group["within"] >= _ENOUGH.get(kind, 1.0) * group["answered"] for kind, group in _groups(counted).items()
    )


def _groups(rows: Sequence[QuestionRow]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[QuestionRow]] = {}
    for row in rows:
        groups.setdefault(row.kind, []).append(row)
    found = {}
    for kind, members in groups.items():
        deltas = [abs(row.delta_percent) for row in members if row.delta_percent is not None]
        found[kind] = {
            "rows": len(members),
            "answered": len(deltas),
            "within": sum(row.within for row in members),
            "median_percent": statistics.median(deltas) if deltas else None,
            "worst_percent": max(deltas, default=None),
        }
    return found


def validation_report(rows: Sequence[QuestionRow]) -> RenderableType:
    """Every row and, for each group, the median and the worst difference."""
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
