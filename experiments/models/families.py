"""Every family of programs in its small form: planned, run on 8 CPU devices, and compared.

    python experiments/models/families.py [--only TEXT ...] [--again] [--out FOLDER]

Results are compared with the unplanned run's: outputs, caches, loss, updated parameters and optimizer state. After one
step of SGD with momentum that state equals the gradient. Bytes on the wire of every mesh axis are compared as predicted
and as XLA compiled them.

Rows are saved in results/families.json. Each row, `NAME/MODE/MESH`, has its own process.
"""

import math
import re
import resource
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.lib.harness import Experiment, grid, page


if TYPE_CHECKING:
    from autoshard.program import Program


SCALARS = 64
"""Difference in bytes within which an axis counts as exact: sums of scalars are no decisions."""
OUTLIER = 0.5
"""Relative error of an axis from which a row needs a reason."""

REASONS: dict[str, str] = {
    "hf:whisper-mini/train/.*": "Cross attention is uniform at the initial values: this gradient is 3e-5 of the "
    "largest one, and the difference under 1e-9 of that one, below what fp32 resolves.",
}
"""Reason of a row's difference, or of its wrong bytes, by a pattern of the row's key."""


def work(key: str) -> dict[str, Any]:
    """Compute the row of one program on one mesh."""
    from autoshard.exec import ensure_devices

    ensure_devices(8)
    from experiments.lib.programs.family_programs import MESHES, make

    name, mode, mesh = key.rsplit("/", 2)
    return row_of(make(name, mode), MESHES[mesh])


def row_of(program: "Program", mesh: dict[str, int], seed: int = 0, asked: Any = None) -> dict[str, Any]:
    """Plan a program for eight CPU devices, run it on the values of a seed, and compare.

    `asked` is an `Asked` with specs that are fixed.
    """
    from autoshard.errors import UserError
    from autoshard.exec import measure
    from autoshard.planning import Options, make_plan

    began = time.perf_counter()
    row: dict[str, Any] = {}
    try:
        fixed = {} if asked is None else {"asked": asked}
        plan = make_plan(program, Options(topology="cpu:8", mesh=mesh, **fixed)).plan
        row["plan_s"] = round(time.perf_counter() - began, 2)
        row["peak_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
        row["words"] = list(plan.words)
        row["without_rule"] = [w for w in plan.warnings if "has no sharding rule" in w]
        measurement = measure(program, plan, steps=1, warmup=0, seed=seed, check=True)
    except UserError as error:
        return row | {"error": str(error)}
    assert measurement.check is not None
    worst = measurement.check.worst
    equal = measurement.check.max_rel_diff <= measurement.check.tolerance
    if not equal:
        row["rounding"] = max(d.floor for d in measurement.check.differences)
        row["excused"] = measurement.check.passed
    return row | {
        "equal": equal,
        "max_rel_diff": measurement.check.max_rel_diff,
        "worst": worst.name if worst else "",
        "wire": {
            axis: [measurement.wire_predicted.get(axis, 0), measurement.wire_compiled.get(axis, 0)]
            for axis in sorted({*measurement.wire_predicted, *measurement.wire_compiled})
        },
    }


def errors_of(row: dict[str, Any]) -> list[float]:
    """Return the relative error of the predicted bytes on every axis on which either side has any."""
    errors = []
    for predicted, compiled in row.get("wire", {}).values():
        if max(predicted, compiled) > SCALARS:
            off = abs(predicted - compiled)
            errors.append(0.0 if off <= SCALARS else off / compiled if compiled else math.inf)
    return errors


def is_rounding(row: dict[str, Any]) -> bool:
    """Return True if a difference is no larger than that of another order of the examples."""
    within = row.get("excused", row.get("max_rel_diff", 0.0) <= 2 * row.get("rounding", 0.0))
    return not row.get("equal", True) and within


def reason(name: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"]
    if is_rounding(row):
        return f"The unplanned step with its examples in another order differs by {row['rounding']:.1e} too."
    if row["equal"] and max(errors_of(row), default=0.0) <= OUTLIER:
        return ""
    return next((text for pattern, text in REASONS.items() if re.fullmatch(pattern, name)), "unexplained")


def table(rows: dict[str, Any], wanted: int) -> str:
    """Return the table in Markdown, with a summary; `wanted` is the number of rows once all have run."""
    ran = {k: row for k, row in rows.items() if "error" not in row}
    errors = [error for row in ran.values() for error in errors_of(row)]
    middle = statistics.median(errors) if errors else 0.0
    high = float(np.percentile(errors, 90, method="higher")) if errors else 0.0
    equal = sum(row["equal"] for row in ran.values())
    worst = max((row["max_rel_diff"] for row in ran.values() if row["equal"]), default=0.0)
    repeated = sorted({w for row in rows.values() for w in row.get("without_rule", [])})
    seconds = [row["plan_s"] for row in rows.values() if "plan_s" in row]
    lines = []
    for name, row in rows.items():
        wire = row.get("wire", {})
        amounts = "; ".join(f"{axis} {p} / {c}" for axis, (p, c) in wire.items() if max(p, c))
        ratios = " ".join(f"{p / c:.2f}" if c else "-" for p, c in wire.values() if max(p, c))
        diff = f"{row['max_rel_diff']:.1e}" if "max_rel_diff" in row else "-"
        verdict = "-"
        if "equal" in row:
            verdict = "yes" if row["equal"] else "rounding" if is_rounding(row) else f"NO: {row['worst']}"
        cells = [*name.rsplit("/", 2), diff, verdict, amounts, ratios, row.get("plan_s", "-")]
        lines.append([*cells, "; ".join(row.get("words", [])), reason(name, row)])
    return page(
        "# Every family, small, on 8 CPU devices: planned against unplanned, predicted bytes against compiled",
        "`python experiments/models/families.py`",
        f"{len(rows)} rows{'' if len(rows) == wanted else f' of {wanted}'}, {equal} equal to the unplanned run "
        f"(largest difference of any result {worst:.1e} of its tensor's maximum), "
        f"{sum(is_rounding(row) for row in ran.values())} that differ by no more than the unplanned step with its "
        f"examples in another order does, {len(rows) - len(ran)} without a plan. "
        f"Bytes on the wire by mesh axis over {len(errors)} axes with any: median error {middle:.1%}, "
        f"90th percentile {high:.1%}, {sum(e > OUTLIER for e in errors)} off by more than {OUTLIER:.0%}. "
        f"Planning on a loaded machine: median {np.median(seconds):.1f} s, at most {max(seconds):.1f} s and "
        f"{max(row.get('peak_gib', 0.0) for row in rows.values()):.2f} GiB. "
        f"Ops planned as replicated for lack of a rule: {len(repeated)}.",
        "`bytes` are predicted / compiled of one device, by mesh axis; `diff` is the largest of all results.",
        grid("program | mode | mesh | diff | equal | bytes | ratio | plan s | plan | remark", lines),
        *(["Ops without a rule, by what their warning says:", [f"- {line}" for line in repeated]] if repeated else []),
    )


def main() -> int:
    from experiments.lib.programs.family_programs import MESHES, PROGRAMS

    names = [f"{name}/{mode}/{mesh}" for name, (_, modes) in PROGRAMS.items() for mode in modes for mesh in MESHES]
    return Experiment(
        script=__file__, names=names, work=work, table=lambda rows: table(rows, len(names)), apart=True
    ).run()


if __name__ == "__main__":
    sys.exit(main())
