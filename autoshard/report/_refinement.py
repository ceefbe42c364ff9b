"""A refinement on a terminal: what was judged, what was learned, and what it came to."""

import math

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.exec import Judged, Refinement
from autoshard.plan import mesh_words
from autoshard.report._names import clean
from autoshard.units import format_bytes, format_seconds


def refinement_report(result: Refinement) -> RenderableType:
    """The plans as they were judged, best first, the figures that moved, and the plan in words."""
    plan = result.plan
    title = Text(f"{clean(plan.program_name, 60)} on {plan.topology}, mesh {mesh_words(plan.mesh)}", style="bold")
    judged = "compiled" if result.judge == "compile" else "measured"
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    for column in (judged, "+-", "predicted", "after", "peak", "fits"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in result.judged:
        table.add_row(Text(clean(each.name, 28), style="bold" if each is result.judged[0] else ""), *_cells(each))
    times = "time" if result.rounds == 1 else "times"
    ending = Text(f"Planned {result.rounds} {times}: {result.why}.")
    notes = [
        Text(f"{clean(each.name)}: dropped, {clean(each.seen.failed, 300)}", style="yellow")
        for each in result.judged
        if each.seen.failed
    ]
    words = [Text(f"  {clean(line)}") for line in plan.words]
    meaning = Text("predicted: before these plans were judged; after: with all that was learned", style="dim")
    return Group(title, Text(), table, meaning, *notes, Text(), ending, Text(), *_learned(result), Text(), *words)


def _cells(each: Judged) -> list[str]:
    seen = each.seen
    verdict = "-" if seen.failed else "no" if not seen.fits else "remat" if "remat" in seen.verdict else "yes"
    return [
        "-" if seen.seconds is None else format_seconds(seen.seconds),
        "-" if seen.seconds is None else f"{seen.error:.0%}",
        format_seconds(each.predicted_before_s),
        format_seconds(each.predicted_after_s),
        "-" if seen.peak_bytes is None else format_bytes(seen.peak_bytes),
        verdict,
    ]


def _learned(result: Refinement) -> list[RenderableType]:
    fit = result.fit
    if not fit.figures:
        return [Text("Nothing was learned: what was seen moves no figure.")]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("figure", no_wrap=True)
    for column in ("shipped", "fitted", "+-"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in fit.figures:
        table.add_row(each.figure, f"{each.shipped:.3g}", f"{each.value:.3g}", f"{each.error:.2g}")
    many = "observation" if fit.observations == 1 else "observations"
    before, after = fit.residual_before, fit.residual
    what = "share of hidden communication"
    if result.judge == "measure":
        before, after, what = math.expm1(before), math.expm1(after), "time"
    said = f"Learned from {fit.observations} {many}: median error of the {what} {before:.0%}, now {after:.0%}"
    return [Text(said), table]
