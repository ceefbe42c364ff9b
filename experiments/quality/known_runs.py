"""Errors of predicted step times of measured runs, each predicted without its own source, for the error bars of plans.

    python experiments/quality/known_runs.py [--figures PUBLISHED.json PAIRS.json] [--write] [--out FILE.md]

`--figures` takes what `autoshard validate --json` and `autoshard validate --pairs --json` printed. `--write` stores the
errors with the features of their runs in `autoshard/planning/explain/known_runs.json`.
"""

import argparse
import itertools
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from autoshard.degrees.gpu_run import GpuRun
from autoshard.planning.explain import known_runs
from autoshard.planning.explain.known_runs import COMPILED, KnownRun, coverage
from autoshard.validation import pair_figures, validate, validate_pairs, validation_figures
from autoshard.validation.pair_rows import read_groups
from autoshard.validation.pair_settings import OPTIMIZER
from autoshard.validation.published_runs import IncompleteError, Run, parse_run, read_rows
from autoshard.validation.rebuilt_runs import source_group
from autoshard.validation.serving_rows import ServingRun


COLUMNS = ("chip", "kind", "tokens", "slices", "framework", "source", "log_error")


def run_features(run: Run | ServingRun | GpuRun, source: str = "", log_error: float = 0.0) -> KnownRun:
    """Return the features of a rebuilt run, with its source and the logarithm of measured over predicted seconds."""
    place = run.topology
    decode = isinstance(run, ServingRun) and run.phase == "decode"
    kind = "serving" if isinstance(run, ServingRun) else "mixture" if run.decoder.experts > 1 else "dense"
    return KnownRun(
        chip=place.chip.name,
        kind=kind,
        tokens=run.batch * (1 if decode else run.seq) / place.num_devices,
        slices=place.slices if place.traits.torus else 1,
        framework=run.framework if isinstance(run, GpuRun) else COMPILED,
        source=source,
        log_error=log_error,
    )


def published(figures: dict[str, Any]) -> Iterator[KnownRun]:
    """Yield the published runs that state everything, with the errors of `autoshard validate --json`."""
    errors = {row["id"]: row for row in figures["rows"] if row.get("unseen")}
    for row in read_rows():
        try:
            run = parse_run(row)
        except IncompleteError:
            continue
        error = errors.get(row["id"])
        if isinstance(run, Run) and error is not None and error["complete"]:
            yield run_features(run, source_group(row["source"]), math.log(error["theirs"] / error["unseen"]))


def pairs(figures: dict[str, Any]) -> Iterator[KnownRun]:
    """Yield the rows of measured groups, with the errors of `autoshard validate --pairs --json`."""
    for group, priced in zip(read_groups(), figures["groups"], strict=True):
        for row, error in zip(group.rows, priced["rows"], strict=True):
            run = row.run or row.serving or row.gpu
            if OPTIMIZER in row.assumed:
                continue  # the state of the optimizer takes most of a small step
            if run is not None and error["unseen_s"] and error["measured_s"]:
                yield run_features(run, source_group(group.source), math.log(error["measured_s"] / error["unseen_s"]))


def ratio_log_error(figures: dict[str, Any]) -> float:
    """Return the quantile `SHARE` of the errors of the logarithms of ratios of two plans of a group."""
    errors = []
    for group in figures["groups"]:
        rows = [row for row in group["rows"] if row["measured_s"] and row["predicted_s"]]
        for a, b in itertools.combinations(rows, 2) if group["compares"] == "plans" else ():
            ratios = (math.log(a[key] / b[key]) for key in ("measured_s", "predicted_s"))
            errors.append(abs(next(ratios) - next(ratios)))
    return float(np.quantile(errors, known_runs.SHARE))


def table(runs: list[KnownRun]) -> list[str]:
    """Return the lines of a table of coverage, all runs and by chip, kind and slices."""
    kinds = {
        "all": lambda run: "",
        "chip": lambda run: run.chip,
        "kind": lambda run: run.kind,
        "slices": lambda run: "one" if run.slices == 1 else "several",
        "framework": lambda run: run.framework,
    }
    lines = ["| runs | number | with an interval | inside | width in the median |", "| --- | --- | --- | --- | --- |"]
    for name, of in kinds.items():
        for value in sorted({of(run) for run in runs}):
            own = [run for run in runs if of(run) == value]
            inside = counted = 0
            widths = []
            for run in own:
                others = [each for each in runs if each.source != run.source]
                interval = known_runs.time_error(run, others)
                if interval is not None:
                    counted += 1
                    inside += interval.low <= math.expm1(run.log_error) <= interval.high
                    widths.append(interval.high - interval.low)
            share = f"{inside / counted:.0%}" if counted else "-"
            width = f"{100 * float(np.median(widths)):.0f} %" if widths else "-"
            lines.append(f"| {name} {value} | {len(own)} | {counted} | {share} | {width} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=pathlib.Path, nargs=2, help="outputs of both commands of validation")
    parser.add_argument("--write", action="store_true", help="store the errors in the package")
    parser.add_argument("--out", type=pathlib.Path, help="write the coverage here as Markdown")
    arguments = parser.parse_args()
    if arguments.figures:
        figures = [json.loads(path.read_text()) for path in arguments.figures]
    else:
        figures = [validation_figures(validate()), pair_figures(validate_pairs())]
    runs = [*published(figures[0]), *pairs(figures[1])]
    lines = ["# Error bars of step times", "", "Made by `python experiments/quality/known_runs.py`.", ""]
    lines += [f"An interval should contain {known_runs.SHARE:.0%} of the runs of sources that it was made without.", ""]
    lines += table(runs)
    inside, counted = coverage(runs)
    ratio = ratio_log_error(figures[1])
    lines += [
        "",
        f"{inside} of {counted} runs are inside. Ratios of two plans are within a factor {math.exp(ratio):.3f}.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
    if arguments.write:
        rows = [[round(v, 5) if isinstance(v := getattr(run, name), float) else v for name in COLUMNS] for run in runs]
        head = {
            "about": "by experiments/quality/known_runs.py, from these tables, each source predicted without itself",
            "tables": ["autoshard/validation/published.json", "autoshard/validation/pairs.json"],
            "ratio_log_error": round(ratio, 5),
            "columns": list(COLUMNS),
        }
        body = json.dumps(head, indent=1)[:-2] + ',\n "runs": [\n  '
        known_runs.FILE.write_text(body + ",\n  ".join(json.dumps(row) for row in rows) + "\n ]\n}\n")


if __name__ == "__main__":
    main()
