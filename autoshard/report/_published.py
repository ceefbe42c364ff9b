"""Our step times of published runs, beside theirs."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan import PublishedRow
from autoshard.report._names import clean


MEDIAN_PERCENT = 10.0
"""What the median error over all rebuilt TPU runs must not exceed."""
P90_PERCENT = 22.0
"""The same for the 90th percentile."""


def published_figures(rows: Sequence[PublishedRow]) -> list[dict[str, Any]]:
    """The rows in the JSON object of `autoshard validate --json`; times in seconds."""
    return [
        {"id": row.id, "kind": "step time", "unit": "s", "chip": row.chip, "source": row.source}
        | (
            {"skipped": row.skipped}
            if row.ours is None
            else {
                "ours": row.ours,
                "theirs": row.theirs,
                "delta_percent": row.delta_percent,
                "ours_mfu_percent": _percent(row.our_mfu),
                "theirs_mfu_percent": _percent(row.their_mfu),
                "assumed": list(row.assumed),
                "complete": row.complete,
            }
        )
        for row in rows
    ]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100.0 * share


def error_groups(rows: Sequence[PublishedRow], of: Callable[[PublishedRow], str]) -> dict[str, dict[str, Any]]:
    """Rows, complete rows that were rebuilt, median, 90th percentile and worst error of each group that `of` names."""
    groups: dict[str, list[PublishedRow]] = {}
    for row in rows:
        groups.setdefault(of(row), []).append(row)
    found = {}
    for name, members in groups.items():
        counted = (row.delta_percent for row in members if row.complete)
        deltas = sorted(abs(delta) for delta in counted if delta is not None)
        found[name] = {
            "rows": len(members),
            "answered": len(deltas),
            "median_percent": statistics.median(deltas) if deltas else None,
            "p90_percent": percentile(deltas, 0.9) if deltas else None,
            "worst_percent": deltas[-1] if deltas else None,
        }
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of sorted values lie, interpolated."""
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def published_pass(rows: Sequence[PublishedRow]) -> bool:
    """Whether the errors over all rebuilt runs are within bounds; true if there are none."""
    (total,) = error_groups(rows, lambda row: "all").values() if rows else ({"answered": 0},)
    return not total["answered"] or (total["median_percent"] <= MEDIAN_PERCENT and total["p90_percent"] <= P90_PERCENT)


def published_report(rows: Sequence[PublishedRow]) -> RenderableType:
    """Every rebuilt run, median and worst by generation and by source, and why the others were left out."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("", overflow="fold")
    for column in ("ours, s", "theirs, s", "delta", "MFU", "theirs"):
        table.add_column(column, justify="right", no_wrap=True)
    notes: list[RenderableType] = []
    for row in rows:
        if row.ours is None or row.theirs is None or row.delta_percent is None:
            continue
        delta = Text(f"{row.delta_percent:+.1f} %", style="yellow" if abs(row.delta_percent) > P90_PERCENT else "")
        mfu = [f"{100 * share:.1f} %" if share is not None else "-" for share in (row.our_mfu, row.their_mfu)]
        table.add_row(clean(row.id), f"{row.ours:.4g}", f"{row.theirs:.4g}", delta, *mfu)
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
    left = [row for row in rows if row.skipped]
    skipped = [Text(f"{clean(row.id)}: {clean(row.skipped)}", style="dim") for row in left]
    heading = [Text(f"{len(left)} incomplete rows, not rebuilt:")] if left else []
    return Group(table, *notes, Text(), summary, *heading, *skipped)
