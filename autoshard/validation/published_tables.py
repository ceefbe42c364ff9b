"""Presentation of published runs with predicted and measured step times: JSON and tables."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.report.display import clean
from autoshard.validation.rebuilt_runs import PublishedRow


MEDIAN_PERCENT = 10.0
"""Limit of the median error over all rebuilt TPU runs, for the validation to pass."""
P90_PERCENT = 22.0
"""Limit of the 90th percentile of the errors, for the validation to pass."""


def published_figures(rows: Sequence[PublishedRow]) -> list[dict[str, Any]]:
    """Return the rows in the JSON object of `autoshard validate --json`; times in seconds, errors in percent.

    A row that was not rebuilt has the reason (`skipped`) in place of the figures.
    """
    return [
        {"id": row.id, "kind": "step time", "unit": "s", "chip": row.chip, "source": row.source}
        | (
            {"skipped": row.skipped}
            if row.ours is None
            else {
                "ours": row.ours,
                "theirs": row.theirs,
                "delta_percent": row.delta_percent,
                "unseen": row.unseen,
                "unseen_delta_percent": row.percent(row.unseen),
                "by_mfu": row.by_mfu,
                "by_mfu_delta_percent": row.percent(row.by_mfu),
                "by_other_rows": row.by_other_rows,
                "by_other_rows_delta_percent": row.percent(row.by_other_rows),
                "xla_flags": list(row.flags),
                "ours_mfu_percent": _percent(row.our_mfu),
                "theirs_mfu_percent": _percent(row.their_mfu),
                "assumed": list(row.assumed),
                "complete": row.complete,
            }
        )
        for row in rows
    ]


def _percent(share: float | None) -> float | None:
    """Return a share in percent; None for None."""
    return None if share is None else 100.0 * share


PREDICTORS: dict[str, Callable[[PublishedRow], float | None]] = {
    "unseen": lambda row: row.unseen,
    "by_mfu": lambda row: row.by_mfu,
    "by_other_rows": lambda row: row.by_other_rows,
}
"""Other predictors of a step time: ours fitted without the run's source, and two medians of the MFU of other runs."""


def error_groups(rows: Sequence[PublishedRow], of: Callable[[PublishedRow], str]) -> dict[str, dict[str, Any]]:
    """Return the number of rows, of complete rows that were rebuilt, and their errors, for each group of rows.

    `of` returns a row's group. Errors are median, 90th percentile and worst, in percent. The entry `training` has the
    errors of complete training runs for each predictor: `ours` and those of `PREDICTORS`.
    """
    groups: dict[str, list[PublishedRow]] = {}
    for row in rows:
        groups.setdefault(of(row), []).append(row)
    figures = {}
    for name, members in groups.items():
        counted = [row for row in members if row.complete]
        # Only training runs are predicted from the MFU of other runs; matmuls are not.
        trained = [row for row in counted if row.by_mfu is not None]
        predictors = {"ours": lambda row: row.ours} | PREDICTORS
        figures[name] = {"rows": len(members)} | _errors(counted, lambda row: row.ours)
        figures[name]["training"] = {key: _errors(trained, of) for key, of in predictors.items()}
    return figures


def _errors(rows: Sequence[PublishedRow], predicted: Callable[[PublishedRow], float | None]) -> dict[str, Any]:
    """Return the number of predictions (`answered`), and their median, 90th percentile and worst error in percent.

    Errors have no sign; they are None without predictions.
    """
    signed = (row.percent(predicted(row)) for row in rows)
    deltas = sorted(abs(delta) for delta in signed if delta is not None)
    return {
        "answered": len(deltas),
        "median_percent": statistics.median(deltas) if deltas else None,
        "p90_percent": float(np.quantile(deltas, 0.9)) if deltas else None,
        "worst_percent": deltas[-1] if deltas else None,
    }


def published_pass(rows: Sequence[PublishedRow]) -> bool:
    """Return True if median and 90th percentile of the errors over all complete rebuilt runs are within the limits.

    True too without such runs.
    """
    (total,) = error_groups(rows, lambda row: "all").values() if rows else ({"answered": 0},)
    return not total["answered"] or (total["median_percent"] <= MEDIAN_PERCENT and total["p90_percent"] <= P90_PERCENT)


def published_report(rows: Sequence[PublishedRow]) -> RenderableType:
    """Render every rebuilt run, the errors by generation and by source for each predictor, and the reasons for skipped
    rows.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("", overflow="fold")
    for column in ("ours, s", "theirs, s", "delta", "unseen", "by MFU", "MFU"):
        table.add_column(column, justify="right", no_wrap=True)
    notes: list[RenderableType] = []
    for row in rows:
        if row.ours is None or row.theirs is None or row.delta_percent is None:
            continue
        delta = Text(f"{row.delta_percent:+.1f} %", style="yellow" if abs(row.delta_percent) > P90_PERCENT else "")
        mfu = f"{100 * row.their_mfu:.1f} %" if row.their_mfu is not None else "-"
        other = [_signed(row.percent(value)) for value in (row.unseen, row.by_mfu)]
        table.add_row(clean(row.id), f"{row.ours:.4g}", f"{row.theirs:.4g}", delta, *other, mfu)
        mark = "assumed" if row.complete else "not counted; assumed:"
        notes += [Text(f"{clean(row.id)}: {mark} {clean(what)}", style="dim") for what in row.assumed]
    summary = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for column in ("step times of", "rows", "rebuilt", "median", "90th", "worst"):
        summary.add_column(column, justify="left" if column == "step times of" else "right")
    groups = error_groups(rows, lambda row: "all") | error_groups(rows, lambda row: row.chip or "no chip named")
    for name, group in (groups | error_groups(rows, lambda row: row.group)).items():
        if not group["answered"]:
            continue
        errors = [f"{group[key]:.1f} %" for key in ("median_percent", "p90_percent", "worst_percent")]
        summary.add_row(clean(name), str(group["rows"]), str(group["answered"]), *errors)
    predictors = _beside(groups | error_groups(rows, lambda row: row.group))
    incomplete = [row for row in rows if row.skipped]
    skipped = [Text(f"{clean(row.id)}: {clean(row.skipped)}", style="dim") for row in incomplete]
    heading = [Text(f"{len(incomplete)} incomplete rows, not rebuilt:")] if incomplete else []
    return Group(table, *notes, Text(), summary, *predictors, *heading, *skipped)


def _beside(groups: Mapping[str, dict[str, Any]]) -> list[RenderableType]:
    """Tabulate the errors of training runs by predictor, with a legend: median and 90th percentile in percent.

    `groups` is the result of `error_groups`. The list is empty if no group has training runs.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for column in ("training runs of", "runs", "ours", "unseen", "by MFU", "by other runs"):
        table.add_column(column, justify="left" if column == "training runs of" else "right")
    for name, group in groups.items():
        errors = group["training"]
        if not errors["ours"]["answered"]:
            continue
        cells = [
            "-" if each["median_percent"] is None else f"{each['median_percent']:.1f}, {each['p90_percent']:.1f} %"
            for each in errors.values()
        ]
        table.add_row(clean(name), str(errors["ours"]["answered"]), *cells)
    if not table.row_count:
        return []
    meaning = (
        "Median and 90th percentile of the errors. Unseen: figures fitted without the run's source. By MFU: the chip's "
        "median MFU of other sources, or of all chips if it has none. By other runs: median MFU of all other runs on "
        "the chip, of its own source too."
    )
    return [Text(), table, Text(meaning, style="dim")]


def _signed(delta: float | None) -> str:
    """Return an error in percent as text with its sign; `-` for None."""
    return "-" if delta is None else f"{delta:+.1f} %"
