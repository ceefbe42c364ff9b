"""Contest problems solved to proof with exact solves by HiGHS' own package, and by OR-Tools' HiGHS, in turns.

    python experiments/exact_engines.py [NAME ...] [--turns N]

Each is one `autoshard solve` process with its own helpers; what is compared is their processor time, since machines are
shared. The table is `experiments/results/exact_engines.md`.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from autoshard.solver import engine_named


HERE = pathlib.Path(__file__).parent
ENGINES = ("highs", "ortools")


def run(name: str, engine: str) -> dict[str, float | str]:
    """One solve: processor and wall seconds, cost, status."""
    path = HERE / "data" / "iopddl" / f"{name}.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "answer.json"
        command = [sys.executable, "-m", "autoshard", "solve", str(path), "--time-limit", "600", "--engine", engine]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run([*command, "--out", str(out), "--quiet"], check=True, stdout=subprocess.DEVNULL)
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = json.loads(out.read_text())
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"processor_s": used, "wall_s": wall, "cost": answer["cost"], "status": answer["status"]}


def main() -> int:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["A", "B", "G"])
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    engine_named("ortools")
    lines = [
        "# Exact solves by HiGHS and by OR-Tools",
        "",
        "`python experiments/exact_engines.py`: contest problems to proof; seconds of processor (of the wall), the",
        f"median of {arguments.turns} turns in which the engines take turns. Load average when it began: "
        f"{os.getloadavg()[0]:.1f}.",
        "",
        "| problem | highs | ortools | ratio of processor time | cost, both |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in arguments.names or ["A", "B", "G"]:
        found: dict[str, list[dict[str, float | str]]] = {engine: [] for engine in ENGINES}
        for _ in range(arguments.turns):
            for engine in ENGINES:
                found[engine].append(run(name, engine))
                print(name, engine, found[engine][-1], flush=True)
        costs = {(row["cost"], row["status"]) for rows in found.values() for row in rows}
        means = {
            engine: [statistics.median(float(row[key]) for row in rows) for key in ("processor_s", "wall_s")]
            for engine, rows in found.items()
        }
        one, two = (means[engine] for engine in ENGINES)
        shown = ", ".join(f"{cost:,} ({status})" for cost, status in sorted(costs))
        lines.append(
            f"| {name} | {one[0]:.1f} ({one[1]:.1f}) | {two[0]:.1f} ({two[1]:.1f}) | {two[0] / one[0]:.2f} | {shown} |"
        )
    (HERE / "results" / "exact_engines.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
