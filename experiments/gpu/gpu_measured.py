"""Plans for one GPU, run on the local GPU: predicted and measured time, and compiled memory.

    python experiments/gpu/gpu_measured.py [ROW ...] [--seconds 400] [--topology h100:1] [--again]
    python experiments/gpu/gpu_measured.py --tiny --topology cpu:8

Programs are those of `gpu_programs.py`, ordered by value. Rows for which no time is left do not start. Results are
saved by row in `experiments/results/gpu_measured.json`, so that a broken run resumes; `--again` repeats saved rows.
With no GPU `gpu_fidelity.py` compiles the same programs and compares memory. `--tiny` runs tiny programs, to test the
script without a GPU.
"""

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiments.lib.saved_results import checked_out


HERE = Path(__file__).parents[1]
TABLE = HERE / "results" / "gpu_measured.md"
STEP_SECONDS = 3.0
"""Approximate seconds of all timed steps of one row; there are at least three steps."""


def run(name: str, topology: str, tiny: bool) -> dict[str, Any]:
    """Plan and run one program, and return predicted and measured figures."""
    from autoshard.exec import measure
    from autoshard.planning import Options, make_plan
    from experiments.lib.programs.gpu_programs import PROGRAMS

    devices = int(topology.partition(":")[2])
    program = PROGRAMS[name].program(tiny)
    plan = make_plan(program, Options(topology=topology, mesh={"data": devices})).plan
    steps = min(max(3, int(STEP_SECONDS / max(plan.prediction.step_time_s, 1e-3))), 50)
    measurement = measure(program, plan, steps=steps, warmup=2)
    sizes = measurement.memory
    held = sizes["arguments"] + sizes["results"] + sizes["temporaries"] - sizes["donated"]
    return {
        "row": name,
        "code": checked_out(),
        "date": datetime.date.today().isoformat(),
        "topology": topology,
        "device": measurement.device,
        "versions": {module: sys.modules[module].__version__ for module in ("jax", "jaxlib")},
        "predicted": {"step_time_s": plan.prediction.step_time_s, "peak_bytes": plan.prediction.peak_bytes},
        "measured": {"step_time_s": measurement.step_time_s, "spread": measurement.spread, "steps": steps},
        "compiled_bytes": sizes.get("peak", held),
        "compile_s": measurement.compile_s,
    }


def work(names: list[str], topology: str, tiny: bool) -> None:
    """Run rows one after the other, and print a line of JSON for each."""
    from autoshard import UserError

    for name in names:
        print(json.dumps({"begins": name}), flush=True)
        try:
            print(json.dumps(run(name, topology, tiny)), flush=True)
        except UserError as error:
            print(json.dumps({"row": name, "failed": str(error)}), flush=True)


def started(names: list[str], topology: str, tiny: bool) -> "subprocess.Popen[str]":
    """Start a process that runs rows."""
    command = [sys.executable, __file__, *names, "--inside", "--topology", topology, *(["--tiny"] if tiny else [])]
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    if topology.startswith("cpu:"):
        devices = topology.partition(":")[2]
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def run_all(names: list[str], topology: str, tiny: bool, seconds: float, path: Path) -> None:
    """Run rows until `seconds` have passed; a row that ends its process is saved as failed, and the next rows run."""
    began, left = time.monotonic(), list(names)
    while left and time.monotonic() - began < seconds:
        process, current = started(left, topology, tiny), ""
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            result = json.loads(line)
            current = result.get("begins", current)
            if "begins" in result:
                continue
            left.remove(result["row"])
            keep(path, result)
            print(line_of(result), flush=True)
            if time.monotonic() - began > seconds:
                process.terminate()
        if process.wait() and time.monotonic() - began < seconds and current in left:
            left.remove(current)
            keep(path, {"row": current, "failed": f"the process ended with {process.returncode}"})
    for name in left:
        print(f"{name}: not run, no time was left", flush=True)


def load(path: Path) -> dict[str, dict[str, Any]]:
    return {row["row"]: row for row in json.loads(path.read_text())} if path.exists() else {}


def keep(path: Path, result: dict[str, Any]) -> None:
    rows = load(path) | {result["row"]: result}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    os.replace(scratch, path)


def line_of(result: dict[str, Any]) -> str:
    """Return a row of the table, or a line with the reason of its failure."""
    if "failed" in result:
        return f"- {result['row']}: {result['failed']}"
    predicted, measured, compiled = result["predicted"], result["measured"], result["compiled_bytes"]
    return (
        f"| {result['row']} | {1e3 * predicted['step_time_s']:.4g} | {1e3 * measured['step_time_s']:.4g} | "
        f"{predicted['step_time_s'] / measured['step_time_s']:.2f} | {predicted['peak_bytes'] / 2**30:.2f} | "
        f"{compiled / 2**30:.2f} | {predicted['peak_bytes'] / compiled:.2f} | {result['device']} | {result['date']} |"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a page of Markdown."""
    done = [row for row in rows if "failed" not in row]
    ratios = [row["predicted"]["step_time_s"] / row["measured"]["step_time_s"] for row in done]
    sizes = [row["predicted"]["peak_bytes"] / row["compiled_bytes"] for row in done]
    lines = [
        "# Steps of one GPU, predicted and measured",
        "",
        "`python experiments/gpu/gpu_measured.py`. Times are medians, in ms; memory is of the compiled program, in",
        "GiB.",
        "",
        "| row | ms predicted | measured | ratio | GiB predicted | compiled | ratio | device | date |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(line_of(row) for row in done),
        "",
        *(line_of(row) for row in rows if "failed" in row),
    ]
    for what, ratios_of_kind in (("Time", ratios), ("Memory", sizes)):
        if ratios_of_kind:
            off = sorted(abs(ratio - 1.0) for ratio in ratios_of_kind)
            lines.append(f"{what}: {statistics.median(off):.1%} off in the median, {off[-1]:.1%} at worst.")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the requested rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--topology", default="h100:1")
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        work(arguments.rows, arguments.topology, arguments.tiny)
        return 0
    if not arguments.tiny and shutil.which("nvidia-smi") is None:
        print("no GPU is here: `gpu_fidelity.py` compiles the same programs without one", file=sys.stderr)
        return 0
    from experiments.lib.programs.gpu_programs import PROGRAMS

    path = HERE.parent / "build" / "gpu_tiny.json" if arguments.tiny else TABLE.with_suffix(".json")
    known = {} if arguments.again else load(path)
    names = [name for name in arguments.rows or PROGRAMS if name not in known or "failed" in known[name]]
    run_all(names, arguments.topology, arguments.tiny, arguments.seconds, path)
    text = table(list(load(path).values()))
    if not arguments.tiny:
        TABLE.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
