"""Cost of planning programs that are large in one way each: layers, arguments, parameters.

    python experiments/speed/planning_large_programs.py [--only TEXT ...] [--again] [--table] [--profile]

One program has 80 unrolled layers of a decoder in plain JAX, another a step of 10,000 arguments (a deep network with
AdamW). The third is a mixture of 1T parameters on 2048 chips. Every row is traced and planned in a process of its
own, without a cache, and saved in `results/planning_large_programs.json`. `--profile` prints a profile of the named
rows instead.
"""

import sys
from typing import TYPE_CHECKING, Any

from experiments.lib.harness import ROOT, Experiment, Rows, chosen, grid, own_parser, page
from experiments.lib.plan_command import run


if TYPE_CHECKING:
    from autoshard.program import Program


MARK_S = 60
MIXTURE = "hf:experiments/data/mixture_1t.json"
SPARSE = ("--train", "--batch", "2048", "--seq", "4096", "--remat", "full", "--topology", "v5p:8x16x16")
SMALL = ("--topology", "v5p:4x4x4", "--mesh")
ROWS = {
    "80 layers": (__file__, ("--entry", "layers", *SMALL, "data=16,model=4")),
    "80 layers, mesh searched": (__file__, ("--entry", "layers", *SMALL, "auto")),
    "10,000 arguments": (__file__, ("--entry", "arguments", *SMALL, "data=16,model=4")),
    "mixture of 1T": (MIXTURE, SPARSE),
}
PHASES = ("trace", "extract", "meshes", "price", "solve", "write")


def layers() -> "Program":
    """Make a decoder of 80 unrolled layers of width 4096, with AdamW."""
    from experiments.lib.programs.jax_case import train_program
    from experiments.lib.programs.jax_layers import layered

    return train_program("layers", layered(80, width=4096, batch=128, seq=2048), "adamw")


def arguments() -> "Program":
    """Make a step of 10,000 arguments: weights and biases of 1666 layers, their two moments, a count and the batch."""
    from experiments.lib.programs.jax_case import Case, dense, f32, squares, train_program
    from experiments.lib.programs.jax_case import layers as stack

    width = 1024

    def forward(params: Any, data: Any) -> Any:
        return dense(params, data["x"])

    batch = {"x": f32(4096, width), "y": f32(4096, width)}
    return train_program("arguments", Case(stack([width] * 1667), batch, forward, squares(forward)), "adamw")


def work(name: str) -> dict[str, Any]:
    """Trace and plan one program, without a cache."""
    program, options = ROWS[name]
    answer = run(program, [*options, "--no-cache"], limit_s=600.0)
    row = {"cpu_s": answer["cpu"], "wall_s": answer["wall"], "planner_bytes": answer["pss"]}
    if "error" in answer:
        return row | {"error": answer["error"]}
    row |= {key: answer[key] for key in ("step_time_s", "plan_gap")} | {"phases": answer["wall_s"]}
    return row | {"mesh": ", ".join(f"{axis}={n}" for axis, n in answer["mesh"].items())}


def table(rows: Rows) -> str:
    lines = []
    for name, row in rows.items():
        cells = [name, f"{row['cpu_s']:.0f}", f"{row['wall_s']:.0f}", f"{row['planner_bytes'] / 1e9:.1f}"]
        if "error" in row:
            lines.append([*cells, row["error"]])
            continue
        cells += [*(f"{row['phases'].get(phase, 0.0):.1f}" for phase in PHASES), row["mesh"]]
        lines.append([*cells, f"{row['step_time_s'] * 1e3:.1f}", f"{row['plan_gap']:.2%}"])
    return page(
        "# Large programs",
        f"""
`python experiments/speed/planning_large_programs.py`. Of a whole `autoshard plan`, with start and trace,
nothing cached; {MARK_S} s
of processor are aimed at. `GB`: the most that all its processes held at once, shared pages counted once.
""",
        grid(f"program | CPU s | wall s | GB | {' s | '.join(PHASES)} s | mesh | step ms | plan gap", lines),
    )


def profile(name: str) -> None:
    """Print the profile of one row, in this process."""
    import cProfile
    import pstats

    from autoshard.cli import main as autoshard

    program, options = ROWS[name]
    profiler = cProfile.Profile()
    profiler.runcall(autoshard, ["plan", program, *options, "--no-cache"])
    kept = ROOT / "build" / f"scale-{name.split()[0]}.prof"
    kept.parent.mkdir(exist_ok=True)
    profiler.dump_stats(kept)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40).sort_stats("cumtime").print_stats(60)


def main() -> int:
    parser = own_parser()
    parser.add_argument("--profile", action="store_true", help="print where the time of rows goes, keep nothing")
    given = parser.parse_args()
    if given.profile:
        for name in chosen(ROWS, given.only):
            profile(name)
        return 0
    return Experiment(script=__file__, names=ROWS, work=work, table=table).run(given)


if __name__ == "__main__":
    sys.exit(main())
