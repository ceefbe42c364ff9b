"""Comparison of the plan with its baselines, and of the plans of a portfolio with each other."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.base.units import format_bytes, format_seconds
from autoshard.exec import decided, pair_error
from autoshard.planning import Plan, PlanCandidate, Prediction, mesh_words
from autoshard.report.display import clean
from autoshard.report.figures import prediction_figures


COMPLETED = "*: intermediates chosen by autoshard"
"""Words for the `*` behind the name of a baseline that our solver completed."""


@dataclasses.dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One way to split the program."""

    name: str
    """Name of the row: `plan`; `fsdp*` for a baseline that our solver completed; `fsdp` for one that XLA's propagation
    completes from its arguments.
    """
    prediction: Prediction | None
    """Prediction of the plan; None if propagation decides, whose choice is unknown before compiling."""
    compiled: dict[str, Any] | None = None
    """Result of `compile_figures` for the compiled plan."""
    measured: dict[str, Any] | None = None
    """Result of `measurement_figures` for the plan's runs."""
    failed: str = ""
    """Reason for which the plan could not be compiled or measured."""
    ratio_error: float | None = None
    """Share of the longer of two predicted steps by which their difference may be wrong; None if it is not known."""


def candidates(
    plan: Plan, baselines: Mapping[str, Plan], propagated: bool, offered: Sequence[PlanCandidate] = ()
) -> list[tuple[str, Plan, bool]]:
    """Return (name, plan, True if its prediction holds) for the plan, the `offered` candidates and all baselines.

    Completed baselines are named `fsdp*`. An offered candidate with such a name or the plan's is left out. With
    `propagated`, each baseline occurs a second time as `fsdp`, without its pins, and its prediction does not hold.
    """
    names = {"plan", *(f"{name}*" for name in baselines)}
    rows = [("plan", plan, True)]
    rows += [(each.name, each.plan, True) for each in offered if each.name not in names]
    for name, baseline in baselines.items():
        rows.append((f"{name}*", baseline, True))
        if propagated:
            rows.append((name, dataclasses.replace(baseline, pins=(), module_hash=""), False))
    return rows


def comparison_figures(rows: Sequence[ComparisonRow]) -> dict[str, Any]:
    """Return the JSON object of `autoshard compare --json`; absent results are None."""
    return {
        "plans": {
            row.name: {
                "predicted": row.prediction and prediction_figures(row.prediction),
                "compiled": row.compiled,
                "measured": row.measured,
                "failed": row.failed or None,
                "undecided": undecided(row, rows),
            }
            for row in rows
        }
    }


def undecided(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> list[str]:
    """Return the names of other plans whose step differs by less than the error of pairs of such steps.

    Steps are estimates of two compiled plans, else predictions of two plans that are not compiled.
    """
    return [
        other.name
        for other in rows
        if other is not row and (error := _pair_error(row, other)) and _near(row, other, error)
    ]


def _near(row: ComparisonRow, other: ComparisonRow, error: float) -> bool:
    """Return True if the steps of two plans differ by at most the share `error` of the longer one."""
    return not decided(_seconds(row) or 0.0, _seconds(other) or 0.0, error)


def _estimated(row: ComparisonRow) -> float | None:
    """Return the estimated step of a compiled plan in seconds; None if it is not compiled or has no estimate."""
    return row.compiled["step_time_s"]["estimated"] if row.compiled else None


def _seconds(row: ComparisonRow) -> float | None:
    """Return the estimated step of a compiled plan, else the predicted one; None if it has neither."""
    return _estimated(row) if row.compiled else row.prediction.step_time_s if row.prediction else None


def _pair_error(row: ComparisonRow, other: ComparisonRow) -> float | None:
    """Return the share of the longer of two steps by which their difference may be wrong; None if it is not known."""
    mine, theirs = _seconds(row), _seconds(other)
    if mine is None or theirs is None or bool(row.compiled) != bool(other.compiled):
        return None
    if not row.compiled or not other.compiled:
        return row.ratio_error if other.ratio_error is not None else None
    return pair_error(row.compiled["time"]["by_kind"], other.compiled["time"]["by_kind"], max(mine, theirs))


def comparison_report(plan: Plan, rows: Sequence[ComparisonRow]) -> RenderableType:
    """Return the table for a terminal, fastest first by the best available evidence.

    Columns of compiled and measured figures are left out if no row has them.
    """
    mesh = mesh_words(plan.mesh)
    title = Text(f"{clean(plan.program_name, 60)} on {plan.topology}, mesh {mesh}", style="bold")
    compiled = any(row.compiled for row in rows)
    measured = any(row.measured for row in rows)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    columns = ["predicted", "exposed", "MFU", "peak", "fits"]
    columns += ["compiled", "reserved", "fits"] if compiled else []
    columns += ["measured"] if measured else []
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in sorted(rows, key=_evidence):
        cells = _predicted(row.prediction)
        cells += _compiled(row.compiled) if compiled else []
        cells += [format_seconds(row.measured["step_time_s"]) if row.measured else "-"] if measured else []
        table.add_row(Text(clean(row.name, 28), style="bold" if row.name == "plan" else ""), *cells)
    notes = [Text(f"{row.name}: {clean(row.failed, 300)}", style="yellow") for row in rows if row.failed]
    notes += _close(rows)
    meaning = f"{COMPLETED}; without it, by XLA's propagation from the arguments"
    return Group(title, Text(), table, *([Text(meaning, style="dim")] if len(rows) > 1 else []), *notes)


def _close(rows: Sequence[ComparisonRow]) -> list[Text]:
    """Return a note on plans that estimates, or predictions, cannot separate; empty if there are none.

    Only ties with the fastest of the plans that are not measured count. Plans that do not fit are left out.
    """
    compiled = any(row.compiled for row in rows)
    timed = [r for r in rows if _seconds(r) is not None and not r.measured and bool(r.compiled) == compiled]
    timed = sorted(
        (r for r in timed if compiled or (r.prediction and r.prediction.fits)), key=lambda r: _seconds(r) or 0
    )
    close = undecided(timed[0], timed) if timed else []
    if not close:
        return []
    error = max(_pair_error(timed[0], row) or 0.0 for row in timed if row.name in close)
    among = ", ".join([timed[0].name, *close])
    what = "two estimates from schedules" if compiled else "two predictions"
    return [Text(f"undecided among {clean(among, 300)}: the ratio of {what} may be {error:.0%} wrong", style="dim")]


def _evidence(row: ComparisonRow) -> tuple[bool, float]:
    """Return the sort key of a row: measured time, else estimated, else predicted.

    A row that has neither and does not fit, or has no prediction, is last.
    """
    if row.measured:
        return False, row.measured["step_time_s"]
    estimated = row.compiled["step_time_s"]["estimated"] if row.compiled else None
    if estimated:
        return False, estimated
    fits = row.prediction is not None and row.prediction.fits
    return not fits, row.prediction.step_time_s if row.prediction else float("inf")


def _predicted(prediction: Prediction | None) -> list[str]:
    """Return the five predicted figures of a row as text; dashes without a prediction."""
    if prediction is None:
        return ["-"] * 5
    return [
        format_seconds(prediction.step_time_s),
        format_seconds(prediction.exposed_comm_s),
        "-" if prediction.mfu is None else f"{prediction.mfu:.1%}",
        format_bytes(prediction.peak_bytes),
        "yes" if prediction.fits else "no",
    ]


def _compiled(figures: dict[str, Any] | None) -> list[str]:
    """Return estimated step, reserved memory and verdict of a compiled row as text; dashes if it is not compiled.

    The memory is what the program needs if it does not fit. `remat` means that it fits only with the compiler's own
    rematerialisation.
    """
    if figures is None:
        return ["-"] * 3
    estimated, memory = figures["step_time_s"]["estimated"], figures["peak_bytes"]
    held = memory["reserved"] or memory["compiled"]
    verdict = {"fits": "yes", "does not fit": "no"}.get(figures["verdict"], "remat")
    return ["-" if not estimated else format_seconds(estimated), "-" if not held else format_bytes(held), verdict]


def candidate_figures(candidates: Sequence[PlanCandidate]) -> list[dict[str, Any]]:
    """Return the list under `candidates` of `autoshard plan --json`."""
    return [
        {"name": each.name, "why": each.why, "mesh": dict(each.plan.mesh), **prediction_figures(each.plan.prediction)}
        for each in candidates
    ]


def candidates_report(candidates: Sequence[PlanCandidate]) -> RenderableType:
    """Return the table of candidates for a terminal, in the given order: the plan, then by predicted time.

    The list has at least the plan itself, as its first entry.
    """
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
    note = [Text("  no other plan was found that really differs", style="dim")] if len(candidates) == 1 else []
    return Group(Text(), Text("Candidates that really differ", style="bold"), table, *note)
