"""Growth of planning with layers and with chips: CPU seconds of each phase, with repeated layers shared or not.

    python experiments/speed/planning_growth.py [--again] [--table]

One program is a decoder in plain JAX of 2 to 32 layers, unrolled or scanned. The other has 8 layers and runs on 16 to
16384 chips. Every plan has its own process, after one small plan that loads shared modules. The script writes
`results/planning_growth.md` and, row by row, `.json`. Existing rows are not measured again without `--again`.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

from experiments.lib.saved_results import Results  # noqa: E402


HERE = Path(__file__).parents[1]
DATA, TABLE, PLOT = (HERE / "results" / f"planning_growth.{end}" for end in ("json", "md", "svg"))
LAYERS = (2, 4, 8, 16, 32)
CHIPS = {
    "v5p:2x2x4": 16,
    "v5p:4x4x4": 64,
    "v5p:4x8x8": 256,
    "v5p:8x8x16": 1024,
    "v5p:8x16x16": 2048,
    "v5p:8x16x16*8": 16384,
}
KINDS = ("shared", "unshared", "scanned")
STARTS = {"reading": "extract", "pricing": "price", "solving": "solve", "writing": "write"}
"""Phases by the first word of their line of progress."""


def measure(kind: str, layers: int, topology: str, chips: int) -> dict[str, Any]:
    """Measure one plan, in this process."""
    from autoshard.planning import Options, Running, make_plan
    from autoshard.planning.solve import repeats
    from experiments.lib.programs.jax_case import train_program
    from experiments.lib.programs.jax_layers import layered

    if kind == "unshared":
        repeats.WORTHWHILE = 0.0
    batch = max(64, chips)
    make_plan(train_program("small", layered(2), "train"), Options(topology="v5p:2x2x2", mesh={"data": 4, "model": 2}))
    program = train_program("layers", layered(layers, kind == "scanned", batch=batch), "train")
    marks: list[tuple[str, float]] = []

    def mark(line: str) -> None:
        if (phase := STARTS.get(line.split()[0])) is not None:
            marks.append((phase, time.process_time()))

    began = time.process_time()
    options = Options(topology=topology, mesh={"data": chips // 4, "model": 4})
    made = make_plan(program, options, Running(progress=mark))
    end = time.process_time()
    spent = dict.fromkeys(STARTS.values(), 0.0)
    for (phase, start), (_, stop) in zip(marks, [*marks[1:], ("", end)], strict=True):
        spent[phase] += stop - start
    return {"cpu_s": end - began, "step_s": made.plan.prediction.step_time_s, "phases": spent}


def rows() -> dict[str, tuple[str, int, str, int]]:
    by_layers = {f"{kind} {n} layers": (kind, n, "v5p:4x4x4", 64) for kind in KINDS for n in LAYERS}
    return by_layers | {f"{chips} chips": ("shared", 8, topology, chips) for topology, chips in CHIPS.items()}


def table(known: dict[str, Any]) -> str:
    lines = [
        "# How planning grows",
        "",
        "`python experiments/speed/planning_growth.py`. CPU seconds of a whole plan (not the trace), and of its solve.",
        "A decoder with layers of its own, decided alike where they are alike (`shared`), each for itself",
        "(`unshared`), or `scanned`; a step's time is the same where the decisions are.",
        "",
        "![growth](planning_growth.svg)",
        "",
        f"| layers, v5p:4x4x4 | {' | '.join(f'{k} CPU s | {k} solve s | {k} step ms' for k in KINDS)} |",
        "| --- |" + " --- |" * 3 * len(KINDS),
    ]
    for n in LAYERS:
        cells = [_cells(known.get(f"{kind} {n} layers")) for kind in KINDS]
        lines.append(f"| {n} | {' | '.join(cells)} |")
    lines += ["", "| chips, 8 layers | CPU s | solve s | step ms |", "| --- | --- | --- | --- |"]
    lines += [f"| {chips} | {_cells(known.get(f'{chips} chips'))} |" for chips in CHIPS.values()]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any] | None) -> str:
    if row is None:
        return "- | - | -"
    return f"{row['cpu_s']:.1f} | {row['phases']['solve']:.1f} | {row['step_s'] * 1e3:.3f}"


def plot(known: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "autoshard"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=False)
    for kind in KINDS:
        seen = [n for n in LAYERS if f"{kind} {n} layers" in known]
        left.plot(seen, [known[f"{kind} {n} layers"]["phases"]["solve"] for n in seen], marker="o", label=kind)
    seen = [chips for chips in CHIPS.values() if f"{chips} chips" in known]
    right.plot(seen, [known[f"{chips} chips"]["phases"]["solve"] for chips in seen], marker="o", label="8 layers")
    for axes, what in ((left, "layers"), (right, "chips")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(what)
        axes.set_ylabel("CPU seconds to solve")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.tight_layout()
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="measure rows that are in the table too")
    parser.add_argument("--table", action="store_true", help="only write the table and the plot of what is known")
    parser.add_argument("--inside", metavar="ROW", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(measure(*rows()[arguments.inside])))
        return
    results = Results(DATA)
    for name in () if arguments.table else rows():
        if name in results.rows and not arguments.again:
            continue
        print(name, file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--inside", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results.keep(name, json.loads(done.stdout.strip().splitlines()[-1]))
    TABLE.write_text(table(results.rows))
    plot(results.rows)
    print(TABLE.read_text())


if __name__ == "__main__":
    main()
