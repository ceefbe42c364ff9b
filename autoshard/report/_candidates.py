"""The plans of a portfolio side by side."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.plan import PlanCandidate, mesh_words
from autoshard.report._figures import prediction_figures
from autoshard.report._names import clean
from autoshard.units import format_bytes, format_seconds


def candidate_figures(candidates: Sequence[PlanCandidate]) -> list[dict[str, Any]]:
    """The list under `candidates` of `autoshard plan --json`."""
    return [
        {"name": each.name, "why": each.why, "mesh": dict(each.plan.mesh), **prediction_figures(each.plan.prediction)}
        for each in candidates
    ]


def candidates_report(candidates: Sequence[PlanCandidate]) -> RenderableType:
    """A table for a terminal, in the order given: ours, then by predicted time."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for column in ("step", "vs plan", "exposed", "peak"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("how it was found")
    ours = candidates[0].plan
    for each in candidates:
        row = each.plan.prediction
        ratio = row.step_time_s / ours.prediction.step_time_s if ours.prediction.step_time_s > 0 else 1.0
        elsewhere = f", on mesh {mesh_words(each.plan.mesh)}" if each.plan.mesh != ours.mesh else ""
        table.add_row(
            Text(clean(each.name, 28), style="bold" if each.plan is ours else ""),
            format_seconds(row.step_time_s),
            "" if each.plan is ours else f"{ratio:.2f}x",
            format_seconds(row.exposed_comm_s),
            format_bytes(row.peak_bytes),
            Text(clean(f"{each.why}{elsewhere}")),
        )
    alone = [Text("  no other plan was found that really differs", style="dim")] if len(candidates) == 1 else []
    return Group(Text(), Text("Candidates that really differ", style="bold"), table, *alone)
