"""Measured plans of one model, compiled and timed from the compiler's schedule: the estimator judged by hardware.

    python experiments/fidelity/pair_estimates.py [GROUP ...] [--time-limit S] [--table] [--write]

Groups are those of `autoshard/validation/pairs.json` that ran on TPUs. Every row that can be rebuilt is planned as it
ran. Libtpu compiles the program with the flags that the row states, and its schedule is walked with our rates.

Compiled programs are stored under `build/pair_estimates`, so that a broken run resumes and a change of the estimator
costs seconds. `--table` compiles nothing. `--write` stores the error of ratios of two plans of one model as a margin.
`autoshard compare --compile` calls two plans undecided below that margin. The table is
`experiments/results/pair_estimates.md`.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from autoshard.validation import MeasuredGroup, MeasuredPlan, PairGroup, Run

os.environ.setdefault("JAX_PLATFORMS", "cpu")
from experiments.lib.saved_results import Results, checked_out, compiled, is_compiled


HERE = Path(__file__).parents[1]
RESULTS = HERE / "results" / "pair_estimates.json"
TABLE = HERE / "results" / "pair_estimates.md"
ERROR = HERE.parent / "autoshard" / "exec" / "hlo" / "estimator.json"

FOLDER = "pair_estimates"
"""Folder of compiled programs, under `build`."""


def groups_asked(names: Sequence[str]) -> "list[MeasuredGroup]":
    """Return the groups on TPUs with at least two timed rows that can be rebuilt; groups that compare plans are
    first.
    """
    from autoshard.validation import read_groups

    groups = [group for group in read_groups(only=names) if group.on_tpu and len(list(timed(group))) > 1]
    return sorted(groups, key=lambda group: not group.compares_plans)


def timed(group: "MeasuredGroup") -> "Iterator[tuple[MeasuredPlan, Run]]":
    """Yield the rows that ran and can be rebuilt, with their runs."""
    for row in group.rows:
        if row.run is not None and row.step_s is not None:
            yield row, row.run


def key_of(group: "MeasuredGroup", row: "MeasuredPlan") -> str:
    """Return the name of a row among the results."""
    return f"{group.group} | {row.plan}"


def judge(run: "Run", time_limit: float, *, compile_it: bool) -> dict[str, Any] | None:
    """Compile and estimate one run; return None if it is not compiled and `compile_it` is False."""
    from autoshard import UserError
    from autoshard.exec.ahead.compile_plans import report
    from autoshard.validation import stated_plan

    try:
        program, plan = stated_plan(run)
        if not compile_it and not is_compiled(FOLDER, program, plan):
            return None
        judgement = report(program, plan, compiled(FOLDER, program, plan, time_limit))
    except UserError as error:
        return {"failed": str(error)}
    if judgement.estimate is None:
        return {"failed": "the compiler says that it does not fit", "peak_bytes": judgement.peak_compiled}
    return {
        "estimated_s": judgement.estimate.step_time_s,
        "by_kind": judgement.estimate.by_kind,
        "exposed_s": judgement.estimate.exposed_comm_s,
        "peak_bytes": judgement.peak_compiled,
        "predicted_s": plan.prediction.step_time_s,
        "predicted_bytes": plan.prediction.peak_bytes,
        "compile_s": judgement.compile_s,
        "code": checked_out(),
    }


def judge_all(groups: "Sequence[MeasuredGroup]", time_limit: float, *, compile_it: bool) -> None:
    """Judge every row of some groups, and save each as soon as it is known; rows of one run share its result."""
    results, seen = Results(RESULTS), {}
    for group in groups:
        for row, run in timed(group):
            if run not in seen:
                print(key_of(group, row), file=sys.stderr, flush=True)
                seen[run] = judge(run, time_limit, compile_it=compile_it)
            if seen[run] is not None:
                results.keep(key_of(group, row), seen[run])


def judged(rows: dict[str, Any]) -> "list[PairGroup]":
    """Return the groups, with known estimates in place of predictions."""
    from autoshard.validation import PairGroup, PairRow

    pair_groups = []
    for group in groups_asked(()):
        made: list[PairRow] = []
        for row, run in timed(group):
            known = rows.get(key_of(group, row), {})
            if "estimated_s" in known:
                fits = known["peak_bytes"] <= run.topology.usable_bytes
                bare = PairRow.measured(row)
                made.append(
                    dataclasses.replace(
                        bare,
                        predicted_s=known["estimated_s"],
                        tokens=run.batch * run.seq,
                        predicted_bytes=known["peak_bytes"],
                        fits=fits,
                    )
                )
        if len(made) > 1:
            pair_groups.append(PairGroup.of(group, made))
    return pair_groups


def shares_of_longer(groups: "Sequence[PairGroup]") -> list[float]:
    """Return the error of each ratio of two different plans of one model, as a share of the longer step.

    Two plans with equal measured times have a ratio too: the margin must show if the estimator reproduces it.
    """
    errors = []
    for group in groups:
        for a, b in group.pairs():
            if a.choice != b.choice:
                wrong = math.log(a.predicted_each() / b.predicted_each() * b.measured_each() / a.measured_each())
                errors.append(-math.expm1(-abs(wrong)))
    return sorted(errors)


def margins(groups: "Sequence[PairGroup]") -> list[str]:
    """List the lines of the table of margins: over plans, over workloads, and with each group of plans left out."""
    plans = [group for group in groups if group.compares_plans]
    lines = ["| pairs of | groups | pairs | median | nine of ten within | worst |", "|" + " --- |" * 6]

    def line(name: str, some: "Sequence[PairGroup]") -> None:
        errors = shares_of_longer(some)
        if errors:
            lines.append(
                f"| {name} | {len(some)} | {len(errors)} | {statistics.median(errors):.1%} | "
                f"{float(np.percentile(errors, 90)):.1%} | {errors[-1]:.1%} |"
            )

    line("plans of one model", plans)
    line("workloads of one model under one plan", [group for group in groups if not group.compares_plans])
    for group in plans:
        line(f"plans, without {group.group}", [other for other in plans if other is not group])
    return lines


def table(rows: dict[str, Any]) -> str:
    """Return the results as a page of Markdown."""
    from autoshard.validation import summarise_pairs

    groups = judged(rows)
    lines = [
        "# Measured plans of one model, compiled and timed from the compiler's schedule",
        "",
        "`python experiments/fidelity/pair_estimates.py`; libtpu, no TPU. Milliseconds of a step: as measured, as",
        "estimated",
        "from the scheduled program, and as the planner predicts the same plan. GiB of one device by the compiler.",
        "",
        "| group | plan | measured | estimated | of it | predicted | of it | GiB | compile s | code |",
        "|" + " --- |" * 10,
    ]
    for group in groups_asked(()):
        for row, _ in timed(group):
            known = rows.get(key_of(group, row))
            if known is None or "estimated_s" not in known or row.step_s is None:
                continue
            estimated, predicted = known["estimated_s"], known["predicted_s"]
            lines.append(
                f"| {group.group} | {row.plan.replace('|', '/')[:90]} | {row.step_s * 1e3:.1f} | "
                f"{estimated * 1e3:.1f} | {estimated / row.step_s:.2f} | "
                f"{predicted * 1e3:.1f} | {predicted / row.step_s:.2f} | "
                f"{known['peak_bytes'] / 2**30:.2f} | {known['compile_s']:.0f} | {known['code']} |"
            )
    said = summarise_pairs(groups)
    lines += ["", "| group | rows | tau of the estimates | regret |", "|" + " --- |" * 4]
    lines += [f"| {group.group} | {len(group.rows)} | {_text(group.tau)} | {_text(group.regret)} |" for group in groups]
    lines += [
        "",
        f"Kendall's tau over {said.decided} decided pairs: {_text(said.tau)}. By how much a ratio of two estimates was",
        "wrong, as a share of the longer step:",
        "",
        *margins(groups),
    ]
    failed = [f"- {name}: {row['failed']}" for name, row in rows.items() if "failed" in row]
    return "\n".join([*lines, *([""] if failed else []), *failed]) + "\n"


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def write_margin(groups: "Sequence[PairGroup]") -> None:
    """Store the error of ratios of plans as the margin that comparisons state."""
    plans = [group for group in groups if group.compares_plans]
    errors = shares_of_longer(plans)
    document = json.loads(ERROR.read_text())
    document["pairs"] = round(float(np.percentile(errors, 90)), 3)
    document["pairs_source"] = (
        f"{len(errors)} pairs of measured plans of one model, in {len(plans)} groups: "
        "experiments/results/pair_estimates.md"
    )
    ERROR.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help="parts of groups' names (default: all)")
    parser.add_argument("--time-limit", type=float, default=900.0, help="of one compilation, in seconds")
    parser.add_argument("--table", action="store_true", help="estimate what was compiled, compile nothing")
    parser.add_argument("--write", action="store_true", help="store the margin for two plans of one model")
    arguments = parser.parse_args()
    judge_all(groups_asked(arguments.groups), arguments.time_limit, compile_it=not arguments.table)
    rows = Results(RESULTS).rows
    text = table(rows)
    TABLE.write_text(text)
    print(text)
    if arguments.write:
        write_margin(judged(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
