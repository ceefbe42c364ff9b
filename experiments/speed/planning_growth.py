"""Growth of planning with layers and with chips: CPU seconds of each phase, with repeated layers shared or not.

    python experiments/speed/planning_growth.py [--only TEXT ...] [--again] [--table]

One program is a decoder in plain JAX of 2 to 32 layers, unrolled or scanned. The other has 8 layers and runs on 16 to
16384 chips. Every plan has its own process, after one small plan that loads shared modules. The script writes
`results/planning_growth.md` and, row by row, `.json`.
"""

import sys
import time
from pathlib import Path
from typing import Any

from experiments.lib.harness import Experiment, Rows, grid, own_parser, page
from experiments.lib.saved_results import Results


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


def table(known: Rows) -> str:
    cells = [" | ".join(_cells(known.get(f"{kind} {n} layers")) for kind in KINDS) for n in LAYERS]
    return page(
        "# How planning grows",
        """
`python experiments/speed/planning_growth.py`. CPU seconds of a whole plan (not the trace), and of its solve.
A decoder with layers of its own, decided alike where they are alike (`shared`), each for itself
(`unshared`), or `scanned`; a step's time is the same where the decisions are.
""",
        "![growth](planning_growth.svg)",
        grid(
            " | ".join(["layers, v5p:4x4x4", *(f"{k} CPU s | {k} solve s | {k} step ms" for k in KINDS)]),
            zip(LAYERS, cells, strict=True),
        ),
        grid(
            "chips, 8 layers | CPU s | solve s | step ms",
            ((chips, _cells(known.get(f"{chips} chips"))) for chips in CHIPS.values()),
        ),
    )


def _cells(row: dict[str, Any] | None) -> str:
    if row is None:
        return "- | - | -"
    return f"{row['cpu_s']:.1f} | {row['phases']['solve']:.1f} | {row['step_s'] * 1e3:.3f}"


def plot(known: Rows, path: Path) -> None:
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
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    given = own_parser().parse_args()
    code = Experiment(
        script=__file__, names=rows(), work=lambda name: measure(*rows()[name]), table=table, apart=True
    ).run(given)
    if given.inside is None:
        plot(Results(given.out / "planning_growth.json").rows, given.out / "planning_growth.svg")
    return code


if __name__ == "__main__":
    sys.exit(main())
