"""One tensor's spec explained for a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoshard.plan import Alternative, Explanation, Plan, spec_text
from autoshard.report._names import clean
from autoshard.report._schedule import schedule_report
from autoshard.units import format_bytes, format_seconds


SHOWN = 10
"""Alternatives that are shown; the rest is counted."""

HOW = {
    "solved": "everything else chosen again",
    "held": "everything else as it is",
    "impossible": "its neighbours exclude it",
}


def explanation_report(found: Explanation, plan: Plan | None = None) -> RenderableType:
    """What the tensor has, who fixed it, and every other spec with its price; then the pipeline of its `plan`."""
    drawn = None if plan is None else schedule_report(plan)
    told = _explained(found)
    return told if drawn is None else Group(told, Text(), Text("Pipeline", style="bold"), drawn)


def _explained(found: Explanation) -> RenderableType:
    lines: list[RenderableType] = [
        Text.assemble(
            (clean(found.name), "bold"), f" ({found.role}) is split ", (spec_text(found.spec, found.shape), "cyan")
        )
    ]
    if found.fixed:
        lines.append(Text(f"Fixed: {clean(found.fixed)}", style="yellow"))
    if found.shares:
        more = f" and {len(found.shares) - 3} more" if len(found.shares) > 3 else ""
        lines.append(Text(f"Has one spec with {', '.join(clean(n) for n in found.shares[:3])}{more}."))
    if not found.alternatives:
        lines.append(Text("It is a constant or of one element: there is nothing to choose."))
        return Group(*lines)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for column, right in (("spec", 0), ("step", 1), ("against it", 1), ("peak", 1), ("what it adds, what it takes", 0)):
        table.add_column(column, justify="right" if right else "left", no_wrap=bool(right))
    for one in found.alternatives[: SHOWN + 1]:
        table.add_row(
            Text(spec_text(one.spec, found.shape), style="cyan" if one.chosen else ""),
            "-" if one.step_time_s is None else format_seconds(one.step_time_s),
            _delta(one),
            "-" if one.peak_bytes is None else format_bytes(one.peak_bytes),
            Text(_what(one)),
        )
    lines.append(Padding(table, (1, 0, 0, 2)))
    if any(one.how == "held" for one in found.alternatives):
        lines.append(Text(f"  * {HOW['held']}; without it, {HOW['solved']}", style="dim"))
    rest = len(found.alternatives) - SHOWN - 1
    if rest > 0:
        lines.append(Text(f"  and {rest} more that are slower", style="dim"))
    return Group(*lines)


def _delta(one: Alternative) -> str:
    if one.chosen or one.delta_s is None:
        return "chosen" if one.chosen else "-"
    sign = "+" if one.delta_s >= 0 else "-"
    return f"{sign}{format_seconds(abs(one.delta_s))}{'' if one.how == 'solved' else '*'}"


def _what(one: Alternative) -> str:
    if one.chosen:
        return ""
    if one.step_time_s is None:
        return HOW[one.how]
    added = [f"{c.kind} over {', '.join(c.axes)}" for c in one.collectives[:1]]
    if added and added[0] in one.wins_if:
        added = []
    return "; ".join([*added, one.wins_if])
