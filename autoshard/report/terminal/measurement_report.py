"""Reports of measurements and refinements on a terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.base.units import format_bytes, format_seconds
from autoshard.exec import GROSS, Judged, Refinement
from autoshard.planning import Plan, mesh_words
from autoshard.report.display import clean
from autoshard.report.terminal.comparison import COMPLETED


def measurement_report(plan: Plan, figures: Mapping[str, Any]) -> RenderableType:
    """Return the report of a measured plan; `figures` is the object that `autoshard measure --json` prints.

    It has predicted and measured times and collectives, and the verdicts of comparisons that were made.
    """
    mesh = mesh_words(plan.mesh)
    title = Text(f"{clean(plan.program_name, 60)} on {figures['device']}, mesh {mesh}", style="bold")
    predicted = plan.prediction.step_time_s
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for index, column in enumerate(("", "predicted", "measured")):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    table.add_row("step time", format_seconds(predicted), format_seconds(figures["step_time_s"]))
    if len(figures["step_times_s"]) > 1:
        table.add_row("between its quartiles", "", f"{figures['spread']:.0%}")
    for axis, both in figures["collectives"]["wire_bytes"].items():
        name = Text(f"on the wire over {clean(axis)}")
        table.add_row(name, format_bytes(both["predicted"]), format_bytes(both["compiled"]))
    for kind, both in figures["collectives"]["counts"].items():
        table.add_row(Text(f"{kind} (times)"), str(both["predicted"]), str(both["compiled"]))
    for time in figures["collectives"].get("times", ()):
        name = Text(f"{time['kind']} over {clean(', '.join(time['axes']))} (time, waiting included)")
        table.add_row(name, _predicted_time(plan, time), format_seconds(time["seconds"]))
    parts: list[RenderableType] = [title, Text(), table, *_outside_band(plan, figures["step_time_s"])]
    if figures.get("profiler"):
        parts.append(Text(f"No time of each collective: {clean(figures['profiler'], 300)}", style="dim"))
    if figures.get("eager"):
        parts += [Text(), _eager(figures["eager"])]
    if figures.get("check_skipped"):
        parts += [Text(), Text(clean(figures["check_skipped"], 400), style="yellow")]
    if "max_rel_diff" in figures:
        parts += [Text(), _check(figures)]
        parts += [_edge(name, edge) for name, edge in figures["edges"].items()]
    return Group(*parts)


def _outside_band(plan: Plan, measured_s: float) -> list[RenderableType]:
    """Return a sentence if the measured time is outside of the factor that the plan states for some of its ops."""
    factor, predicted_s = plan.time_within, plan.prediction.step_time_s
    if factor is None or min(predicted_s, measured_s) <= 0:
        return []
    if max(predicted_s / measured_s, measured_s / predicted_s) <= factor:
        return []
    unsure = ", ".join(f"{each.ops} ({each.time_share:.0%} of the predicted step)" for each in plan.unsure)
    return [Text(f"The measured step is outside of the factor {factor:.1f} that the plan states for {clean(unsure)}.")]


def _predicted_time(plan: Plan, time: Mapping[str, Any]) -> str:
    """Return the predicted seconds of all collectives of a measured one's kind and axes as text; `-` if
    there are none.
    """
    alike = [
        c.seconds for c in plan.prediction.collectives if c.kind == time["kind"] and set(c.axes) == set(time["axes"])
    ]
    return format_seconds(sum(alike)) if alike else "-"


def _eager(figures: Mapping[str, Any]) -> Text:
    """Return the verdict of the comparison with eager torch, or the reason for which it was skipped."""
    if figures["skipped"]:
        return Text(clean(figures["skipped"], 400), style="yellow")
    passed, worst = figures["agrees"], figures["worst"]
    text = Text("AGREES" if passed else "DIFFERS", style="bold green" if passed else "bold red")
    plural = {"buffer": "buffers", "gradient": "gradients", "output": "outputs", "loss": "losses"}
    counts = [
        kind if kind == "loss" and count == 1 else f"{count} {kind if count == 1 else plural[kind]}"
        for kind, count in figures["compared"].items()
    ]
    words = f" {'with' if passed else 'from'} eager torch: {', '.join(counts)}"
    if worst is not None:
        name = worst["kind"] if worst["kind"] == worst["name"] else f"{worst['kind']} {clean(worst['name'])}".strip()
        words += f"; the largest difference is {worst['rel_diff']:.1e} of a tensor's maximum ({name})"
    if worst is not None and not passed:
        words += f", and {worst['allowed']:.0e} is allowed"
    if figures["zeros"]:
        words += f"; {_listed(figures['zeros'])} zero but for rounding, in both"
    text.append(words, style="not bold default")
    if figures["form"]:
        text.append(f"; compared in this form: {clean(figures['form'])}", style="not bold default")
    return text


def _listed(names: Sequence[str]) -> str:
    """Return the first name, with the number of others and a verb, such as `a and 2 more are`."""
    return clean(names[0]) + (f" and {len(names) - 1} more are" if len(names) > 1 else " is")


_EDGES = {
    "ends and ties": "first and last indices and equal values",
    "indices past the ends": "indices out of range",
}
"""Edge case of a check -> words for its inputs; other cases have words of their own."""


def _edge(name: str, figures: Mapping[str, Any] | None) -> Text:
    """Return the verdict of the comparison with edge values among the inputs; `name` is that of the edge case.

    Without `figures` the values were not compared.
    """
    inputs = f"inputs that have {_EDGES.get(name, name)}"
    if figures is None:
        why = "collectives of CPUs drop it under max and min, in plain JAX as well, and Python code may raise on it"
        return Text(f"Not compared for {inputs}: {why}", style="dim")
    passed = figures["passed"]
    text = Text("AGREES" if passed else "DIFFERS", style="bold green" if passed else "bold red")
    words = f" with the unplanned run also for {inputs}"
    if not passed:
        words += f": by {figures['worst_rel_diff']:.1e} at {clean(figures['worst'])}"
        words += f"; {figures['worst_allowed']:.0e} is allowed there"
    text.append(words, style="not bold default")
    return text


def _check(figures: Mapping[str, Any]) -> Text:
    """Return the verdict of the comparison with the unplanned run, and the differences that are allowed."""
    passed = figures["passed"]
    allowed = figures["worst_allowed"]
    exact, rounding = figures.get("float64"), figures.get("rounding", False)
    undecided = passed and allowed > GROSS and exact is None
    text = Text("AGREES" if passed else "DIFFERS", style="bold green" if passed else "bold red")
    if undecided:
        text = Text("UNDECIDED", style="bold yellow")
    words = " in this precision: " if undecided else " with the unplanned run: "
    words += f"{'the largest' if passed else 'a'} difference is "
    words += f"{figures['worst_rel_diff']:.1e} of a tensor's maximum (at {clean(figures['worst'])}); "
    words += (
        f"both agree to {exact:.0e} in float64, so it is rounding" if rounding else f"{allowed:.0e} is allowed there"
    )
    if allowed > figures["tolerance"] and not rounding:
        words += ", twice the rounding of the unplanned step itself"
    if exact is not None and not rounding:
        words += f"; in float64 the largest difference is {exact:.1e}"
    elif figures.get("float64_note"):
        words += f"; not compared in float64, where rounding would vanish: {clean(figures['float64_note'], 200)}"
    if undecided:
        words += ", which would hide an error: check the step in float32"
    if figures["noise"]:
        words += f"; {_listed(figures['noise'])} rounding noise alone, in both"
    text.append(words, style="not bold default")
    if figures.get("floor_note") and not rounding:
        why = clean(figures["floor_note"], 200)
        text.append(f"; the rounding of the unplanned step is not known: {why}", style="not bold default")
    return text


def refinement_report(result: Refinement) -> RenderableType:
    """Return the report of a refinement: judged plans, best first, the figures that changed, and the plan in words."""
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
    meaning = "predicted: before these plans were judged; after: with all that was learned"
    if any(each.name.endswith("*") for each in result.judged):
        meaning += f"; {COMPLETED}"
    return Group(
        title,
        *_explained(result),
        Text(),
        table,
        Text(meaning, style="dim"),
        *notes,
        Text(),
        ending,
        Text(),
        *_learned(result),
        Text(),
        *words,
    )


EXPLAINED = 0.1
"""Relative difference from a judged step time below which a prediction explains it."""


def _explained(result: Refinement) -> list[RenderableType]:
    """Return a sentence on the best plan's judged step time and the predictions of it; nothing without a time."""
    best, judge = result.best, "The compiler says" if result.judge == "compile" else "Measured"
    seconds = best.seen.seconds
    if seconds is None or seconds <= 0:
        return []
    within = abs(best.predicted_after_s - seconds) <= EXPLAINED * seconds
    words = (
        f"{judge} {format_seconds(seconds)} +- {best.seen.error:.0%} a step; predicted were "
        f"{format_seconds(best.predicted_before_s)} before, {format_seconds(best.predicted_after_s)} after learning: "
    )
    words += "explained." if within else "the difference is not explained by what was learned."
    return [Text(words, style="" if within else "yellow")]


def _cells(each: Judged) -> list[str]:
    """Return the figures of a judged plan for its row: seen seconds, their error, both predictions, peak
    and verdict.
    """
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
    """Return a summary and the table of figures that the refinement learned, or a sentence if it learned none."""
    fit = result.fit
    stored = [Text(f"Observations are stored in {result.stored}.")] if result.stored else []
    if not fit.figures:
        return [Text("Nothing was learned: what was seen moves no figure."), *stored]
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
    summary = f"Learned from {fit.observations} {many}: median error of the {what} {before:.0%}, now {after:.0%}"
    if stored:
        later = f"Later plans of {result.plan.topology} are priced with these figures; --no-calibration ignores them."
        stored.append(Text(later))
    return [Text(summary), table, *stored]
