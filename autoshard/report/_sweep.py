"""A sweep as a table, as figures for scripts, and as a plot."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.errors import UserError
from autoshard.plan import SweepRow
from autoshard.report._names import clean
from autoshard.report._notebook import import_or_hint
from autoshard.report._saving import save_picture
from autoshard.units import format_bytes, format_count, format_seconds


def sweep_figures(rows: Sequence[SweepRow], prices: Mapping[str, float]) -> dict[str, Any]:
    """The object that `autoshard sweep --json` prints; what is unknown is `None`."""
    return {
        "rows": [
            {
                "topology": row.topology,
                "batch": row.batch,
                "remat": row.remat,
                "failed": row.failed or None,
                "mesh": row.mesh or None,
                "step_time_s": row.step_time_s,
                "mfu": row.mfu,
                "peak_bytes": row.peak_bytes,
                "headroom_bytes": row.headroom_bytes,
                "tokens": row.tokens,
                "seconds_per_token": row.seconds_per_token,
                "price_per_token": row.price_per_token(prices),
                "words": list(row.words),
            }
            for row in rows
        ]
    }


def sweep_report(rows: Sequence[SweepRow], prices: Mapping[str, float]) -> RenderableType:
    """A line for each row, what cannot be planned with its reason below."""
    varied = {name for name in ("batch", "remat") if any(getattr(row, name) is not None for row in rows)}
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("topology", no_wrap=True)
    for name in ("batch", "remat"):
        if name in varied:
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("mesh")
    for name in ("step", "MFU", "headroom", "tokens/s", *(["price/M tokens"] if prices else [])):
        table.add_column(name, justify="right", no_wrap=True)
    notes: list[Text] = []
    for row in rows:
        cells = [row.topology, *(str(getattr(row, name) or "") for name in ("batch", "remat") if name in varied)]
        if row.failed:
            notes.append(Text(f"- {', '.join(filter(None, cells))}: {clean(row.failed)}"))
            table.add_row(*cells, Text("no plan, see below", style="yellow"))
            continue
        assert row.step_time_s is not None
        rate, price = row.seconds_per_token, row.price_per_token(prices)
        cells += [clean(row.mesh), format_seconds(row.step_time_s), "" if row.mfu is None else f"{row.mfu:.1%}"]
        cells += [_headroom(row), "" if not rate else format_count(1 / rate)]
        table.add_row(*cells, *([_price(price)] if prices else []))
    return Group(table, *([Text()] if notes else []), *notes)


def _headroom(row: SweepRow) -> str:
    return "" if row.headroom_bytes is None else format_bytes(row.headroom_bytes)


def _price(price: float | None) -> str:
    return "" if price is None else f"{price * 1e6:.4g}"


def plot_sweep(rows: Sequence[SweepRow], path: str | os.PathLike[str]) -> None:
    """Write a picture (its kind by the suffix: `.png`, `.svg`, `.pdf`): step time, MFU and headroom over the batch.

    Raises `UserError` without matplotlib, for a suffix it does not know and where nothing could be planned.
    """
    planned = [row for row in rows if not row.failed]
    if not planned:
        raise UserError("no row of the sweep could be planned: there is nothing to plot.")
    pyplot = import_or_hint("matplotlib.pyplot")
    series: dict[str, list[SweepRow]] = {}
    for row in planned:
        series.setdefault(", ".join(filter(None, (row.topology, row.remat and f"remat {row.remat}"))), []).append(row)
    batches = sorted({row.batch for row in planned if row.batch is not None})
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    pyplot.close(figure)
    read = (
        ("step time in s", lambda row: row.step_time_s),
        ("MFU in %", lambda row: None if row.mfu is None else 100 * row.mfu),
        ("memory headroom in GiB", lambda row: None if row.headroom_bytes is None else row.headroom_bytes / 2**30),
    )
    for axes, (title, value) in zip(panels, read, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        for number, (name, mine) in enumerate(series.items()):
            points = [(row.batch, y) for row in mine if (y := value(row)) is not None]
            if batches:
                axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
            else:
                axes.bar(number, points[0][1] if points else 0.0, label=name)
        axes.set_ylim(bottom=0)
        if batches:
            axes.set_xlabel("batch")
            axes.set_xticks(batches)
        else:
            axes.set_xticks([])
    panels[0].legend(fontsize=8, frameon=False)
    save_picture(figure, path)
