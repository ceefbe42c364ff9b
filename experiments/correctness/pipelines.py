"""Six families in stages of a pipeline, planned and run on 8 CPU devices, compared with the plain program.

    python experiments/correctness/pipelines.py [--only TEXT ...] [--again] [--table]

Small configurations of eight layers are cut into 2 and 4 stages, by both schedules. Data or tensor parallelism uses the
remaining devices. Loss, gradients (which momentum equals after one step) and updated parameters of the program in
stages are compared with those of the plain program. The planned run is compared with the program in stages. Bytes on
the wire of every mesh axis are compared as predicted and as XLA compiled them.

Rows are saved in `experiments/results/pipelines.json`, so that a broken run resumes. Each row has its own process.
"""

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from autoshard.program import Program

from experiments.lib.harness import ROOT, Experiment, grid, page
from experiments.models.families import errors_of, row_of


CONFIGS = ROOT / "autoshard" / "program" / "configs"
FAMILIES = ("llama", "gpt2", "gemma2", "mixtral", "bert", "vit")
LAYERS, DEVICES, BATCH = 8, 8, 16
ALLOWED = 1e-5
"""Largest difference that counts as equal, relative to a tensor's own maximum."""
ROWS = {
    f"{family} | {stages} | {schedule} | {beside}": (beside, family, stages, schedule)
    for beside, family, stages, schedule in itertools.product(
        ("data", "model"), FAMILIES, (2, 4), ("gpipe", "circular:2")
    )
}


def program_of(family: str, folder: Path, **pipeline: Any) -> "Program":
    """Return a training step of the family's small configuration, with eight layers."""
    from autoshard.program import open_source

    config = json.loads((CONFIGS / f"{family}-tiny.json").read_text())
    config |= {"n_layer" if family == "gpt2" else "num_hidden_layers": LAYERS}
    path = folder / f"{family}.json"
    path.write_text(json.dumps(config))
    size = {} if family == "vit" else {"seq": 32}
    options: dict[str, Any] = {"train": True, "batch": BATCH, "dtype": "float32", "optimizer": "momentum", **size}
    return open_source(f"hf:{path}", **options, **pipeline)


def apart(plain: "Program", staged: "Program") -> tuple[float, str]:
    """Return the largest difference of any result, relative to its maximum, and that result's name; both on one
    device.
    """
    import jax
    import numpy as np

    assert plain.fn is not None and staged.fn is not None and plain.make_args is not None
    args = plain.make_args(0)
    worst = (0.0, "")
    for result, one, other in zip(
        plain.results, *(jax.tree.leaves(jax.jit(p.fn)(*args)) for p in (plain, staged)), strict=True
    ):
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        worst = max(worst, (float(abs(a - b).max() / max(abs(a).max(), 1e-6)), result.name))
    return worst


def work(name: str) -> dict[str, Any]:
    """Compute one row of the table."""
    from autoshard import UserError
    from autoshard.exec import ensure_devices

    ensure_devices(DEVICES)
    beside, family, stages, schedule = ROWS[name]
    with tempfile.TemporaryDirectory() as folder:
        plain = program_of(family, Path(folder))
        try:
            staged = program_of(family, Path(folder), stages=stages, microbatches=2 * stages, schedule=schedule)
        except UserError as error:
            return {"error": str(error)}
        differs, where = apart(plain, staged)
        row = row_of(staged, {"stage": stages, beside: DEVICES // stages})
    return row | {"staged_differs": differs, "staged_worst": where}


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines, equal, errors = [], 0, []
    for name, row in rows.items():
        wire = "; ".join(f"{axis} {p} / {c}" for axis, (p, c) in row.get("wire", {}).items() if max(p, c))
        if "max_rel_diff" in row:
            good = row["staged_differs"] <= ALLOWED and row["equal"]
            equal += good
            errors += errors_of(row)
            remark = "" if good else row["staged_worst"] if row["staged_differs"] > ALLOWED else row["worst"]
            cells = f"{row['staged_differs']:.1e} | {row['max_rel_diff']:.1e}"
        else:
            cells, remark = "- | -", row["error"]
        lines.append((name, cells, wire, remark))
    within = sum(error <= 0.05 for error in errors)
    return page(
        "# Pipelines on 8 CPU devices",
        """
`python experiments/correctness/pipelines.py`. Differences are the largest of any result (loss, momentum, \
parameters), of
its tensor's own maximum: of the program in stages from the plain one, both on one device, and of the planned
run from the program in stages. Bytes on the wire of a device and step: predicted / compiled.
""",
        grid("family | stages | schedule | beside | staged from plain | planned from staged | wire | remark", lines),
        f"{len(rows)} of {len(ROWS)} rows; equal to {ALLOWED:g} in both steps: {equal}. Bytes of {len(errors)} mesh "
        f"axes with any: {within} within 5 %, the worst off by {max(errors, default=0.0):.1%}.",
    )


def main() -> int:
    return Experiment(script=__file__, names=ROWS, work=work, table=table, apart=True).run()


if __name__ == "__main__":
    sys.exit(main())
