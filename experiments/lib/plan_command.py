"""The command `autoshard plan` in a process of its own, with its time and memory."""

import contextlib
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


SAMPLE_S, SAMPLE_SHARE = 0.1, 0.02
"""Least seconds between two samples of memory, and as a share of the time since the start: samples cost time."""


def run(program: str, options: list[str], limit_s: float = math.inf) -> dict:
    """Run `autoshard plan PROGRAM OPTIONS --json` in a process of its own.

    The result has wall and processor seconds, and peak bytes of all its processes. The command is killed after
    `limit_s` processor seconds, without its helpers'.
    """
    command = [sys.executable, "-m", "autoshard", "plan", program, *options, "--json", "--quiet"]
    before, start, most = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), (0, 0)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process, late = subprocess.Popen(command, stdout=out, stderr=err), False
        while process.poll() is None:
            if late := late or spent(process.pid) > limit_s:
                process.kill()  # its helpers end too
            most = tuple(map(max, most, resident(process.pid)))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(SAMPLE_S, SAMPLE_SHARE * (time.monotonic() - start)))
        wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        out.seek(0)
        err.seek(0)
        answer, said = out.read(), err.read()
        if late:
            said = f"not planned within {limit_s:.0f} s of processor"
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seen = {"wall": wall, "cpu": used, "rss": most[0], "pss": most[1]}
    lines = said.strip().splitlines()
    return seen | (json.loads(answer) if process.returncode == 0 else {"error": lines[-1] if lines else "failed"})


def spent(pid: int) -> float:
    """Return the processor seconds of one process; 0 once it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def resident(root: int) -> tuple[int, int]:
    """Return the resident bytes of a process and its descendants: with shared pages counted for each, and once."""
    parents, sizes = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # the process has just ended
            fields = dict(re.findall(r"^(PPid|VmRSS):\s+(\d+)", status.read_text(), re.MULTILINE))
            parents[int(status.parent.name)] = int(fields["PPid"])
            sizes[int(status.parent.name)] = 1024 * int(fields.get("VmRSS", 0))
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    shared = 0
    for pid in family:
        with contextlib.suppress(OSError):
            match = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            shared += 1024 * int(match[1]) if match else 0
    return sum(sizes.get(pid, 0) for pid in family), shared
