"""Tables of a plan for a terminal: baselines, other recipes, other meshes, and collectives."""

import math

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoshard.base.units import format_bytes, format_seconds
from autoshard.planning import Collective, Plan, Recipe, axis_words, not_held_words, shortened
from autoshard.report import figures
from autoshard.report.display import clean
from autoshard.report.terminal.explanation_report import cause_text


COLLECTIVES = 6
MESHES = RECIPES = 6
"""Most rows that a table shows; the rest is counted."""


def plain_table(*columns: str, left: int = 1) -> Table:
    """Return a table without rows whose first `left` columns contain names, aligned left.

    The other columns contain figures, aligned right. Names are cut on a narrow terminal, figures never.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=index >= left)
    return table


def shown_name(text: str, width: int | None = None, style: str = "") -> Text:
    """Return a name in one line, without control characters.

    Beyond `width` characters its middle becomes an ellipsis (None: no limit). A narrower column cuts its end.
    """
    return Text(clean(text, width), style=style, no_wrap=True, overflow="ellipsis")


def baseline_table(plan: Plan) -> RenderableType | None:
    """Return the table of this plan and, below, the baselines: those that fit first, each part by step time.

    `vs plan` is a baseline's step time over the plan's, blank if the latter is 0. Both are of eager torch if the plan's
    is known; the other figures are of compiled ops. A last line names the baselines that are faster, and that the
    plan's form cannot hold. None without baselines.
    """
    if not plan.baselines:
        return None
    eager = plan.prediction.eager_step_time_s is not None
    steps = ("eager", "vs plan", "compiled") if eager else ("step", "vs plan")
    table = plain_table("", *steps, "MFU", *(() if eager else ("compute",)), "exposed", "peak", "fits")
    for name, row in [("this plan", plan.prediction), *figures.ordered_baselines(plan)]:
        own = row is plan.prediction
        comparable = not eager or row.eager_step_time_s is not None
        ratio = row.compared_s / plan.prediction.compared_s if plan.prediction.compared_s > 0 else math.nan
        table.add_row(
            shown_name(name, style="bold" if own else ""),
            format_seconds(row.compared_s) if comparable else "-",
            "" if own or math.isnan(ratio) or not comparable else f"{ratio:.2f}x",
            *((format_seconds(row.step_time_s),) if eager else ()),
            "-" if row.mfu is None else f"{row.mfu:.1%}",
            *(() if eager else (format_seconds(row.compute_s),)),
            format_seconds(row.exposed_comm_s),
            format_bytes(row.peak_bytes),
            Text("yes", style="green") if row.fits else Text("no", style="red"),
            style="" if row.fits else "dim",
        )
    body: list[RenderableType] = [Padding(table, (0, 0, 0, 2))]
    if plan.origin.not_held:
        body.append(Text(f"  {clean(not_held_words(plan))}", style="dim"))
    return Group(*body)


def recipe_table(plan: Plan) -> RenderableType | None:
    """Return the table of the chosen recipe and at most `RECIPES` others, in the order of `plan.recipe.tried`.

    An asterisk marks recipes on the frontier of memory against time. None if fewer than two recipes were tried.
    """
    tried = plan.recipe.tried if plan.recipe is not None else ()
    if len(tried) < 2:
        return None
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("recipe")
    for name in (figures.recipe_heading(plan), "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why not")
    for row in tried[: RECIPES + 1]:
        step_s = figures.recipe_seconds(row)
        mark = " *" if row["frontier"] else ""
        table.add_row(
            Text(clean(shortened(str(Recipe(tuple(row["choices"].items())))))),
            "" if step_s is None else format_seconds(step_s),
            "" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"]) + mark,
            Text(clean(row["verdict"] or "chosen")),
        )
    body: list[RenderableType] = [Padding(table, (0, 0, 0, 2))]
    hidden_rows = len(tried) - RECIPES - 1
    body.append(
        Text(
            f"  {f'and {hidden_rows} more; ' if hidden_rows > 0 else ''}* none is both faster and smaller", style="dim"
        )
    )
    return Group(*body)


def mesh_table(plan: Plan) -> RenderableType | None:
    """Return the table of at most `MESHES` meshes that the search did not choose; None without any.

    The first of `plan.meshes` is the chosen one. Meshes that were not solved share a line, with the least bound of
    their step times.
    """
    others, unsolved = [tried for tried in plan.meshes[1:] if not tried.unsolved], figures.unsolved_meshes(plan)
    if not others and not unsolved:
        return None
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("mesh")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("why not")
    for tried in others[:MESHES]:
        bound = "" if tried.bound_s is None else f">= {format_seconds(tried.bound_s)}"
        step = bound if tried.step_time_s is None else format_seconds(tried.step_time_s)
        table.add_row(Text(clean(tried.mesh)), step, Text(clean(tried.verdict)))
    body: list[RenderableType] = [Padding(table, (0, 0, 0, 2))] if others else []
    if len(others) > MESHES:
        body.append(Text(f"  and {len(others) - MESHES} more, none faster", style="dim"))
    if unsolved:
        body.append(Text(f"  {clean(unsolved)}", style="dim"))
    body += [Text(f"  {note}", style="dim") for note in figures.mesh_notes(plan)]
    return Group(*body)


def collective_table(plan: Plan, width: int) -> RenderableType | None:
    """Return the table of collectives, summed by kind, axes and overlap; None without collectives.

    Rows are ordered by total seconds, the most first, at most `COLLECTIVES`. From a `width` of 100 characters each row
    names the cause of its costliest collective. `exposed` is the waiting time, or `hidden` if it is 0.
    """
    groups: dict[tuple[str, tuple[str, ...], bool], list[Collective]] = {}
    for collective in sorted(plan.prediction.collectives, key=lambda c: -c.seconds):
        groups.setdefault((collective.kind, collective.axes, collective.hidden), []).append(collective)
    if not groups:
        return None
    roomy = width >= 100
    table = plain_table(
        "kind", "over", *(["most of it for"] if roomy else []), "times", "wire", "time", "exposed", left=2 + roomy
    )
    ordered = sorted(groups.items(), key=lambda item: -sum(c.seconds for c in item[1]))
    for (kind, axes, _), members in ordered[:COLLECTIVES]:
        waited = sum(c.waited_s for c in members)
        table.add_row(
            shown_name(kind),
            shown_name(", ".join(axis_words(axes))),
            *([shown_name(cause_text(plan, members[0]), width - 66)] if roomy else []),
            str(sum(c.count for c in members)),
            format_bytes(sum(c.wire_bytes for c in members)),
            format_seconds(sum(c.seconds for c in members)),
            Text(format_seconds(waited), style="red") if waited > 0 else Text("hidden", style="dim"),
        )
    body: list[RenderableType] = [Padding(table, (0, 0, 0, 2))]
    if len(ordered) > COLLECTIVES:
        rest = sum(c.seconds for _, members in ordered[COLLECTIVES:] for c in members)
        body.append(Text(f"  and {len(ordered) - COLLECTIVES} more of {format_seconds(rest)} together", style="dim"))
    return Group(*body)
