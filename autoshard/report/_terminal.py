"""A plan on one screen."""

import math
from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoshard.plan import Plan, Prediction
from autoshard.report._binding import what_binds
from autoshard.report._figures import best_baseline
from autoshard.report._names import clean, fold
from autoshard.units import format_bytes, format_seconds


BAR = 46
"""Characters in a full bar; with its label it stays within 80 columns."""


def terminal_report(plan: Plan, wall_s: Mapping[str, float] | None = None) -> RenderableType:
    """The plan as a rich renderable for 80 columns and more: the verdict first, details by weight after it.

    `wall_s` is how long each phase of planning took, if it is to be shown.
    """
    parts: list[RenderableType] = [_verdict(plan)]
    parts += _section("Plan", Text("\n").join(Text(f"  {clean(line)}") for line in plan.words))
    parts += _section("Largest parameters", _parameters(plan))
    parts += _section("Step time", _time(plan.prediction))
    parts += _section("Memory of one device at the peak", _memory(plan))
    parts += _section("Against plans that people write", _baselines(plan))
    parts += _section("Collectives that cost most", _collectives(plan.prediction))
    parts += _section("What binds", _bullets(what_binds(plan)))
    if plan.warnings:
        parts += _section("Warnings", _bullets(plan.warnings, "yellow"))
    if wall_s:
        phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in wall_s.items())
        parts += [Text(), Text(f"Planned in: {phases}", style="dim")]
    return Group(*parts)


def _verdict(plan: Plan) -> RenderableType:
    prediction = plan.prediction
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    devices = math.prod(plan.mesh.values())
    noun = "device" if devices == 1 else "devices"
    title = Text(f"{clean(plan.program_name, 60)} on {plan.topology} ({devices} {noun}), mesh {mesh}", style="bold")
    used = f"{format_bytes(prediction.peak_bytes)} of {format_bytes(plan.memory_limit_bytes)} a device"
    verdict = Text("FITS", style="bold green") if prediction.fits else Text("DOES NOT FIT", style="bold red")
    verdict.append(f": {used}", style="not bold default")
    if plan.memory_limit_bytes:
        verdict.append(f" ({prediction.peak_bytes / plan.memory_limit_bytes:.0%})", style="not bold default")
    step = Text("STEP", style="bold").append(f": {format_seconds(prediction.step_time_s)}", style="not bold")
    if prediction.mfu is not None:
        step.append(f", MFU {prediction.mfu:.1%}", style="not bold")
    step.append(f"; {_against_best(plan)}", style="not bold")
    return Group(title, Text(), verdict, step)


def _against_best(plan: Plan) -> str:
    best = best_baseline(plan)
    if best is None:
        return "no baseline fits" if plan.baselines else "no baseline to compare with"
    name, baseline = best
    if plan.prediction.step_time_s <= 0:
        return f"the best baseline that fits is {name}"
    ratio = baseline.step_time_s / plan.prediction.step_time_s
    if abs(ratio - 1) < 5e-4:
        return f"as fast as the best baseline that fits, {name}"
    return f"{ratio:.2f}x the speed of the best baseline that fits, {name}"


def _section(title: str, body: RenderableType | None) -> list[RenderableType]:
    return [] if body is None else [Text(), Text(title, style="bold"), body]


def _bullets(lines: tuple[str, ...], style: str = "") -> RenderableType | None:
    if not lines:
        return None
    table = Table.grid(padding=(0, 1, 0, 1))
    for line in lines:
        table.add_row(Text("-"), Text(clean(line), style=style))
    return table


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True, overflow="ellipsis")
    return table


def _parameters(plan: Plan) -> RenderableType | None:
    names = [name for name, role in plan.roles.items() if role == "parameter"]
    groups = fold(names, key=lambda name: (plan.shapes[name], plan.arguments[name]))
    if not groups:
        return None
    table = _table("parameter", "shape", "split by", "of one device", left=3)
    rows = []
    for shown, members in groups:
        spec, shape = plan.arguments[members[0]], plan.shapes[members[0]]
        shards = spec.shards(plan.mesh)
        rows.append((math.prod(shape) * len(members), shown, len(members), shape, spec, shards))
    rows.sort(key=lambda row: -row[0])
    for _, shown, count, shape, spec, shards in rows[:8]:
        dims = "x".join(map(str, shape)) or "scalar"
        table.add_row(
            Text(clean(shown, 36)),
            Text(f"{count} of {dims}" if count > 1 else dims),
            Text(str(spec) if spec.axes else "whole", style="cyan" if spec.axes else "yellow"),
            "all" if shards == 1 else f"1/{shards}",
        )
    body: list[RenderableType] = [Padding(table, (0, 0, 0, 2))]
    if len(rows) > 8:
        body.append(Text(f"  and {len(rows) - 8} more", style="dim"))
    return Group(*body)


def _bar(parts: list[tuple[float, str, str]], whole: float) -> Text:
    """Parts of (value, character, style), drawn to scale; a part too thin to draw is left out."""
    bar = Text("  ")
    drawn = position = 0.0
    for value, character, style in parts:
        position += value / whole * BAR if whole > 0 else 0
        cells = round(position) - round(drawn)
        bar.append(character * cells, style=style)
        drawn = position
    return bar


def _time(prediction: Prediction) -> RenderableType:
    total = prediction.compute_s + prediction.exposed_comm_s
    bar = _bar([(prediction.compute_s, "█", "green"), (prediction.exposed_comm_s, "▒", "red")], total)
    legend = Text("  ")
    legend.append("█ ", style="green").append(f"compute {format_seconds(prediction.compute_s)}   ")
    legend.append("▒ ", style="red").append(f"exposed communication {format_seconds(prediction.exposed_comm_s)}")
    hidden = Text(f"  and {format_seconds(prediction.hidden_comm_s)} of communication hidden behind the compute")
    return Group(bar, legend, hidden)


_MEMORY_STYLES = ("blue", "cyan", "magenta", "green", "yellow", "red", "bright_blue", "bright_magenta")
_SHADES = "█▓▒░"


def _memory(plan: Plan) -> RenderableType:
    prediction = plan.prediction
    kinds = sorted(((size, kind) for kind, size in prediction.memory.items() if size > 0), reverse=True)
    marks = [
        (size, _SHADES[i % len(_SHADES)], _MEMORY_STYLES[i % len(_MEMORY_STYLES)]) for i, (size, _) in enumerate(kinds)
    ]
    bar = _bar([(float(size), mark, style) for size, mark, style in marks], max(plan.memory_limit_bytes, 1))
    free = max(BAR + 2 - len(bar), 0)
    bar.append("·" * free, style="dim").append(f" {format_bytes(plan.memory_limit_bytes)}", style="dim")
    grid = Table.grid(padding=(0, 3, 0, 0))
    cells = []
    for (size, mark, style), (_, kind) in zip(marks, kinds, strict=True):
        cells.append(
            Text("  ").append(f"{mark} ", style=style).append(f"{kind.replace('_', ' ')} {format_bytes(size)}")
        )
    for start in range(0, len(cells), 2):
        grid.add_row(*cells[start : start + 2])
    return Group(bar, grid)


def _baselines(plan: Plan) -> RenderableType | None:
    if not plan.baselines:
        return None
    table = _table("", "step", "vs plan", "MFU", "compute", "exposed", "peak", "fits")
    ordered = sorted(plan.baselines.items(), key=lambda item: (not item[1].fits, item[1].step_time_s))
    for name, row in [("this plan", plan.prediction), *ordered]:
        own = row is plan.prediction
        ratio = row.step_time_s / plan.prediction.step_time_s if plan.prediction.step_time_s > 0 else math.nan
        table.add_row(
            Text(clean(name, 22), style="bold" if own else ""),
            format_seconds(row.step_time_s),
            "" if own or math.isnan(ratio) else f"{ratio:.2f}x",
            "-" if row.mfu is None else f"{row.mfu:.1%}",
            format_seconds(row.compute_s),
            format_seconds(row.exposed_comm_s),
            format_bytes(row.peak_bytes),
            Text("yes", style="green") if row.fits else Text("no", style="red"),
            style="" if row.fits else "dim",
        )
    return Padding(table, (0, 0, 0, 2))


def _collectives(prediction: Prediction) -> RenderableType | None:
    if not prediction.collectives:
        return None
    table = _table("kind", "over", "for", "times", "wire", "time", "", left=3)
    ordered = sorted(prediction.collectives, key=lambda c: -c.seconds)
    for collective in ordered[:6]:
        table.add_row(
            collective.kind,
            Text("x".join(collective.axes)),
            Text(clean(collective.cause, 22)),
            str(collective.count),
            format_bytes(collective.wire_bytes),
            format_seconds(collective.seconds),
            Text("hidden", style="dim") if collective.hidden else Text("exposed", style="red"),
        )
    body: list[RenderableType] = [Padding(table, (0, 0, 0, 2))]
    if len(ordered) > 6:
        rest = sum(c.seconds for c in ordered[6:])
        body.append(Text(f"  and {len(ordered) - 6} more of {format_seconds(rest)} together", style="dim"))
    return Group(*body)
