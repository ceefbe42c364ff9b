"""The solver on the contest's problems, at the contest's time limits, on two threads: a table.

    python experiments/quality/solver_contest.py [--only A ...] [--again] [--out FOLDER]

A fresh `autoshard solve` process solves each problem. Its limit counts from the start of that process. The evaluator
recomputes the cost from the printed choices. The table compares the cost with the contest's own results, and with the
literature's best known costs and lower bounds (github.com/ti2-group/iopddl_experiments). "winner, 2 threads" is the
contest winner's C++ solver run on two threads.
"""

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
from experiments.lib.harness import ROOT, Experiment, Rows, grid, own_parser, page


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
RUN = (
    "import sys; from autoshard.solver.solve_command import run_solve; sys.exit(run_solve({!r}, {}, {}, 2, None, {!r}))"
)


def run(name: str, seed: int) -> dict:
    """Solve one problem in its own process and measure it."""
    path = ROOT / "experiments" / "data" / "iopddl" / f"{name}.json.gz"
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
        "cost": judged.cost,
        "bound": answer["lower_bound"],
        "status": answer["status"],
        "soon": soon,
        "wall": wall,
        "load": before,
        "peak": usage.ru_maxrss / 1e6,
    }


def cells_of(name: str, result: dict) -> list[object]:
    limit, winner, best, bound = KNOWN[name]
    cost, ours = result["cost"], result["bound"]
    cells = [name, limit, f"{cost:,}" + (" (proven)" if result["status"] == "optimal" else ""), f"{winner:,}"]
    cells += [f"{cost / winner:.4f}", f"{best:,}", f"{cost / best:.4f}", f"{ours:,}", f"{bound:,}"]
    cells += [f"{100 * (cost - ours) / cost:.2f}", f"{result['soon']:.1f}", f"{result['wall']:.1f}"]
    return [*cells, f"{result['peak']:.2f}"]


def table(rows: Rows, seed: int) -> str:
    shares = [KNOWN[name][2] / row["cost"] for name, row in rows.items()]
    loads = ", ".join(f"{name} {row['load']:.1f}" for name, row in rows.items())
    return page(
        "# The solver on the contest's problems",
        [
            f"Command: `python experiments/quality/solver_contest.py`, seed {seed}, 2 threads, "
            f"{platform.machine()} with {os.cpu_count()} cores.",
            "Peak memory is that of the larger of the two processes. "
            f"Load average of the machine when each began: {loads} "
            "(without other work it is near 0; the figures are pessimistic otherwise).",
        ],
        grid(
            "id | limit s | cost | winner, 2 threads | ratio | best known | ratio | our bound | literature's bound | "
            "gap % | s to within 1 % | wall s | peak GB",
            (cells_of(name, row) for name, row in rows.items()),
        ),
        f"Score (sum of best known / ours, each at most 1): {sum(min(share, 1.0) for share in shares):.4f} of "
        f"{len(rows)}; uncapped {sum(shares):.4f}.",
    )


def main() -> int:
    parser = own_parser()
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    return Experiment(
        script=__file__,
        names=KNOWN,
        work=lambda name: run(name, given.seed),
        table=lambda rows: table(rows, given.seed),
    ).run(given)


if __name__ == "__main__":
    sys.exit(main())
