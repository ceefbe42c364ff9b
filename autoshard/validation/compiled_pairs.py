"""Measured plans of one model compiled by the real TPU compiler: is the schedule's time ordered as hardware orders?"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from autoshard.errors import UserError
from autoshard.exec.ahead.compile_plans import CompileReport, Verdict, compile_plan
from autoshard.validation.measured_pairs import PairGroup, PairRow
from autoshard.validation.pair_rows import MeasuredPlan, read_groups
from autoshard.validation.published_runs import IncompleteError, Run
from autoshard.validation.rebuilt_runs import stated_plan


def compile_pairs(
    path: str | pathlib.Path | None = None,
    progress: Callable[[str], None] | None = None,
    *,
    time_limit: float = 600.0,
    only: Sequence[str] = (),
) -> tuple[PairGroup, ...]:
    """The groups of a file (default: the shipped one) that ran on TPUs, each row that can be rebuilt compiled so.

    Times are the estimator's walk over the compiled schedule, peaks and verdicts the compiler's own. `only` keeps
    groups whose names contain one of its texts. A row that is not compiled within `time_limit` seconds is skipped, and
    says so. Raises: `UserError` for a file that cannot be read, and where no group is left.
    """
    say = progress or (lambda line: None)
    groups = [group for group in read_groups(path, only) if group.on_tpu]
    if not groups:
        raise UserError("none of the groups ran on TPUs: there is nothing to compile.")
    seen: dict[Run, CompileReport | str] = {}
    found = []
    for group in groups:
        rows = []
        for number, row in enumerate(group.rows):
            if row.run is not None and row.run not in seen:
                say(f"{group.group}, row {number + 1} of {len(group.rows)}: {row.plan}")
            rows.append(_row(row, seen, time_limit))
        found.append(PairGroup.of(group, rows))
    return tuple(found)


def _row(row: MeasuredPlan, seen: dict[Run, CompileReport | str], time_limit: float) -> PairRow:
    run, bare = row.run, PairRow.measured(row)
    if run is None:
        return bare if row.serving is None else dataclasses.replace(bare, skipped="steps of serving are not compiled")
    if run not in seen:
        try:
            seen[run] = compile_plan(*stated_plan(run), time_limit=time_limit, quick=True)
        except (IncompleteError, UserError) as error:
            seen[run] = str(error)
    result = seen[run]
    if isinstance(result, str):
        return dataclasses.replace(bare, skipped=result)
    return dataclasses.replace(
        bare,
        predicted_s=None if result.estimate is None else result.estimate.step_time_s,
        tokens=run.batch * run.seq,
        predicted_bytes=result.peak_compiled,
        fits=result.verdict is not Verdict.DOES_NOT_FIT,
        skipped="" if result.estimate is not None else "the compiler says that it does not fit",
        assumed=run.assumed,
    )
