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
import hashlib
import json
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


FLAGS = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}
"""The compiler's flags that the sources of v5p runs set (AI-Hypercomputer/maxtext: src/maxtext/configs/tpu/v5p/*.sh);
on other generations the same is on by default, or (v4) not set."""


def flags(run: "Run") -> dict[str, bool]:
    return FLAGS if run.topology.chip.name == "v5p" else {}


@dataclasses.dataclass(frozen=True)
class Rebuilt:
    """One published run as a program and a plan."""

    id: str
    source: str
    run: "Run"
    layers: int
    """Layers of the program that is compiled: fewer than the run's where what it kept on hosts would not fit."""
    program: "Program"
    plan: "Plan"

    @property
    def file(self) -> Path:
        digest = hashlib.sha256(self.program.fingerprint.encode())
        plan = self.plan
        what = (plan.topology, plan.mesh, plan.device_order, plan.arguments, plan.results, plan.pins, plan.calls)
        what += tuple(sorted(flags(self.run)))
        digest.update(repr(what).encode())
        return KEPT / f"{self.id}-{digest.hexdigest()[:12]}.pickle.gz"


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


def rebuild(row: dict[str, Any], run: "Run") -> Rebuilt:
    """The run's program and plan; with fewer layers, half by half, until its prediction fits the chips' memory."""
    from autoshard.plan._rebuild import stated_plan

    every = run.global_every
    layers = run.decoder.layers
    while True:
        small = dataclasses.replace(run, decoder=dataclasses.replace(run.decoder, layers=layers))
        program, plan = stated_plan(small)
        if "offload" not in run.remat or plan.prediction.peak_bytes < 0.9 * run.topology.usable_bytes:
            return Rebuilt(row["id"], row["source"], run, layers, program, plan)
        layers = max(every, layers // 2 // every * every)


def compiled(rebuilt: Rebuilt, time_limit: float) -> "Compiled":
    """From the folder of compiled programs, or from the compiler."""
    from autoshard.exec._libtpu import compile_with_libtpu

    if rebuilt.file.exists():
        return pickle.loads(gzip.decompress(rebuilt.file.read_bytes()))
    found = compile_with_libtpu(rebuilt.program, rebuilt.plan, time_limit, flags(rebuilt.run))
    KEPT.mkdir(parents=True, exist_ok=True)
    part = rebuilt.file.with_suffix(".part")
    part.write_bytes(gzip.compress(pickle.dumps(found)))
    os.replace(part, rebuilt.file)
    return found


def main() -> int:
    from autoshard import UserError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="rows to run (default: all)")
    parser.add_argument("--time-limit", type=float, default=900.0)
    arguments = parser.parse_args()
    for row, run in published_rows():
        if arguments.rows and row["id"] not in arguments.rows:
            continue
        rebuilt = rebuild(row, run)
        try:
            found = compiled(rebuilt, arguments.time_limit)
        except UserError as error:
            print(f"{row['id']}: {error}", flush=True)
            continue
        print(row["id"], rebuilt.layers, found.compile_s, found.needed_bytes, found.memory, len(found.text), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
