"""Cost of a sweep by local processes and by Ray, equality of its files, and losses when a node is killed.

    python experiments/speed/ray_sweep.py [--rounds 3] [--calls 200]

The command runs one sweep of a small model in four ways, in turn. The first is local processes (`--jobs 2`), the second
a Ray of its own (`--on ray`, `--jobs 2`). The third is a cluster of two nodes of one CPU on this machine. The fourth is
such a cluster of which SIGKILL ends one node while it works at a row.

Files are compared byte for byte with those of the first way. Processor time covers all started processes, including
those that outlive their parents: this process adopts orphans, and waits for each.

Then the cost of one small call is measured in four ways, in turn. These are a helper of the planner
(`autoshard.base.workers`), `HelperPool` (used by local sweeps), Python's own `ProcessPoolExecutor` (spawned processes),
and Ray.

The script writes `results/ray_sweep.md`. The exit code is 1 if a file differs, a row is lost, or a process is left.
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import datetime
import importlib.metadata
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autoshard.base.ray_pool import RayPool
from autoshard.base.worker import Job, Worker
from autoshard.base.worker_pool import HelperPool
from tests.ray_cluster import LocalCluster, local_cluster


ROOT = Path(__file__).parents[2]
TABLE = ROOT / "experiments" / "results" / "ray_sweep.md"
SWEEP = (
    "hf:llama-tiny --train --seq 64 --remat full --batch 8,16 --topology v5e:1x1,v5e:2x2,v5e:2x4,v5p:2x2x1 --mesh auto"
)
ROWS = 8
LOCAL, OWN, CLUSTER, KILLED = "local processes", "a Ray of its own", "a cluster of two nodes", "of which one is killed"
PR_SET_CHILD_SUBREAPER = 36
LEFT_S = 20.0
"""Seconds within which orphans must end without a signal."""
LOOK_S = 0.2
"""Seconds between two samples of the processes."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """One run of the sweep."""

    wall_s: float
    """Wall seconds of the command."""
    processor_s: float
    """Processor seconds of the command and of all processes that it or its cluster started."""
    files: dict[str, bytes]
    left: int
    """Number of processes that had to be killed."""
    note: str = ""


class Meter:
    """Sum of the processor time of all descendants of this process, sampled periodically.

    The system's count for ended children is not enough: Ray's node managers do not wait for theirs.
    """

    def __init__(self) -> None:
        self.ticks: dict[tuple[str, str], int] = {}
        """Ticks of each process, by its number and its start."""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Meter":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    @property
    def seconds(self) -> float:
        return sum(self.ticks.values()) / os.sysconf("SC_CLK_TCK")

    def _look(self) -> None:
        while not self.over.wait(LOOK_S):
            seen = {number: fields for number, fields in processes()}
            for number, fields in seen.items():
                above = number
                while above in seen and above != str(os.getpid()):
                    above = seen[above][1]
                if above == str(os.getpid()) != number:
                    self.ticks[number, fields[19]] = int(fields[11]) + int(fields[12])


def processes() -> Iterator[tuple[str, list[str]]]:
    """Yield the number of each process, and the fields of its `/proc/N/stat` from the state on."""
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with contextlib.suppress(OSError):
                yield each.name, (each / "stat").read_text().rpartition(")")[2].split()


def adopt() -> int:
    """Wait for all orphans; return the number of those that had to be killed."""
    until, killed = time.monotonic() + LEFT_S, 0
    while True:
        try:
            child, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return killed
        if child:
            continue
        if time.monotonic() > until:
            for number, fields in processes():
                if fields[1] == str(os.getpid()):
                    os.kill(int(number), signal.SIGKILL)
                    killed += 1
            until += LEFT_S
        time.sleep(0.05)


def sweep(out: Path, *flags: str, rows: Callable[[int], None] = lambda done: None) -> float:
    """Run a sweep and return its wall seconds; `rows` is called with the number of finished rows after each row."""
    began = time.monotonic()
    command = [sys.executable, "-m", "autoshard", "sweep", *SWEEP.split(), "--no-cache", "--out", str(out), *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if f"/{ROWS} " in line:
                rows(int(line.partition("/")[0]))
    if process.returncode:
        raise SystemExit(f"the sweep ended with {process.returncode}: {''.join(said)}")
    return time.monotonic() - began


def run(way: str, folder: Path) -> Ran:
    out, note = folder / "out", ""
    with Meter() as meter:
        if way == LOCAL:
            wall = sweep(out, "--jobs", "2")
        elif way == OWN:
            wall = sweep(out, "--jobs", "2", "--on", "ray")
        else:
            with local_cluster() as cluster:
                rows = _Killer(cluster) if way == KILLED else lambda done: None
                wall = sweep(out, "--on", cluster.address, rows=rows)
                note = getattr(rows, "note", "")
        left = adopt()
    return Ran(wall, meter.seconds, {p.name: p.read_bytes() for p in sorted(out.iterdir())}, left, note)


def at_work() -> int:
    """Count the running tasks of Ray, whose workers are named after their task."""
    tasks = 0
    for number, _ in processes():
        with contextlib.suppress(OSError):
            tasks += Path(f"/proc/{number}/cmdline").read_bytes().startswith(b"ray::run_call")
    return tasks


class _Killer:
    """Callback that kills a node when two rows are done: the next two rows are running then, one on each node."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster, self.note = cluster, ""

    def __call__(self, done: int) -> None:
        if done == 2:
            until = time.monotonic() + 5
            while (rows := at_work()) < 2 and time.monotonic() < until:
                time.sleep(0.05)
            self.cluster.tell("kill")
            self.note = f"after row {done} of {ROWS}, with {rows} rows at work on the two nodes"


@contextlib.contextmanager
def helper() -> Iterator[Callable[[int], object]]:
    """Open a helper of the planner's crew; its calls run one after the other."""
    one = Worker()
    try:
        yield lambda count: [one.call(Job(number, os.getpid, ())) for number in range(count)]
    finally:
        one.end()


@contextlib.contextmanager
def executor(pool: concurrent.futures.Executor) -> Iterator[Callable[[int], object]]:
    with pool:
        yield lambda count: [pool.submit(os.getpid).result() for _ in range(count)]


WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[Callable[[int], object]]]] = {
    "a helper of the planner": helper,
    "`HelperPool`": lambda: executor(HelperPool(1)),
    "`ProcessPoolExecutor`": lambda: executor(
        concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    ),
    "Ray": lambda: executor(RayPool(most=1)),
}


def small_calls(rounds: int, calls: int) -> dict[str, tuple[float, float]]:
    """Return seconds until the first outcome, and seconds of each later call, by way; medians of rounds in turn."""
    first: dict[str, list[float]] = {way: [] for way in WAYS}
    each: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, open_way in WAYS.items():
            began = time.monotonic()
            with open_way() as call:
                call(1)
                first[way].append(time.monotonic() - began)
                began = time.monotonic()
                call(calls)
                each[way].append((time.monotonic() - began) / calls)
    return {way: (statistics.median(first[way]), statistics.median(each[way])) for way in WAYS}


def table(runs: dict[str, list[Ran]], calls: dict[str, tuple[float, float]], options: argparse.Namespace) -> str:
    base = runs[LOCAL][0].files
    lines = [
        "# A sweep by local processes and by Ray",
        "",
        f"`python experiments/speed/ray_sweep.py`: `autoshard sweep {SWEEP}`, {ROWS} rows, on a machine of "
        f"{os.cpu_count()} cores; Ray {importlib.metadata.version('ray')}, {datetime.date.today()}. Medians (least to "
        f"most) of {options.rounds} runs in turn. Wall time is that of the command, processor time that of all it "
        "started, and of its cluster, from start to end. Wall times depend on what else the machine does.",
        "",
        "| by | wall s | processor s | over local: wall, processor | rows lost | files that differ | processes left |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    walls = {way: statistics.median(ran.wall_s for ran in each) for way, each in runs.items()}
    works = {way: statistics.median(ran.processor_s for ran in each) for way, each in runs.items()}
    for way, each in runs.items():
        wall, work = ([getattr(ran, name) for ran in each] for name in ("wall_s", "processor_s"))
        lines.append(
            f"| {way} | {walls[way]:.1f} ({min(wall):.1f} to {max(wall):.1f}) | "
            f"{works[way]:.1f} ({min(work):.1f} to {max(work):.1f}) | "
            f"{walls[way] - walls[LOCAL]:+.1f} s, {works[way] - works[LOCAL]:+.1f} s | "
            f"{sum(lost(ran) for ran in each)} | {sum(differing(ran, base) for ran in each)} | "
            f"{sum(ran.left for ran in each)} |"
        )
    notes = sorted({ran.note for ran in runs[KILLED]})
    lines += [
        "",
        f"The node was killed {'; or '.join(notes)}. What is left is a node of one CPU.",
        "",
        "## One small call",
        "",
        f"`os.getpid()`, {options.calls} calls one after the other in one process; medians of "
        f"{options.rounds} rounds in turn.",
        "",
        "| by | until the first outcome s | one call ms | over a helper |",
        "| --- | --- | --- | --- |",
    ]
    least = calls["a helper of the planner"][1]
    for way, (first, each) in calls.items():
        lines.append(f"| {way} | {first:.2f} | {each * 1e3:.3f} | {each / least:.1f} x |")
    return "\n".join(lines) + "\n"


def lost(ran: Ran) -> int:
    return ROWS - sum(name.endswith(".plan.json") for name in ran.files)


def differing(ran: Ran, base: dict[str, bytes]) -> int:
    return sum(ran.files.get(name) != base.get(name) for name in ran.files.keys() | base.keys())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each (default: 3)")
    parser.add_argument("--calls", type=int, default=200, metavar="N", help="small calls of a round (default: 200)")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        sweep(Path(folder) / "out", "--jobs", "2")  # compiles and caches inner loops before the timed runs
    runs: dict[str, list[Ran]] = {way: [] for way in (LOCAL, OWN, CLUSTER, KILLED)}
    for number in range(options.rounds):
        for way, each in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                each.append(run(way, Path(folder)))
            ran = each[-1]
            print(f"round {number + 1}, {way}: {ran.wall_s:.1f} s, {ran.processor_s:.1f} s of processor", flush=True)
    calls = small_calls(options.rounds, options.calls)
    TABLE.write_text(table(runs, calls, options))
    print(TABLE.read_text())
    base = runs[LOCAL][0].files
    whole = all(not (lost(ran) or differing(ran, base) or ran.left) for each in runs.values() for ran in each)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
