"""Presentation of measured plans and predictions: JSON, a table, an HTML page and a plot."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.base.units import GIB
from autoshard.errors import UserError
from autoshard.report.display import clean, save_picture, write_text
from autoshard.report.page.html_report import environment
from autoshard.report.page.notebook import import_or_hint
from autoshard.validation.measured_pairs import PairGroup, PairRow, PairSummary, summarise_pairs


def pair_figures(groups: Sequence[PairGroup]) -> dict[str, Any]:
    """Return the JSON object of `autoshard validate --pairs --json`: times in seconds, memory in GiB, errors as
    shares.

    It has all groups with their rows, a summary of all, and one of those on TPUs. Infinite regrets are None.
    """
    tpu = [group for group in groups if group.on_tpu]
    return {
        "groups": [
            {
                "group": group.group,
                "source": group.source,
                "hardware": group.hardware,
                "compares": "plans" if group.compares_plans else "workloads",
                "rows": [_row_figures(row) for row in group.rows],
                "tau": group.tau,
                "regret": _finite(group.regret),
                "chosen": None if group.chosen is None else group.chosen.plan,
                "chosen_ran_out_of_memory": group.regret == math.inf,
            }
            for group in groups
        ],
        "summary": _summary_figures(summarise_pairs(groups)),
        "tpu": _summary_figures(summarise_pairs(tpu)),
    }


def _row_figures(row: PairRow) -> dict[str, Any]:
    """Return the JSON object of a row."""
    return {
        "plan": row.plan,
        "measured_s": row.measured_s,
        "predicted_s": row.predicted_s,
        "unseen_s": row.unseen_s,
        "measured_gib": None if row.measured_bytes is None else row.measured_bytes / GIB,
        "predicted_gib": None if row.predicted_bytes is None else row.predicted_bytes / GIB,
        "fits": row.fits,
        "measured_fits": row.measured_fits,
        "skipped": row.skipped or None,
        "assumed": list(row.assumed),
        "note": row.note or None,
    }


def _summary_figures(found: PairSummary) -> dict[str, Any]:
    """Return the JSON object of a summary."""
    return {
        "groups": found.groups,
        "rows": found.rows,
        "rebuilt": found.rebuilt,
        "regret_geometric_mean": _finite(found.regret_mean),
        "regret_worst": _finite(found.regret_worst),
        "tau": found.tau,
        "decided_pairs": found.decided,
        "ratio_error_median": found.ratio_median,
        "ratio_error_p90": found.ratio_p90,
        "step_error_median": found.step_median,
        "step_error_p90": found.step_p90,
        "memory_error_median": found.memory_median,
        "verdicts": found.verdicts,
        "verdicts_right": found.verdicts_right,
    }


def _finite(value: float | None) -> float | None:
    """Return a number that JSON can represent; None in place of the infinite regret of a plan that ran out of
    memory.
    """
    return None if value is None or math.isinf(value) else value


def pair_report(groups: Sequence[PairGroup]) -> RenderableType:
    """Render a table for each group that was rebuilt, the figures of all groups, and the reasons for rows that are left
    out.
    """
    parts: list[RenderableType] = []
    for group in groups:
        if not any(row.predicted_s is not None for row in group.rows):
            continue
        parts += [Text(f"{clean(group.group)} ({clean(_device(group))})", style="bold"), _table(group)]
        parts += [Text(_scores(group), style="dim")]
        parts += [*(Text(f"assumed: {clean(line)}", style="dim") for line in _assumed(group)), Text()]
    parts += [_summary_table(groups)]
    skipped = list(_skipped(groups))
    parts += [Text(f"{len(skipped)} rows are not rebuilt:")] if skipped else []
    return Group(*parts, *(Text(f"{clean(name)}: {clean(why)}", style="dim") for name, why in skipped))


def _device(group: PairGroup) -> str:
    """Return the hardware's text, cut to 40 characters."""
    return group.hardware if len(group.hardware) <= 40 else group.hardware[:37] + "..."


def _table(group: PairGroup) -> Table:
    """Tabulate the rows of a group that were rebuilt; a wrong prediction of the fit is coloured.

    `delta` is the signed error of the predicted time in percent of the measured one.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("plan", overflow="fold")
    for column in ("measured, ms", "predicted", "delta", "GiB", "predicted", "fits"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in group.rows:
        if row.predicted_s is None or row.predicted_bytes is None:
            continue
        wrong = row.measured_fits is not None and row.fits != row.measured_fits
        fits = Text(
            f"{_yes(row.fits)}{'' if not wrong else f' (measured {_yes(row.measured_fits)})'}",
            style="yellow" if wrong else "",
        )
        table.add_row(
            clean(row.plan),
            "-" if row.measured_s is None else f"{1e3 * row.measured_s:.4g}",
            f"{1e3 * row.predicted_s:.4g}",
            "-" if row.measured_s is None else f"{100 * (row.predicted_s / row.measured_s - 1):+.1f} %",
            "-" if row.measured_bytes is None else f"{row.measured_bytes / GIB:.2f}",
            f"{row.predicted_bytes / GIB:.2f}",
            fits,
        )
    return table


def _assumed(group: PairGroup) -> list[str]:
    """List what the rebuilt rows of a group had to assume, each text once."""
    return list(dict.fromkeys(text for row in group.rows if row.predicted_s is not None for text in row.assumed))


def _yes(value: bool | None) -> str:
    """Return `yes` for True and `no` for False or None."""
    return "yes" if value else "no"


def _scores(group: PairGroup) -> str:
    """Describe how well the predicted order of a group agrees with the measured one: tau and regret, if defined."""
    scores = [] if group.tau is None else [f"tau {group.tau:.2f} over {len(group.decided())} decided pairs"]
    if group.regret is not None and group.chosen is not None:
        regret = (
            "the plan that we would choose ran out of memory" if math.isinf(group.regret) else f"{group.regret:.3f}"
        )
        scores.append(f"regret {regret} (we would choose {clean(group.chosen.plan)})")
    return "; ".join(scores) or "nothing to order"


def _summary_rows(groups: Sequence[PairGroup]) -> list[tuple[str, list[str]]]:
    """Return the name of each figure, and its texts for groups on TPUs, for groups on GPUs, and for all groups."""
    kinds = [[g for g in groups if g.on_tpu], [g for g in groups if not g.on_tpu], list(groups)]
    summaries = [summarise_pairs(each) for each in kinds]

    def cells(show: Any) -> list[str]:
        """Return the texts of one figure, made by `show` from each summary."""
        return [show(each) for each in summaries]

    return [
        ("groups rebuilt, of all", cells(lambda s: str(s.groups))),
        ("rows rebuilt, of all", cells(lambda s: f"{s.rebuilt} of {s.rows}")),
        ("regret, geometric mean", cells(lambda s: _number(s.regret_mean))),
        ("regret, worst", cells(lambda s: _number(s.regret_worst))),
        ("Kendall's tau", cells(lambda s: "-" if s.tau is None else f"{s.tau:.2f} ({s.decided} pairs)")),
        ("error of ratios, median", cells(lambda s: _percent(s.ratio_median))),
        ("error of ratios, 90th percentile", cells(lambda s: _percent(s.ratio_p90))),
        ("error of step times, source left out, median", cells(lambda s: _percent(s.step_median))),
        ("error of step times, 90th percentile", cells(lambda s: _percent(s.step_p90))),
        ("error of peak memory, median", cells(lambda s: _percent(s.memory_median))),
        ("does it fit: right", cells(lambda s: f"{s.verdicts_right} of {s.verdicts}")),
    ]


def _summary_table(groups: Sequence[PairGroup]) -> Table:
    """Tabulate the figures of TPUs, of GPUs and of all groups."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("")
    for column in ("TPU", "GPU", "all"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, cells in _summary_rows(groups):
        table.add_row(name, *cells)
    return table


def _number(value: float | None) -> str:
    """Return a regret as text: `-` for None, `out of memory` for infinity."""
    return "-" if value is None else "out of memory" if math.isinf(value) else f"{value:.3f}"


def _percent(value: float | None) -> str:
    """Return a share as text in percent; `-` for None."""
    return "-" if value is None else f"{100 * value:.1f} %"


def _skipped(groups: Sequence[PairGroup]) -> Iterator[tuple[str, str]]:
    """Yield the name of each row that is left out, and the reason."""
    for group in groups:
        for row in group.rows:
            if row.skipped:
                yield f"{group.group}, {row.plan}", row.skipped


def write_pair_page(groups: Sequence[PairGroup], path: str | os.PathLike[str]) -> None:
    """Write one self-contained page: the figures of all groups, the plot, every group, and the rows that are not
    rebuilt.

    Raises `UserError` without matplotlib, which draws the plot, if no row was rebuilt, and if the page cannot be
    written.
    """
    page = (
        environment()
        .get_template("pairs.html")
        .render(
            summary=_summary_rows(groups),
            plot=_plot_text(groups),
            groups=[
                {"group": group, "device": _device(group), "scores": _scores(group), "assumed": _assumed(group)}
                for group in groups
                if any(row.predicted_s is not None for row in group.rows)
            ],
            skipped=list(_skipped(groups)),
        )
    )
    write_text(Path(path), page)


def plot_pairs(groups: Sequence[PairGroup], path: str | os.PathLike[str]) -> None:
    """Write the plot of predicted over measured seconds of a step, with a line for each group.

    The suffix of `path` selects the file format. Raises `UserError` without matplotlib, for an unknown suffix, and if
    no row was rebuilt.
    """
    save_picture(_plot(groups), path)


def _plot_text(groups: Sequence[PairGroup]) -> str:
    """Return the plot as an `<svg>` element, equal for equal groups; raises `UserError` as `_plot` does."""
    import io

    text = io.StringIO()
    import_or_hint("matplotlib").rcParams["svg.hashsalt"] = "autoshard"  # equal rows give equal pages
    _plot(groups).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _plot(groups: Sequence[PairGroup]) -> Any:
    """Draw the plot of `plot_pairs` as a matplotlib figure.

    Raises `UserError` without matplotlib, and if no row has both times.
    """
    drawn = [(group, [row for row in group.rows if row.ran]) for group in groups]
    drawn = [(group, rows) for group, rows in drawn if rows]
    if not drawn:
        raise UserError("no row of the pairs could be rebuilt: there is nothing to plot.")
    pyplot = import_or_hint("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(11, 7), layout="constrained")
    pyplot.close(figure)
    every = [value for _, rows in drawn for row in rows for value in (row.measured_s, row.predicted_s) if value]
    span = [0.7 * min(every), 1.4 * max(every)]
    axes.plot(span, span, color="0.7", linewidth=1, zorder=0)
    for number, (group, rows) in enumerate(drawn):
        points = sorted((row.measured_s or 0.0, row.predicted_s or 0.0) for row in rows)
        style = {"marker": "os^Dv"[number // 10 % 5], "markersize": 5, "linewidth": 1}
        axes.plot([x for x, _ in points], [y for _, y in points], label=group.group, **style)
    axes.set(xscale="log", yscale="log", xlim=span, ylim=span)
    axes.set_xlabel("measured seconds of a step")
    axes.set_ylabel("predicted seconds of a step")
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
