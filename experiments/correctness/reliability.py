"""Counts of autoshard's behaviour when things go wrong.

    python experiments/correctness/reliability.py [--only PART] [--programs 334] [--kills 200] [--problems 20000]
                                                  [--plans 300] [--steps 2000]

- **Programs**: random JAX programs run on three meshes of 8 CPU devices. Each is planned with pinned specs, so that it
  is split, and compared with the unplanned run (`tests/random_programs.py`, `tests/random_runs.py`).
- **Problems**: small problems of every kind that is hard to solve correctly, checked by brute force
  (`tests/solver/random_problems.py`).
- **Kills**: a command is ended by SIGKILL, SIGTERM or SIGINT at a random moment, by the clock or before it touches a
  file. Its files must be complete or absent, and its processes gone two seconds later. No other files remain where a
  clean-up could run. The next run in the same place must write the very same files (`tests/faults.py`).
- **Places**: where something is missing, the command writes the same plan or a sentence (`tests/environments.py`).
- **Long runs**: many plans in one process, and many steps under the PyTorch/XLA hook (`tests/long_runs.py`).

Rows are saved in `results/reliability.json` as they are computed, and are not run again. The script writes
`results/reliability.md`; the exit code is 1 if anything was wrong.
"""

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.lib.reliability_table import rows_of, table, wrong
from experiments.lib.saved_results import Results


ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parents[1] / "results" / "reliability.md"
PARTS = ("problems", "places", "plans", "steps", "kills", "programs")
AT_ONCE = 20
"""Programs that one process runs, since compiled programs stay in its memory."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=334, metavar="N", help="each on three meshes (default: 334)")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="commands to end (default: 200)")
    parser.add_argument("--problems", type=int, default=20_000, metavar="N", help="to solve (default: 20000)")
    parser.add_argument("--plans", type=int, default=300, metavar="N", help="in one process (default: 300)")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="under the hook (default: 2000)")
    parser.add_argument("--only", choices=PARTS, help="count this alone, and keep the rows of the others")
    parser.add_argument("--worker", nargs=2, type=int, metavar=("FIRST", "END"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return 0
    results = Results(TABLE.with_suffix(".json"))
    parts = {
        "problems": lambda: run_problems(options.problems, results),
        "places": lambda: run_places(results),
        "plans": lambda: run_long("plans", options.plans, results),
        "steps": lambda: run_long("steps", options.steps, results),
        "kills": lambda: run_kills(options.kills, results),
        "programs": lambda: run_programs(options.programs, results),
    }
    for part in PARTS if options.only is None else (options.only,):
        parts[part]()
    TABLE.write_text(table(results.rows))
    print(TABLE.read_text())
    return 1 if wrong(results.rows) else 0


def work(first: int, end: int) -> None:
    """Run some programs in this process, and print each outcome as a line of JSON."""
    from tests.random_programs import random_program
    from tests.random_runs import MESHES, expected, run

    for seed in range(first, end):
        program = random_program(seed)
        wanted = expected(program)
        for mesh in MESHES:
            try:
                outcome = run(program, mesh, wanted)
            except Exception as error:  # any error that is no refusal
                outcome = f"raised: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            print(json.dumps([seed, mesh, outcome]), flush=True)


def run_programs(count: int, results: Results) -> None:
    """Count the outcomes of the seeds that no saved row covers, and save them."""
    for first in range(0, count, AT_ONCE):
        end = min(count, first + AT_ONCE)
        if not any(low <= first and end <= high for low, high in map(_seeds, rows_of(results.rows, "programs"))):
            results.keep(f"programs {first} {end}", _run_programs(first, end))


def _seeds(key: str) -> tuple[int, int]:
    _, first, end = key.split()
    return int(first), int(end)


def _run_programs(first: int, end: int) -> dict[str, int]:
    """Count the outcomes of some programs in a process of their own.

    An outcome that differs or raises is listed with its seed and mesh.
    """
    counts: collections.Counter[str] = collections.Counter()
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "AUTOSHARD_CACHE_DIR": ""}
    environment |= {"AUTOSHARD_DATA_DIR": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--worker", str(first), str(end)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    for seed, mesh, outcome in map(json.loads, done.stdout.splitlines()):
        if outcome.startswith(("differs", "raised")):
            outcome += f" (seed {seed}, {mesh})"
            print(outcome, flush=True)
        counts[outcome] += 1
    if done.returncode:
        counts[f"raised: the process of seeds {first} to {end - 1} ended with {done.returncode}"] += 1
    return dict(counts)


def run_kills(count: int, results: Results) -> None:
    """Save the observations of each command that was ended."""
    from tests.faults import COMMANDS, draw_ending, end_one, prepare, whole

    left = [number for number in range(count) if f"kill {number}" not in results.rows]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (inputs := folder / "inputs").mkdir()
        if left:
            prepare(inputs)
        known = {}
        for number in left:
            draw = random.Random(f"kill {number}")
            command = COMMANDS[number % len(COMMANDS)]
            if command not in known:
                # Each command has its own home: observations of `refine` there change the plans of other commands.
                known[command] = whole(command, inputs, folder / f"home{len(known)}")
                for path in [*inputs.glob("new*")]:
                    path.unlink()
            ending = draw_ending(draw, known[command])
            seen = end_one(command, inputs, folder / f"place{number}", ending, known[command])
            moment = f"at {ending.seconds:.2f} s" if ending.event is None else f"at file {ending.event}"
            row: dict[str, Any] = {
                "command": command.line,
                "signal": ending.sent.name,
                "moment": moment,
                "wrong": seen.wrong,
            }
            results.keep(f"kill {number}", row | {"early": seen.early, "beside": seen.beside})
            print(number, command.line, ending.sent.name, moment, seen, flush=True)


def run_problems(count: int, results: Results) -> None:
    """Count the outcomes of each kind of problem, and save them."""
    from tests.solver.random_problems import KINDS, judged, random_problem

    each = -(-count // len(KINDS)) if count else 0
    for kind in KINDS:
        key = f"problems {each} {kind}"
        if not each or key in results.rows:
            continue
        counts: collections.Counter[str] = collections.Counter()
        for seed in range(each):
            outcome = judged(random_problem(kind, seed))
            counts[f"{outcome} (seed {seed})" if outcome.startswith("wrong") else outcome] += 1
        results.keep(key, dict(counts))
        print(key, dict(counts), flush=True)


TOGETHER = "eight processes at once, one cache and one database"


def run_places(results: Results) -> None:
    """Save the fault that was seen in each place, or an empty text."""
    from tests.environments import PLAN, REFUSES, WORKS, run, seen
    from tests.faults import STEP

    left = [place for place in (*WORKS, *REFUSES, TOGETHER) if f"place {place}" not in results.rows]
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)  # one of the places belongs to another user

        def folder(name: str) -> Path:
            (path := Path(made) / name.replace("/", " ")).mkdir()
            (path / "step.py").write_text(STEP)
            return path

        if left:
            usual = run("", here := folder("usual"), made="pass")
            if usual.returncode:
                raise SystemExit(usual.stderr)
            wanted = (here / "new.json").read_bytes()
        for place in left:
            if place == TOGETHER:
                continue
            fault = seen(place, folder(place), wanted)
            results.keep(f"place {place}", fault)
            print(place, fault or "as it should be", flush=True)
        if TOGETHER in left:
            results.keep(f"place {TOGETHER}", _together([folder(f"beside {k}") for k in range(8)], PLAN, wanted))


def _together(folders: list[Path], line: str, wanted: bytes) -> str:
    """Run plans at once under one home, with refinements that write observations between them."""
    home = folders[0] / "home"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    refine = "refine step.py --topology cpu:4@2 --mesh data=4 --plans 2 --rounds 1 --steps 2 --quiet --out new.json"
    code = "from autoshard.cli import main; raise SystemExit(main())"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, *(refine if number % 2 else line).split()],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, folder in enumerate(folders)
    ]
    ends = [process.communicate()[1] for process in running]
    wrong = [f"process {n} ended with {p.returncode}: {ends[n][-200:]}" for n, p in enumerate(running) if p.returncode]
    wrong += [f"process {n} said {said[-200:]}" for n, said in enumerate(ends) if "cannot" in said or "aside" in said]
    for number in range(0, len(folders), 2):
        out = folders[number] / "new.json"
        if not out.exists() or out.read_bytes() != wanted:
            wrong.append(f"process {number} made another plan")
    from autoshard.cost import Database

    kept = Database(home / ".local/share/autoshard").read("cpu:4@2", _compiler("cpu:4@2"))
    if len(kept) < 2:
        wrong.append(f"{len(kept)} observations are kept")
    wrong += [f"{path.name} is left" for path in home.rglob("*") if path.name.startswith(".autoshard-")]
    return "; ".join(wrong)


def _compiler(topology: str) -> str:
    from autoshard.cost import Topology, compiler_version

    return compiler_version(Topology.parse(topology))


def run_long(kind: str, count: int, results: Results) -> None:
    """Save the resources that a process uses at some moments of a long run."""
    key = f"long {kind} {count}"
    if not count or key in results.rows:
        return
    environment = {**os.environ, "AUTOSHARD_CACHE_DIR": "", "AUTOSHARD_DATA_DIR": "", "JAX_PLATFORMS": "cpu"}
    environment |= {"PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    if kind == "steps":
        environment |= {"XLA_AUTO_SPMD_MESH": "4,2", "XLA_FLAGS": ""}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "tests.long_runs", kind, str(count)]
        environment["TMPDIR"] = folder
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT, check=True)
    results.keep(key, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])


if __name__ == "__main__":
    raise SystemExit(main())
