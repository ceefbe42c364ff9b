"""A sweep as a table, as figures, as a plot, and as one self-contained HTML page."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.base.units import GIB, format_count, format_seconds
from autoshard.errors import UserError
from autoshard.planning import SweepChoice, SweepRow, choose_rows
from autoshard.report.display import clean, save_picture
from autoshard.report.page.html_report import environment, script_json
from autoshard.report.page.notebook import import_or_hint


_SHORT = 4
"""Maximum length in characters of a remat policy that is a column among the figures."""


def sweep_figures(rows: Sequence[SweepRow], prices: Mapping[str, float], tokens: float | None = None) -> dict[str, Any]:
    """Return the object that `autoshard sweep --json` prints; unknown figures are `None`.

    `best`, `smallest` and `frontier` are positions in `rows`.

    - `prices`: price of a chip's hour, by chip.
    - `tokens`: tokens of a whole run; None leaves out days and cost.
    """
    choice = choose_rows(rows, prices)
    return {
        "best": choice.best,
        "smallest": choice.smallest,
        "frontier": list(choice.frontier),
        "rows": [_figures(row, prices, tokens) for row in rows],
    }


def _figures(row: SweepRow, prices: Mapping[str, float], tokens: float | None) -> dict[str, Any]:
    """Return the figures of one row of the sweep as plain values; empty texts become None."""
    return {
        "topology": row.topology,
        "batch": row.batch,
        "remat": row.remat,
        "failed": row.failed or None,
        "mesh": row.mesh or None,
        "recipe": dict(row.recipe),
        "step_time_s": row.step_time_s,
        "mfu": row.mfu,
        "peak_bytes": row.peak_bytes,
        "headroom_bytes": row.headroom_bytes,
        "chips": row.chips,
        "tokens": row.tokens,
        "seconds_per_token": row.seconds_per_token,
        "tokens_per_s_per_chip": row.tokens_per_s_per_chip,
        "price_per_token": row.price_per_token(prices),
        "days": None if tokens is None else row.days(tokens),
        "cost": None if tokens is None else row.cost(tokens, prices),
        "plan": row.plan or None,
        "words": list(row.words),
    }


def sweep_report(rows: Sequence[SweepRow], prices: Mapping[str, float], tokens: float | None = None) -> RenderableType:
    """Format a line for each row with the best ones marked, then each planned row's mesh and recipe, then the failures.

    - `prices`: price of a chip's hour, by chip; empty leaves out the column of costs.
    - `tokens`: tokens of a whole run; without them the price is that of a million tokens.
    """
    choice = choose_rows(rows, prices)
    varied = [name for name in ("batch", "remat") if any(getattr(row, name) is not None for row in rows)]
    table = _table("")
    table.add_column("topology", no_wrap=True)
    # A policy that is equal in all rows, or long, is only in the table of meshes, since a terminal has 80 columns.
    remats = {row.remat for row in rows}
    short = len(remats) > 1 and all(len(each or "") <= _SHORT for each in remats)
    shown = [name for name in varied if name == "batch" or short]
    money = ["cost"] if prices and tokens else ["$/M tok"] if prices else []
    for name in (*shown, "step", "tok/s", "/chip", "MFU", *(["days"] if tokens else []), *money, "left"):
        table.add_column(name, justify="right", no_wrap=True)
    notes: list[Text] = []
    for number, row in enumerate(rows):
        cells = [row.topology, *(str(getattr(row, name) or "") for name in shown)]
        if row.failed:
            parts = [row.topology, *(f"{name} {getattr(row, name)}" for name in varied if getattr(row, name))]
            notes.append(Text(f"- {', '.join(parts)}: {clean(row.failed)}"))
            table.add_row("", *cells, Text("no plan", style="yellow"))
            continue
        assert row.step_time_s is not None
        cells += [format_seconds(row.step_time_s), _count(row.tokens_per_s), _count(row.tokens_per_s_per_chip)]
        cells += ["" if row.mfu is None else f"{row.mfu:.1%}"]
        cells += [_days(row.days(tokens))] if tokens else []
        cells += [_money(row, prices, tokens)] if prices else []
        style = "bold" if number == choice.best else ""
        table.add_row(_mark(number, choice), *cells, _headroom(row), style=style)
    planned = [row for row in rows if not row.failed]
    below = [Text()] + _legend(rows, choice, prices) + [Text(), _meshes(planned, varied)] if planned else []
    return Group(table, *below, *([Text()] if notes else []), *notes)


def _table(*columns: str) -> Table:
    """Return an empty table in the style of the sweep's report, with these columns."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def _mark(number: int, choice: SweepChoice) -> str:
    """Return the marks of the row at a position: `*` for the best, `s` for the smallest, `f` on the frontier."""
    marks = ("*" if number == choice.best else "") + ("s" if number == choice.smallest else "")
    return marks + ("f" if number in choice.frontier else "")


def _legend(rows: Sequence[SweepRow], choice: SweepChoice, prices: Mapping[str, float]) -> list[Text]:
    """Return the lines that explain the marks, and a line with the chips without a price if some have one."""
    assert choice.best is not None and choice.smallest is not None
    priced = all(row.price_per_token(prices) is not None for row in rows if not row.failed)
    best = "cheapest for each token" if priced else "fastest"
    other = "cheaper" if priced else "of fewer chips"
    lines = [f"* {best}; f: none is both faster and {other}; s: the fewest chips that fit; left: GiB of a device"]
    if prices and not priced:
        missing = sorted({row.chip for row in rows if not row.failed} - set(prices))
        why = (
            f"No price is given of {', '.join(missing)}"
            if missing
            else "The step counts no tokens to divide a price by"
        )
        lines.append(f"{why}, so that the fastest is marked, not the cheapest.")
    return [Text(line, style="dim") for line in lines]


def _meshes(planned: Sequence[SweepRow], varied: Sequence[str]) -> Table:
    """Return a table of mesh and recipe of each planned row; recipes are left out if none has more than batch and
    remat.

    - `varied`: names of the fields `batch` and `remat` that have a column.
    """
    table = _table("topology", *varied, "mesh")
    table.columns[-1].no_wrap = False
    recipes = any(set(row.recipe) - {"batch", "remat"} for row in planned)
    if recipes:
        table.add_column("recipe")
    for row in planned:
        cells = [row.topology, *(clean(str(getattr(row, name) or "")) for name in varied), clean(row.mesh)]
        others = [f"{k} {v}" for k, v in row.recipe.items() if k not in ("batch", "remat") and v is not None]
        table.add_row(*cells, *([clean(", ".join(others))] if recipes else []))
    if "remat" in varied:
        table.columns[varied.index("remat") + 1].no_wrap = False
    for column in table.columns[1:]:
        column.overflow = "fold"
    return table


def _headroom(row: SweepRow) -> str:
    """Format the memory left on a device in GiB; empty if it is unknown."""
    return "" if row.headroom_bytes is None else f"{row.headroom_bytes / GIB:.1f}"


def _count(value: float | None) -> str:
    """Format a number with a prefix such as M; empty for None."""
    return "" if value is None else format_count(value)


def _days(days: float | None) -> str:
    """Format days with three digits; empty for None."""
    return "" if days is None else f"{days:.3g}" if days < 1e3 else f"{days:,.0f}"


def _money(row: SweepRow, prices: Mapping[str, float], tokens: float | None) -> str:
    """Format the cost of a run of `tokens`, or of a million tokens if they are not given; empty if it is unknown."""
    value = row.cost(tokens, prices) if tokens else row.price_per_token(prices)
    if value is None:
        return ""
    return format_count(value) if tokens else f"{value * 1e6:.4g}"


def plot_sweep(rows: Sequence[SweepRow], path: str | os.PathLike[str]) -> None:
    """Write a picture (its format by the suffix: `.png`, `.svg`, `.pdf`): step time, MFU and headroom over the batch.

    Each topology with each remat policy is a line; if no row has a batch, it is a bar.

    Raises `UserError` without matplotlib, for an unknown suffix, and if no row could be planned.
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


TOKENS = 1e12
"""Default number of tokens of a run; the page can change it."""


def sweep_page(
    rows: Sequence[SweepRow],
    prices: Mapping[str, float],
    tokens: float | None = None,
    pages: Mapping[str, str] | None = None,
) -> str:
    """Return the page as text; failed rows are listed apart from its table.

    - `prices`, `tokens`: initial values of the page's fields: prices of a chip's hour by chip, and tokens of a run.
      Without tokens it is `TOKENS`.
    - `pages`: paths of the plans' pages relative to this page, by the names of their files (`SweepRow.plan`).
    """
    planned = [row for row in rows if not row.failed]
    chips = list(dict.fromkeys(row.chip for row in planned))
    data = {
        "chips": {chip: prices.get(chip) for chip in chips},
        "tokens": tokens or TOKENS,
        "rows": [_row(row) | {"page": (pages or {}).get(row.plan)} for row in planned],
    }
    return (
        environment()
        .get_template("sweep.html")
        .render(
            data=script_json(data),
            chips=chips,
            planned=len(planned),
            failed=[row for row in rows if row.failed],
        )
    )


def _row(row: SweepRow) -> dict[str, Any]:
    """Return the figures of one row for the page's script."""
    return {
        "topology": row.topology,
        "chip": row.chip,
        "chips": row.chips,
        "batch": row.batch,
        "remat": row.remat,
        "mesh": row.mesh,
        "recipe": ", ".join(f"{name} {value}" for name, value in row.recipe.items() if value is not None),
        "step": row.step_time_s,
        "tokens": row.tokens,
        "mfu": row.mfu,
        "left": row.headroom_bytes,
        "plan": row.plan,
    }
