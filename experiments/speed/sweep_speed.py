"""Wall and processor time and memory of a sweep of Llama-3.1-70B over 24 pairs of a topology and a batch.

    python experiments/speed/sweep_speed.py [--jobs 2]

The script runs the command as a user does, without a cache. Processor time is that of the command and of all its child
processes. Memory is the largest sum of their proportional shares, sampled twice a second.

The script writes `results/sweep_speed.md`; the exit code is 1 if a pair is missing.
"""

import argparse
import contextlib
import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path


ROOT = Path(__file__).parents[2]
TABLE = ROOT / "experiments" / "results" / "sweep_speed.md"
TOPOLOGIES = ("v5p:4x4x4", "v5p:4x4x8", "v5p:4x8x8", "v5p:8x8x8", "v6e:8x8", "v6e:8x16", "v6e:16x16", "v5e:16x16")
BATCHES = (128, 256, 512)
SWEEP = f"hf:llama3.1-70b --train --seq 4096 --remat full --batch {','.join(map(str, BATCHES))} --mesh auto"
MARK_S = 360
"""Target in seconds for such a sweep on two cores."""
LOOK_S = 0.5


class Memory:
    """Peak memory of a process and its descendants, sampled periodically."""

    def __init__(self, process: int) -> None:
        self.process, self.most, self.over = process, 0, threading.Event()
        self.thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Memory":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.over.wait(LOOK_S):
            self.most = max(self.most, sum(map(held, below(self.process))))


def below(process: int) -> list[int]:
    descendants = [process]
    for each in descendants:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                descendants += map(int, (task / "children").read_text().split())
    return descendants


def held(process: int) -> int:
    """Return the resident bytes of a process, with shared pages counted proportionally."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2)
    jobs = parser.parse_args().jobs
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        line = [*SWEEP.split(), "--topology", ",".join(TOPOLOGIES), "--jobs", str(jobs), "--no-cache", "--json"]
        command = [sys.executable, "-m", "autoshard", "sweep", *line]
        told = Path(folder) / "told.json"
        with (
            told.open("w") as out,
            subprocess.Popen(command, stdout=out, cwd=ROOT) as process,
            Memory(process.pid) as memory,
        ):
            process.wait()
        rows = json.loads(told.read_text())["rows"] if process.returncode == 0 else []
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    planned = [row for row in rows if not row["failed"]]
    said = f"{len(rows)} pairs, of which {len(planned)} fit" if len(planned) < len(rows) else f"{len(rows)} pairs"
    text = "# A sweep of Llama-3.1-70B\n\n"
    text += f"`python experiments/speed/sweep_speed.py`: `autoshard sweep {SWEEP} --topology ...`, nothing kept "
    text += f"from before, {jobs} processes on {os.cpu_count()} cores that others use too, {datetime.date.today()}. "
    text += f"The mark is {MARK_S} s on two cores.\n\n"
    text += f"{said}: **{wall:.0f} s** of wall time, **{processor:.0f} s** of processor time "
    text += f"({processor / len(rows) if rows else 0:.1f} s a pair), {memory.most / 2**30:.1f} GiB at most.\n\n"
    text += "| topology | batch | mesh | step s | MFU | GiB | why not |\n| --- | --- | --- | --- | --- | --- | --- |\n"
    for row in rows:
        cells = [row["topology"], str(row["batch"]), row["mesh"] or "-"]
        if row["failed"]:
            cells += ["-", "-", "-", row["failed"]]
        else:
            cells += [f"{row['step_time_s']:.3g}", f"{row['mfu']:.1%}", f"{row['peak_bytes'] / 2**30:.1f}", ""]
        text += f"| {' | '.join(cells)} |\n"
    TABLE.write_text(text)
    print(text)
    return 0 if len(rows) == len(TOPOLOGIES) * len(BATCHES) else 1


if __name__ == "__main__":
    sys.exit(main())
