"""PyTorch/XLA's own tests of SPMD, each file once with auto-sharding and once without autoshard: a table.

    make bench-spmd PYTORCH_XLA=/path/to/a/checkout/of/pytorch/xla   (v2.9.0)
    python experiments/torch_xla/torch_xla_spmd.py [--only TEXT ...] [--again] [--table]

Every `test/spmd/test_*.py` of the checkout that `PYTORCH_XLA` names runs in two processes on 8 CPU devices. In `hooked`
with `XLA_AUTO_SPMD=1`, every step that the tests run in SPMD mode is planned. In `unhooked`, PyTorch does not load
autoshard. Without a checkout the tests are those of `torch_xla_spmd_shapes.py`, which cover the same subjects and are
written independently. Rows are saved in `experiments/results/torch_xla_spmd.json`; the table is `torch_xla_spmd.md`
there.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.lib.harness import ROOT, Experiment, Rows, grid, page


SHAPES = ROOT / "experiments" / "lib" / "torch_xla_spmd_shapes.py"
LIMIT_S = 600.0
WAYS = {
    "hooked": {"XLA_AUTO_SPMD": "1", "XLA_AUTO_SPMD_MESH": "4,2"},
    "unhooked": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
}


def run_file(path: Path, way: str, checkout: Path | None) -> dict[str, Any]:
    """Run a file in one way; return the outcome of each test by name, and an error of the file.

    An outcome is `passed`, `skipped`, or the reason of a failure.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "PJRT_", "AUTOSHARD_"))}
    here = [str(ROOT)] if checkout is None else [str(path.parent), str(checkout / "test"), str(checkout), str(ROOT)]
    environment = kept | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "PYTHONPATH": os.pathsep.join(here)} | WAYS[way]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "said").open("w+") as output:
        command = [sys.executable, str(ROOT / "experiments" / "lib" / "torch_xla_spmd_run.py"), str(path), str(folder)]
        try:
            code = subprocess.run(
                command, env=environment, cwd=folder, stdout=output, stderr=output, timeout=LIMIT_S
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        results = Path(folder) / "results"
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        outcomes: dict[str, Any] = {"tests": {name: came for line in lines for name, came in line.items()}}
        missing = [name for name, came in outcomes["tests"].items() if came == "asked"]
        for name in missing:
            outcomes["tests"][name] = f"not run to its end: the process ended with {code}" if code else "not run"
        if not lines:
            output.seek(0)
            last = [line for line in output.read().splitlines() if line.strip()][-1:]
            outcomes["wrong"] = f"the file ended with {code}: {' '.join(last)[:200]}"
        return outcomes


def row_of(path: Path, checkout: Path | None) -> dict[str, Any]:
    """Run a file both ways: count the tests that pass in both, and list the others with their reasons."""
    both = {way: run_file(path, way, checkout) for way in WAYS}
    hooked, unhooked = (both[way]["tests"] for way in ("hooked", "unhooked"))
    names = sorted(hooked.keys() | unhooked.keys())
    alike = [name for name in names if hooked.get(name) == unhooked.get(name) == "passed"]
    neither: dict[str, str] = {}
    differ: dict[str, list[str]] = {}
    for name in names:
        came = [hooked.get(name, "not run"), unhooked.get(name, "not run")]
        if "passed" in came and came[0] != came[1]:
            differ[name] = came
        elif came[0] != "passed":
            neither[name] = came[1]
    wrong = {way: both[way]["wrong"] for way in WAYS if "wrong" in both[way]}
    return {"tests": len(names), "both": len(alike), "neither": neither, "differ": differ, "wrong": wrong}


def table(rows: Rows) -> str:
    tests, both = (sum(row[key] for row in rows.values() if row["tests"]) for key in ("tests", "both"))
    differ = sum(len(row["differ"]) for row in rows.values())
    lines, notes = [], []
    for name, row in rows.items():
        lines.append([name, row["tests"], row["both"], len(row["neither"]), len(row["differ"]), row["code"]])
        notes += [f"- {name}, {test}: hooked {_of(a)}; unhooked {_of(b)}" for test, (a, b) in row["differ"].items()]
        notes += [f"- {name}, {test}, in neither: {_of(why)}" for test, why in row["neither"].items()]
        notes += [f"- {name}, {way}: {_of(why)}" for way, why in row["wrong"].items()]
    return page(
        "# Tests of SPMD with auto-sharding, and without it",
        """
`make bench-spmd PYTORCH_XLA=CHECKOUT` runs PyTorch/XLA's own `test/spmd`, each file in a process with
`XLA_AUTO_SPMD=1`, by which every step is planned, and in one without autoshard, on 8 CPU devices.
Without a checkout the file is `torch_xla_spmd_shapes.py`, which does what those do in words of its own.
""",
        f"Of {tests} tests {both} pass in both; {differ} differ.",
        grid("file | tests: | pass in both: | pass in neither, or are skipped: | differ: | commit", lines),
        notes,
    )


def _of(said: str) -> str:
    """Format the outcome of a test as a part of a line."""
    return " ".join(said.replace("|", "/").split())[:240]


def main() -> int:
    checkout = Path(os.environ["PYTORCH_XLA"]).absolute() if os.environ.get("PYTORCH_XLA") else None
    if checkout is not None and not (checkout / "test" / "spmd").is_dir():
        raise SystemExit(f"PYTORCH_XLA: {checkout} is no checkout of pytorch/xla: it has no test/spmd.")
    paths = [SHAPES] if checkout is None else sorted((checkout / "test" / "spmd").glob("test_*.py"))
    files = {path.name: path for path in paths}
    return Experiment(script=__file__, names=files, work=lambda name: row_of(files[name], checkout), table=table).run()


if __name__ == "__main__":
    sys.exit(main())
