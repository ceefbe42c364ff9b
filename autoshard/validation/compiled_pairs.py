"""Step times of measured plans from the schedules of the real TPU compiler.

The step times show if the compiled schedules order the plans as hardware does.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    assume: Mapping[str, Any] | None = None,
) -> tuple[PairGroup, ...]:
    """Compile the plans of each group that ran on TPUs, and predict times from the compiled schedules.

    Times are the estimator's walk over the compiled schedule. Peaks and verdicts are the compiler's own. A row that
    cannot be rebuilt, or is not compiled within the time limit, is skipped with the reason. Raises: `UserError` for a
    file that cannot be read, and if no group is left.

    - `path`: file of groups; None for the shipped one.
    - `progress`: called with a line of text for each run.
    - `time_limit`: seconds for compiling one row.
    - `only`: texts; groups whose names contain none of them are left out.
    - `assume`: options for rows that cannot be rebuilt without them.
    """
    say = progress or (lambda line: None)
    groups = [group for group in read_groups(path, only, assume) if group.on_tpu]
    if not groups:
        raise UserError("none of the groups ran on TPUs: there is nothing to compile.")
    results: dict[Run, CompileReport | str] = {}
    compiled = []
    for group in groups:
        rows = []
        for number, row in enumerate(group.rows):
            if row.run is not None and row.run not in results:
                say(f"{group.group}, row {number + 1} of {len(group.rows)}: {row.plan}")
            rows.append(_row(row, results, time_limit))
        compiled.append(PairGroup.of(group, rows))
    return tuple(compiled)


def _row(row: MeasuredPlan, seen: dict[Run, CompileReport | str], time_limit: float) -> PairRow:
    """Return a row with the compiler's prediction, or with `skipped`, the reason why there is none.

    - `seen`: report of each compiled run, or the reason why it was not compiled; updated.
    - `time_limit`: seconds for compiling the row.
    """
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
    )
