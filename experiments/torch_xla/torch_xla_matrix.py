"""Planned PyTorch/XLA loops against unsharded ones: six small models, three meshes, two optimizers.

    python experiments/torch_xla/torch_xla_matrix.py [--only TEXT ...] [--again] [--table] [--steps N]

Rows are saved in `results/torch_xla_matrix.json`; the table is `results/torch_xla_matrix.md`. Every row is a process
of its own under the real torch_xla on 8 CPU devices.

The unsharded losses are from one device in another process. Another unsharded run has the examples of each batch in
another order, which shows the effect of rounding alone. The table also has the bytes on the wire by mesh axis. They
are those of the plan, and those of the HLO that XLA runs from the second step on.
"""

import json
import os
import subprocess
import sys
from typing import Any

from experiments.lib.harness import ROOT, Experiment, Rows, grid, own_parser, page


MODELS = ("mlp", "cnn", "gpt2", "llama", "vit", "mixtral")
MESHES = ("8", "4,2", "2,4")
UNSHARDED = {"unsharded": [], "reordered": ["--reorder"]}
ALLOWED = 1e-5


def run(model: str, options: list[str], steps: int) -> dict[str, Any]:
    """Return losses and compile counts by optimizer; without a mesh in `options` on one unsharded device."""
    command = [sys.executable, "-m", "experiments.lib.torch_xla_run", model, "--steps", str(steps)]
    process = subprocess.run(
        command + options,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        said = process.stderr.strip().splitlines()
        return {"error": said[-1] if said else f"exit code {process.returncode}"}
    return json.loads(lines[-1])


def largest_difference(losses: list[float], expected: list[float]) -> float:
    """Return the largest difference of any step, relative to its loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def on_the_wire(wire: dict[str, Any]) -> str:
    """Format planned bytes by axis, with executed over planned if they differ; axes of size 1 carry nothing."""
    planned, executed = wire["planned"], wire["executed"][-1]
    axes = sorted(axis for axis in {*planned, *executed} if planned.get(axis) or executed.get(axis))
    if not axes:
        return "nothing"
    parts = []
    for axis in axes:
        a, b = planned.get(axis, 0), executed.get(axis, 0)
        off = f"{b / a - 1:+.1%}" if a else f"{b} unplanned"
        parts.append(f"{axis} {a}" if abs(a - b) < 1e-3 * a else f"{axis} {a} ({off})")
    return ", ".join(parts)


def table(rows: Rows, steps: int) -> str:
    """Return the table of all rows that ran."""
    lines = []
    for model in MODELS:
        plain, reordered = (rows.get(f"{model} {name}", {}) for name in UNSHARDED)
        for mesh in MESHES:
            by_optimizer = rows.get(f"{model} {mesh}")
            if by_optimizer is None or not plain or not reordered:
                continue
            errors = [each["error"] for each in (by_optimizer, plain, reordered) if "error" in each]
            if errors:
                lines.append([model, f"{mesh} | | {errors[0][:100]} | | | | |", ""])
                continue
            for optimizer in sorted(by_optimizer.keys() - {"code"}, reverse=True):  # momentum first
                row, expected = by_optimizer[optimizer], plain[optimizer]["losses"]
                off = largest_difference(row["losses"], expected)
                noise = largest_difference(reordered[optimizer]["losses"], expected)
                mark = "" if off < ALLOWED else " (above what is allowed)"
                cells = [model, mesh.replace(",", " x "), optimizer, f"{off:.1e}{mark}", f"{noise:.1e}"]
                cells += [row["compiles"][-1], f"{row['split_parameters']} parameters, {row['split_states']} states"]
                lines.append([*cells, on_the_wire(row["wire"]), "; ".join(row["words"])])
    return page(
        "# Planned PyTorch/XLA loops against unsharded ones",
        f"{steps} steps in fp32, 8 CPU devices; "
        f"{ALLOWED:.0e} of a loss is allowed. Made by `python experiments/torch_xla/torch_xla_matrix.py`.",
        grid(
            "model | mesh | optimizer | largest difference of a loss | from its order alone | compiled | split | "
            "bytes on the wire (executed) | plan",
            lines,
        ),
    )


def main() -> int:
    parser = own_parser()
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    kinds = UNSHARDED | {mesh: ["--mesh", mesh] for mesh in MESHES}
    rows = {f"{model} {kind}": (model, options) for model in MODELS for kind, options in kinds.items()}
    return Experiment(
        script=__file__,
        names=rows,
        work=lambda name: run(*rows[name], given.steps),
        table=lambda known: table(known, given.steps),
        is_open=lambda row: "error" in row,
    ).run(given)


if __name__ == "__main__":
    sys.exit(main())
