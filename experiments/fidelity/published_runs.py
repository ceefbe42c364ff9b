"""Published TPU training runs, rebuilt, planned as they were run, compiled, and timed from the compiler's schedule.

    python experiments/fidelity/published_runs.py [ROW ...] [--time-limit S] [--table] [--compile] [--write]

Rows are those of `autoshard/validation/published.json` that state their model, machine, batch, sharding and
rematerialisation. Scheduled programs are stored under `build/published_runs`, so that a broken run resumes and a change
of the estimator costs seconds. `--table` only reads stored programs. The table is
`experiments/results/published_runs.md`.
"""

import argparse
import dataclasses
import gzip
import itertools
import json
import math
import os
import pickle
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from autoshard.cost import Calibration, Mesh
    from autoshard.exec import Estimate
    from autoshard.exec.ahead.compile_targets import Compiled
    from autoshard.exec.hlo.hlo_text import HloModule
    from autoshard.planning import Plan
    from autoshard.program import Program
    from autoshard.validation.published_runs import Run

os.environ.setdefault("JAX_PLATFORMS", "cpu")

HERE = Path(__file__).parents[1]
KEPT = HERE.parent / "build" / "published_runs"
TABLE = HERE / "results" / "published_runs.md"


SEEN = frozenset(
    {
        "maxtext-v4-22b-2x",
        "maxtext-v5e-16b-1x",
        "maxtext-v5e-32b-2x",
        "maxtext-v5e-64b-1x",
        "maxtext-v5e-128b-2x",
        "maxtext-v5p-32b-64c-2x",
        "maxtext-v5p-128b-128c-1x",
        "recipe-v6e-gpt3-175b-bf16",
        "recipe-v6e-llama3.1-70b-v6e-128",
        "recipe-v6e-llama3.1-8b-v6e-8",
    }
)
"""Rows whose errors were known when the estimator's formulas were last changed; other rows are unseen."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """One published run as it was compiled."""

    layers: int
    """Layers of the program: fewer than the run's if its values offloaded to hosts would not fit the chips."""
    predicted_s: float
    """Predicted step time of that program, in seconds."""
    predicted_peak: int
    device_order: tuple[int, ...]
    mesh: dict[str, int]
    compiled: "Compiled"


def published_rows() -> "list[tuple[dict[str, Any], Run]]":
    """Return the rows of TPUs that can be rebuilt, with their runs."""
    from autoshard.validation.published_runs import IncompleteError, MatmulRun, parse_run, read_rows

    pairs = []
    for row in read_rows():
        try:
            run = parse_run(row)
        except IncompleteError:
            continue
        if not isinstance(run, MatmulRun) and run.topology.backend == "tpu":
            pairs.append((row, run))
    return pairs


def with_layers(run: "Run", layers: int) -> "Run":
    return dataclasses.replace(run, decoder=dataclasses.replace(run.decoder, layers=layers))


def rebuild(run: "Run") -> "tuple[int, Program, Plan]":
    """Return the run's layers, program and plan.

    The layers are halved until the program fits, if the run offloaded values to make room for the others.
    """
    from autoshard.validation.rebuilt_runs import stated_plan

    every = run.decoder.global_every
    layers = run.decoder.layers
    while True:
        program, plan = stated_plan(with_layers(run, layers))
        fits = plan.prediction.peak_bytes < 0.9 * run.topology.usable_bytes
        if not (run.remat.startswith("custom") or "offload" in run.remat) or fits or layers <= every:
            return layers, program, plan
        layers = max(every, layers // 2 // every * every)


def load(row: dict[str, Any]) -> Kept | None:
    """Load the compiled program of a run; None if it was not compiled."""
    file = KEPT / f"{row['id']}.pickle.gz"
    return Kept(**pickle.loads(gzip.decompress(file.read_bytes()))) if file.exists() else None


def compile_row(row: dict[str, Any], run: "Run", time_limit: float) -> Kept:
    from autoshard.exec.ahead.ahead_process import compile_without_devices

    layers, program, plan = rebuild(run)
    program_compiled = compile_without_devices(program, plan, time_limit)
    predicted = plan.prediction
    kept = Kept(layers, predicted.step_time_s, predicted.peak_bytes, plan.device_order, plan.mesh, program_compiled)
    KEPT.mkdir(parents=True, exist_ok=True)
    file = KEPT / f"{row['id']}.pickle.gz"
    part = file.with_suffix(".part")
    part.write_bytes(gzip.compress(pickle.dumps({f.name: getattr(kept, f.name) for f in dataclasses.fields(kept)})))
    os.replace(part, file)
    return kept


@dataclasses.dataclass(frozen=True)
class Case:
    """One run, ready to be estimated again with other constants (`calibrate.fit`)."""

    id: str
    source: str
    chip: str
    theirs: float
    complete: bool
    """False if the source left something open that had to be assumed: shown, not counted."""
    run: "Run"
    kept: Kept
    module: "HloModule"

    @property
    def mesh(self) -> "Mesh":
        from autoshard.cost import make_mesh

        return dataclasses.replace(make_mesh(self.run.topology, self.kept.mesh), device_order=self.kept.device_order)

    def estimate(self, calibration: "Calibration | None" = None) -> "Estimate":
        from autoshard.exec import estimate

        every = self.run.decoder.global_every
        layers = self.kept.layers // every, self.run.decoder.layers // every
        return estimate(self.module, self.mesh, calibration, layers)

    def seconds(self, calibration: "Calibration") -> float:
        return self.estimate(calibration).step_time_s


def load_cases() -> list[Case]:
    """Load every run that was compiled and fits."""
    from autoshard.exec.hlo.hlo_text import parse_hlo
    from autoshard.validation.rebuilt_runs import source_group

    cases = []
    for row, run in published_rows():
        kept = load(row)
        if kept is None or not kept.compiled.text:
            continue
        source = source_group(row["source"])
        module = parse_hlo(kept.compiled.text)
        whole = "assume" not in row
        cases.append(Case(row["id"], source, run.topology.chip.name, run.step_s, whole, run, kept, module))
    return cases


def left_out(cases: Sequence[Case]) -> dict[str, float]:
    """Return log(estimated / published) of every run with constants fitted to all other sources."""
    from experiments.lib.calibrate import errors, fit, groups, linear

    line = linear(cases)  # type: ignore[arg-type]
    logs = {}
    for members in groups(cases, "source").values():  # type: ignore[arg-type]
        values = fit(line, [i for i in range(len(cases)) if i not in members])
        mine = [cases[i] for i in members]
        for case, error in zip(mine, errors(mine, values), strict=True):  # type: ignore[arg-type]
            logs[case.id] = float(error)
    return logs


def table(cases: Sequence[Case]) -> tuple[str, dict[str, float]]:
    """Return the page of results, and the errors of the rows that count, each source left out."""
    from autoshard.planning.price.evaluate import evaluate
    from autoshard.validation.rebuilt_runs import rebuild as priced

    counted = [case for case in cases if case.complete]
    without = left_out(counted)
    lines = [
        "# Published TPU runs, compiled and timed from the compiler's schedule",
        "",
        "`python experiments/fidelity/published_runs.py`: each run is rebuilt from what its source states, planned as",
        "stated,",
        "compiled by libtpu (defaults, no TPU), and its step estimated from the scheduled program. Seconds of a step;",
        "`predicted` is the planner's own figure for the same sharding. Attention is jax's splash kernel. `layers`:",
        "where the run kept activations on its hosts, fewer layers are compiled, and the loops over them counted as",
        "often as the run's; what moves to the hosts is left out. `left out`: constants fitted to the other sources.",
        "Rows in brackets needed assumptions (`assume` in `autoshard/validation/published.json`) and do not count.",
        "",
        "| run | topology | layers | published | predicted | error | estimated | error | left out | flops | compile |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    now: dict[str, float] = {}
    predictions: dict[str, float] = {}
    for case in cases:
        step = case.estimate()
        predicted = evaluate(*priced(case.run)).step_time_s
        flops = flops_ratio(case)
        now[case.id], predictions[case.id] = (math.log(t / case.theirs) for t in (step.step_time_s, predicted))
        layers = case.run.decoder.layers
        name = case.id + ("" if case.id in SEEN else " *")
        name = name if case.complete else f"({name})"
        other = f"{math.expm1(without[case.id]):+.1%}" if case.id in without else "-"
        lines.append(
            f"| {name} | {case.run.topology.name} | {case.kept.layers if case.kept.layers < layers else layers}"
            f"{f' of {layers}' if case.kept.layers < layers else ''} | {case.theirs:.2f} | {predicted:.2f} | "
            f"{math.expm1(predictions[case.id]):+.1%} | {step.step_time_s:.2f} | {math.expm1(now[case.id]):+.1%} | "
            f"{other} | {flops:.3f} | {case.kept.compiled.compile_s:.0f} |"
        )
    seen, fresh = ([case for case in counted if (case.id in SEEN) == known] for known in (True, False))
    rows = (
        ("planner's prediction, all rows", [predictions[c.id] for c in counted]),
        ("estimate, all rows", [now[c.id] for c in counted]),
        ("estimate, rows known when the estimator was last changed", [now[c.id] for c in seen]),
        ("estimate, rows that it had never met (*)", [now[c.id] for c in fresh]),
        ("estimate, each source left out", [without[c.id] for c in counted]),
    )  # fmt: skip
    lines += ["", "| | runs | mean error | nine of ten within | worst |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {name} | {len(logs)} | {_shares(logs)} |" for name, logs in rows if logs]
    lines += ["", "| source left out | runs | mean error | nine of ten within | worst |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for source in dict.fromkeys(c.source for c in counted):
        logs = [without[c.id] for c in counted if c.source == source]
        lines.append(f"| {source} | {len(logs)} | {_shares(logs)} |")
    lines += [
        "",
        f"Ratios of two runs on chips of one generation, each source left out: {pair_line(counted, without)}.",
    ]
    lines += [
        "",
        "`flops`: matrix flops of the compiled step over those of the program that was compiled. On v4, v5p and v6e",
        "this compiler makes synchronous gathers, where the runs set flags that hid some of them behind compute.",
    ]
    lines += too_large()
    return "\n".join(lines) + "\n", {case.id: without[case.id] for case in counted}


def too_large() -> list[str]:
    """List one line for every row whose program did not fit the chips."""
    lines = []
    for row, run in published_rows():
        kept = load(row)
        if kept is not None and kept.compiled.needed_bytes:
            needed, has = (size / 2**30 for size in (kept.compiled.needed_bytes, run.topology.usable_bytes))
            layers = f"{kept.layers} of {run.decoder.layers} layers"
            lines.append(f"- {row['id']}: not estimated, {layers} need {needed:.0f} GiB of {has:.0f}")
    return ["", *lines] if lines else []


def flops_ratio(case: Case) -> float:
    """Return the matrix FLOPs of the compiled step over those of the program that was compiled."""
    from autoshard.exec import estimate
    from autoshard.exec.hlo.compiled_flops import check_flops
    from autoshard.validation.rebuilt_runs import stated_plan

    program, _ = stated_plan(with_layers(case.run, case.kept.layers))
    return check_flops(program, estimate(case.module, case.mesh), case.mesh.num_devices).ratio


def pair_errors(logs: dict[str, float], chips: dict[str, str]) -> list[float]:
    """Return the errors of ratios of two estimates, as shares of the longer step.

    The pairs are all pairs of runs on chips of one generation. `logs` maps a run to log(estimated / published).
    """
    pairs = itertools.combinations(logs, 2)
    return sorted(-math.expm1(-abs(logs[a] - logs[b])) for a, b in pairs if chips[a] == chips[b])


def pair_line(cases: Sequence[Case], logs: dict[str, float]) -> str:
    errors = pair_errors(logs, {case.id: case.chip for case in cases})
    within = float(np.percentile(errors, 90))
    return f"{len(errors)} pairs, mean {statistics.mean(errors):.1%}, nine of ten within {within:.1%}"


def _sizes(logs: Sequence[float]) -> list[float]:
    return sorted(abs(math.expm1(log)) for log in logs)


def _within(logs: Sequence[float]) -> float:
    """Return the error that nine of ten do not exceed, interpolated."""
    return float(np.percentile(_sizes(logs), 90))


def _shares(logs: Sequence[float]) -> str:
    return f"{statistics.mean(_sizes(logs)):.1%} | {_within(logs):.1%} | {_sizes(logs)[-1]:.1%}"


def write_error(logs_of: dict[str, float]) -> None:
    """Store the measured error as the error that every estimate states."""
    logs = list(logs_of.values())
    file = HERE.parent / "autoshard" / "exec" / "hlo" / "estimator.json"
    document = json.loads(file.read_text()) | {
        "mean": round(statistics.mean(_sizes(logs)), 3),
        "within": round(_within(logs), 3),
        "source": f"{len(logs)} published TPU runs, each source left out of the constants' fit: "
        "experiments/results/published_runs.md",
    }
    file.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    from autoshard import UserError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="rows to compile (default: all)")
    parser.add_argument("--time-limit", type=float, default=900.0, help="of one compilation, in seconds")
    parser.add_argument("--compile", action="store_true", help="compile what was not compiled yet, and no table")
    parser.add_argument("--table", action="store_true", help="estimate what was compiled, compile nothing")
    parser.add_argument("--write", action="store_true", help="store the error as the one that estimates state")
    arguments = parser.parse_args()
    for row, run in published_rows():
        if arguments.table or (arguments.rows and row["id"] not in arguments.rows):
            continue
        try:
            kept = load(row) or compile_row(row, run, arguments.time_limit)
        except UserError as error:
            print(f"{row['id']}: {error}", flush=True)
            continue
        needed = kept.compiled.needed_bytes
        what = f"does not fit, needs {needed / 2**30:.1f} GiB" if needed else f"{kept.compiled.compile_s:.0f} s"
        print(f"{row['id']}: {what}", flush=True)
    if arguments.compile:
        return 0
    cases = load_cases()
    text, errors = table(cases)
    TABLE.write_text(text)
    print(text)
    if arguments.write:
        write_error(errors)
    return 0


if __name__ == "__main__":
    sys.exit(main())
