"""The solver on the contest's problems, at the contest's time limits, on two threads: a table.

    python experiments/quality/solver_contest.py [--only AB] [--out experiments/results/solver_contest.md]

A fresh `autoshard solve` process solves each problem. Its limit counts from the start of that process. The evaluator
recomputes the cost from the printed choices. The table compares the cost with the contest's own results, and with the
literature's best known costs and lower bounds (github.com/ti2-group/iopddl_experiments). "winner, 2 threads" is the
contest winner's C++ solver run on two threads.
"""

import argparse
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time

from autoshard.solver import evaluate, read_contest


HERE = pathlib.Path(__file__).parents[1]
KNOWN = {
    # Columns: time limit (s), contest winner's solver on 2 threads, best known cost, best known lower bound.
    "A": (60, 6569457721, 6548641531, 6513812172),
    "B": (60, 532843, 532843, 532843),
    "G": (120, 217039, 217039, 216931),
    "K": (180, 2302779473, 2257227094, 2065623588),
    "M": (180, 49928188574, 49928188574, 49407421919),
    "N": (180, 204754620209, 202739586553, 172940125421),
    "S": (240, 1551405075, 1534613444, 1511240135),
    "U": (300, 2733906559, 2569342178, 2018900000),
}
HEADER = (
    "id",
    "limit s",
    "cost",
    "winner, 2 threads",
    "ratio",
    "best known",
    "ratio",
    "our bound",
    "literature's bound",
    "gap %",
    "s to within 1 %",
    "wall s",
    "peak GB",
)
RUN = (
    "import sys; from autoshard.solver.solve_command import run_solve; sys.exit(run_solve({!r}, {}, {}, 2, None, {!r}))"
)


def run(name: str, seed: int) -> dict:
    """Solve one problem in its own process and measure it."""
    path = HERE / "data" / "iopddl" / f"{name}.json.gz"
    limit, _, _, _ = KNOWN[name]
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "answer.json"
        began = time.monotonic()
        command = [sys.executable, "-c", RUN.format(str(path), limit, seed, str(out))]
        files = {stream: pathlib.Path(folder) / stream for stream in ("stdout", "stderr")}
        with files["stdout"].open("w") as stdout, files["stderr"].open("w") as stderr:
            process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
            # `wait4` returns the memory of this one process and of its children; `communicate` does not.
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.monotonic() - began
        printed, progress = files["stdout"].read_text(), files["stderr"].read_text()
        if process.returncode != 0:
            raise SystemExit(f"{name}: exit code {process.returncode}\n{progress}")
        answer = json.loads(out.read_text())
    choices = json.loads(printed.strip().splitlines()[-1])
    judged = evaluate(read_contest(path), choices)
    if not judged.feasible or judged.cost != answer["cost"]:
        raise SystemExit(f"{name}: the answer does not hold: {judged}")
    steps = [(float(a), int(b)) for a, b in re.findall(r"^ *([\d.]+) s  incumbent (\d+)", progress, re.M)]
    soon = next((when for when, cost in steps if cost <= 1.01 * judged.cost), wall)
    return {
        "name": name,
        "cost": judged.cost,
        "bound": answer["lower_bound"],
        "status": answer["status"],
        "soon": soon,
        "wall": wall,
        "load": before,
        "peak": usage.ru_maxrss / 1e6,
    }


def row(result: dict) -> str:
    limit, winner, best, bound = KNOWN[result["name"]]
    cost, ours = result["cost"], result["bound"]
    cells = (
        result["name"],
        str(limit),
        f"{cost:,}" + (" (proven)" if result["status"] == "optimal" else ""),
        f"{winner:,}",
        f"{cost / winner:.4f}",
        f"{best:,}",
        f"{cost / best:.4f}",
        f"{ours:,}",
        f"{bound:,}",
        f"{100 * (cost - ours) / cost:.2f}",
        f"{result['soon']:.1f}",
        f"{result['wall']:.1f}",
        f"{result['peak']:.2f}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="".join(KNOWN), help="ids to run, e.g. AB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(HERE / "results" / "solver_contest.md"))
    arguments = parser.parse_args()
    store = pathlib.Path(arguments.out).with_suffix(".json")
    results = json.loads(store.read_text()) if store.exists() else {}
    for name in arguments.only:
        results[name] = run(name, arguments.seed)
        print(row(results[name]), flush=True)
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    done = [results[name] for name in KNOWN if name in results]
    score = sum(min(KNOWN[r["name"]][2] / r["cost"], 1.0) for r in done)
    free = sum(KNOWN[r["name"]][2] / r["cost"] for r in done)
    loads = ", ".join(f"{r['name']} {r['load']:.1f}" for r in done)
    lines = [
        "# The solver on the contest's problems",
        "",
        f"Command: `python experiments/quality/solver_contest.py`, seed {arguments.seed}, 2 threads, "
        f"{platform.machine()} with {os.cpu_count()} cores.",
        "Peak memory is that of the larger of the two processes. "
        f"Load average of the machine when each began: {loads} "
        "(without other work it is near 0; the figures are pessimistic otherwise).",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + " --- |" * len(HEADER),
        *map(row, done),
        "",
        f"Score (sum of best known / ours, each at most 1): {score:.4f} of {len(done)}; uncapped {free:.4f}.",
    ]
    pathlib.Path(arguments.out).write_text("\n".join(lines) + "\n")
    print(lines[-1])


if __name__ == "__main__":
    main()
