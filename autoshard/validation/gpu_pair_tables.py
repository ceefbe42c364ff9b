"""Figures and tables that compare measured runs on GPUs with our predictions."""

import math
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.base.units import GIB
from autoshard.report.display import clean
from autoshard.validation.gpu_pairs import GpuPairs, GpuProblem, PricedGpuRow, geometric_mean


_MOST_PROBLEMS = 40
"""Number of problems that the terminal lists; `--json` lists all."""
_CHOICES = (
    ("ours", lambda problem: problem.chosen),
    ("least predicted time alone", lambda problem: problem.fastest),
    ("least parallel that ran, fastest", lambda problem: problem.least_parallel()),
    ("least parallel that ran, slowest", lambda problem: problem.least_parallel(worst=True)),
)
"""Rules that choose a plan, compared by regret: name and function."""


def gpu_pair_figures(found: GpuPairs) -> dict[str, Any]:
    """Return the JSON object of `autoshard validate --pairs ultrascale --json`: seconds, GiB, errors as shares.

    Regrets of the rules in `_CHOICES` are absent if no problem has two measured plans. Infinite regrets are None.
    """
    counted, right, stated, false_fits = found.verdicts()
    return {
        "errors": [
            {
                "table": each.table,
                "rows": each.rows,
                "rebuilt": each.priced,
                "step_error_mean": each.mean,
                "step_error_median": each.median,
                "step_error_p90": each.p90,
                "memory_error_median": each.memory_median,
            }
            for each in found.errors()
        ],
        "regret": {name: _regret_figures(found, choose) for name, choose in _CHOICES if _has_regrets(found)},
        "verdicts": {
            "counted": counted,
            "right": right,
            "rows": stated,
            "false_fits": false_fits,
            "false_fits_not_for_memory": found.not_for_memory(),
        },
        "problems": [
            {
                "problem": problem.name,
                "regret": _finite(problem.regret(problem.chosen)),
                "chosen": None if problem.chosen is None else problem.chosen.row.label,
                "chosen_did_not_run": problem.regret(problem.chosen) == math.inf,
                "rows": [_row(each) for each in problem.rows],
            }
            for problem in found.problems
        ],
    }


def _row(each: PricedGpuRow) -> dict[str, Any]:
    """Return the JSON object of a row; predictions are None if the run was not rebuilt, or cannot run as predicted."""
    row, step = each.row, each.step
    runs = step is not None and step.runs
    return {
        "plan": row.label,
        "table": row.table,
        "measured_s": row.measured_s,
        "predicted_s": step.seconds if step is not None and runs else None,
        "measured_gib": None if row.measured_bytes is None else row.measured_bytes / GIB,
        "predicted_gib": step.peak_bytes / GIB if step is not None and runs else None,
        "parts_s": step.parts if step is not None else {},
        "fits": None if step is None else each.fits,
        "measured_fits": row.fits,
        "skipped": row.skipped or None,
    }


def _has_regrets(found: GpuPairs) -> bool:
    """Return True if a problem has at least two measured plans, without which no regret is defined."""
    return any(len(problem.measured) > 1 for problem in found.problems)


def _regrets(found: GpuPairs, choose: Any) -> list[float]:
    """Return the regrets of a rule's choices, of the problems with at least two measured plans."""
    comparable = GpuPairs(tuple(problem for problem in found.problems if len(problem.measured) > 1))
    return [regret for _, regret in comparable.regrets(choose)]


def _regret_figures(found: GpuPairs, choose: Any) -> dict[str, Any]:
    """Return the JSON object of a rule's regrets; the mean and worst are None if a choice did not run."""
    regrets = _regrets(found, choose)
    ran = [each for each in regrets if math.isfinite(each)]
    return {
        "problems": len(regrets),
        "did_not_run": len(regrets) - len(ran),
        "geometric_mean": _finite(geometric_mean(regrets)),
        "geometric_mean_of_those_that_ran": geometric_mean(ran),
        "worst": _finite(max(regrets, default=None)),
    }


def _finite(value: float | None) -> float | None:
    """Return a number that JSON can represent; None in place of an infinite regret."""
    return None if value is None or math.isinf(value) else value


def gpu_pair_report(found: GpuPairs) -> RenderableType:
    """Render the problems with our choices, regrets, verdicts, errors, and the reasons for rows that are left out.

    Only problems with at least two measured plans are listed, at most `_MOST_PROBLEMS`. Verdicts appear if some run
    failed. Each reason appears once, with the first row that has it.
    """
    parts: list[RenderableType] = []
    problems = [problem for problem in found.problems if len(problem.measured) > 1]
    if problems:
        parts += map(_said, problems[:_MOST_PROBLEMS])
        more = len(problems) - _MOST_PROBLEMS
        parts += [Text(f"{more} more problems are in --json.", style="dim")] if more > 0 else []
        parts += [Text(), _regret_table(found), Text()]
    counted, right, stated, false_fits = found.verdicts()
    if any(each.row.fits is False for each in found.rows):
        parts += [
            Text(
                f"does it fit: right in {right} of {counted} rows farther than 10 % from the limit "
                f'({100 * right / max(1, counted):.1f} %); false "fits" {false_fits} of {stated} '
                f"({100 * false_fits / max(1, stated):.1f} %), {found.not_for_memory()} of which did not fail "
                "for memory: a run with as much succeeded"
            ),
            Text(),
        ]
    parts += [_error_table(found)]
    skipped = [each.row for each in found.rows if each.row.skipped]
    parts += [Text(f"{len(skipped)} rows are not rebuilt:")] if skipped else []
    for why in dict.fromkeys(row.skipped for row in skipped):
        first = next(row for row in skipped if row.skipped == why)
        parts += [Text(clean(f"{first.problem}, {first.label}: {why}"), style="dim")]
    return Group(*parts)


def _table(*columns: str) -> Table:
    """Return a table with these columns and no rows; all columns but the first are aligned to the right."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _said(problem: GpuProblem) -> Text:
    """Describe a problem with measured plans: the fastest of them, and our choice with its regret if that is finite."""
    chosen, best = problem.chosen, min(problem.measured, key=lambda each: each.row.measured_s or 0.0)
    head = f"{problem.name} ({len(problem.measured)} of {len(problem.rows)} ran): best {best.row.label}, "
    head += f"{best.row.measured_s:.4g} s"
    if chosen is None or chosen.step is None:
        return Text(clean(f"{head}; ours: none fits"))
    took = "did not run" if chosen.row.measured_s is None else f"measured {chosen.row.measured_s:.4g} s"
    ours = f"ours {chosen.row.label}, predicted {chosen.step.seconds:.4g} s, {took}"
    regret = problem.regret(chosen)
    return Text(clean(f"{head}; {ours}" + ("" if regret is None or math.isinf(regret) else f", regret {regret:.3f}")))


def _regret_table(found: GpuPairs) -> Table:
    """Tabulate, for each rule of `_CHOICES`, the regrets of problems with at least two measured plans.

    Columns: number of regrets, choices that did not run, geometric mean of all, and of those that ran, worst of those.
    """
    table = _table("regret", "problems", "failed", "mean", "of those that ran", "worst")
    for name, choose in _CHOICES:
        regrets = _regrets(found, choose)
        ran = [each for each in regrets if math.isfinite(each)]
        mean, of_ran = geometric_mean(regrets), geometric_mean(ran)
        missing = len(regrets) - len(ran)
        cells = (len(regrets), missing, _number(mean), _number(of_ran), _number(max(ran, default=None)))
        table.add_row(name, *map(str, cells))
    return table


def _error_table(found: GpuPairs) -> Table:
    """Tabulate the errors of each table of runs, and of all tables if there are several, in percent."""
    table = _table("error of step times", "rows", "rebuilt", "mean", "median", "p90", "of memory")
    for each in found.errors():
        shares = (each.mean, each.median, each.p90, each.memory_median)
        cells = ("-" if share is None else f"{100 * share:.1f} %" for share in shares)
        table.add_row(clean(each.table), str(each.rows), str(each.priced), *cells)
    return table


def _number(value: float | None) -> str:
    """Return a regret as text: `-` for None, `did not run` for infinity."""
    return "-" if value is None else "did not run" if math.isinf(value) else f"{value:.3f}"
