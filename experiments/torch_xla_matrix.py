"""Losses of planned PyTorch/XLA loops against unsharded ones: six small models, three meshes, two optimizers.

`python experiments/torch_xla_matrix.py` fills `results/torch_xla_matrix.json` (rows that are there are not run again;
`--again` runs them all) and writes the table beside it. Every row is a process of its own under the real torch_xla on 8
CPU devices; the unsharded losses come from one device in another process.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results" / "torch_xla_matrix.json"
MODELS = ("mlp", "cnn", "gpt2", "llama", "vit", "mixtral")
MESHES = ("8", "4,2", "2,4")
ALLOWED = 1e-5


def run(model: str, mesh: str | None, steps: int) -> dict[str, Any]:
    """Losses and compile counts by optimizer; `mesh` None for one unsharded device."""
    command = [sys.executable, "-m", "experiments.torch_xla_run", model, "--steps", str(steps)]
    process = subprocess.run(
        command + (["--mesh", mesh] if mesh else []),
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
    """Of any step, relative to its loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def table(rows: dict[str, Any]) -> str:
    """The Markdown table of all rows that ran."""
    head = "| model | mesh | optimizer | largest difference of a loss | compiled | split | pins |"
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- |"]
    for model in MODELS:
        plain = rows.get(f"{model} unsharded", {})
        for mesh in MESHES:
            found = rows.get(f"{model} {mesh}")
            if found is None:
                continue
            if "error" in found or "error" in plain:
                lines.append(f"| {model} | {mesh} | | {(found.get('error') or plain.get('error'))[:100]} | | | |")
                continue
            for optimizer, row in found.items():
                off = largest_difference(row["losses"], plain[optimizer]["losses"])
                mark = "" if off < ALLOWED else " (too large)"
                lines.append(
                    f"| {model} | {mesh.replace(',', ' x ')} | {optimizer} | {off:.1e}{mark} | {row['compiles'][-1]} | "
                    f"{row['split_parameters']} parameters, {row['split_states']} states | {row['pins']} |"
                )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--meshes", nargs="+", default=MESHES, choices=MESHES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--again", action="store_true", help="run rows that have been run")
    given = parser.parse_args()
    rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for model in given.models:
        for mesh in (None, *given.meshes):
            name = f"{model} {mesh or 'unsharded'}"
            if name in rows and "error" not in rows[name] and not given.again:
                continue
            print(name, flush=True)
            rows[name] = run(model, mesh, given.steps)
            RESULTS.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    text = table(rows)
    RESULTS.with_suffix(".md").write_text(
        f"# Planned PyTorch/XLA loops against unsharded ones\n\n{given.steps} steps in fp32, 8 CPU devices; allowed "
        f"{ALLOWED:.0e}. Made by `python experiments/torch_xla_matrix.py`.\n\n{text}"
    )
    print(text)


if __name__ == "__main__":
    main()
