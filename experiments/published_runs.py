"""Published TPU training runs, rebuilt, planned as they were run, compiled, and timed from the compiler's schedule.

    python experiments/published_runs.py [ROW ...] [--time-limit S] [--table]

Rows are those of `autoshard/plan/published.json` that state their model, machine, batch, sharding and
rematerialisation. Scheduled programs are kept under `build/published_runs`, so that a broken run goes on where it
stopped and a change of the estimator costs seconds; `--table` only reads what is kept. The table is
`experiments/results/published_runs.md`.
"""

import argparse
import dataclasses
import gzip
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from autoshard.exec._libtpu import Compiled
    from autoshard.plan import Plan
    from autoshard.plan._published import Run
    from autoshard.program import Program

os.environ.setdefault("JAX_PLATFORMS", "cpu")

HERE = Path(__file__).parent
KEPT = HERE.parent / "build" / "published_runs"


@dataclasses.dataclass(frozen=True)
class Kept:
    """One published run as it was compiled."""

    layers: int
    """Layers of the program: fewer than the run's where what the run kept on its hosts would not fit the chips."""
    predicted_s: float
    """Our prediction for that program."""
    predicted_peak: int
    device_order: tuple[int, ...]
    mesh: dict[str, int]
    compiled: "Compiled"


def published_rows() -> "list[tuple[dict[str, Any], Run]]":
    """Rows of TPUs that can be rebuilt."""
    from autoshard.plan._published import IncompleteError, MatmulRun, parse_run, read_rows

    found = []
    for row in read_rows():
        try:
            run = parse_run(row)
        except IncompleteError:
            continue
        if not isinstance(run, MatmulRun) and run.topology.backend == "tpu":
            found.append((row, run))
    return found


def rebuild(run: "Run") -> "tuple[int, Program, Plan]":
    """The run's layers, program and plan; with fewer layers, half by half, where offloading made room for the rest."""
    from autoshard.plan._rebuild import stated_plan

    every = run.decoder.global_every
    layers = run.decoder.layers
    while True:
        small = dataclasses.replace(run, decoder=dataclasses.replace(run.decoder, layers=layers))
        program, plan = stated_plan(small)
        fits = plan.prediction.peak_bytes < 0.9 * run.topology.usable_bytes
        if "offload" not in run.remat or fits or layers <= every:
            return layers, program, plan
        layers = max(every, layers // 2 // every * every)


def load(row: dict[str, Any]) -> Kept | None:
    """What was compiled of a run."""
    file = KEPT / f"{row['id']}.pickle.gz"
    return Kept(**pickle.loads(gzip.decompress(file.read_bytes()))) if file.exists() else None


def compile_row(row: dict[str, Any], run: "Run", time_limit: float) -> Kept:
    from autoshard.exec._libtpu import compile_with_libtpu

    layers, program, plan = rebuild(run)
    found = compile_with_libtpu(program, plan, time_limit)
    predicted = plan.prediction
    kept = Kept(layers, predicted.step_time_s, predicted.peak_bytes, plan.device_order, plan.mesh, found)
    KEPT.mkdir(parents=True, exist_ok=True)
    file = KEPT / f"{row['id']}.pickle.gz"
    part = file.with_suffix(".part")
    part.write_bytes(gzip.compress(pickle.dumps({f.name: getattr(kept, f.name) for f in dataclasses.fields(kept)})))
    os.replace(part, file)
    return kept


def main() -> int:
    from autoshard import UserError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="rows to run (default: all)")
    parser.add_argument("--time-limit", type=float, default=900.0)
    arguments = parser.parse_args()
    for row, run in published_rows():
        if arguments.rows and row["id"] not in arguments.rows:
            continue
        try:
            kept = load(row) or compile_row(row, run, arguments.time_limit)
        except UserError as error:
            print(f"{row['id']}: {error}", flush=True)
            continue
        c = kept.compiled
        print(row["id"], kept.layers, c.compile_s, c.needed_bytes, c.memory, len(c.text), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
