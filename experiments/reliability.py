"""Random programs under random plans, and commands that are ended at random moments: what happened, counted.

    python experiments/reliability.py [--programs 167] [--kills 200]

Each program runs on three meshes of 8 CPU devices, planned with specs asked for so that it is split, and is compared
with the unplanned run (`tests/random_programs.py`, `tests/random_runs.py`). A command is ended by SIGKILL, SIGTERM or
SIGINT at a random moment: its file is whole or not there, its processes are gone two seconds later, nothing is left in
the temporary folder, and the next run writes the very same plan. Writes `results/reliability.md`; exit code 1 if
anything was wrong.
"""

import argparse
import collections
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).parent / "results" / "reliability.md"
AT_ONCE = 20
"""Programs of one process: compiled programs stay in its memory."""
GONE_S = 2.0
LINES = (
    ("plan", "hf:gpt2-tiny", "--train", "--topology", "v5e:2x4", "--mesh", "data=4,model=2"),
    ("plan", "hf:llama-tiny", "--topology", "v5e:4x4"),
    ("sweep", "hf:gpt2-tiny", "--topology", "v5e:2x2,v5e:2x4", "--batch", "16,32", "--seq", "64", "--jobs", "2"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=167, metavar="N", help="each on three meshes (default: 167)")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="commands to end (default: 200)")
    parser.add_argument("--worker", nargs=2, type=int, metavar=("FIRST", "END"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return 0
    ended = run_kills(options.kills)
    outcomes: collections.Counter[str] = collections.Counter()
    for first in range(0, options.programs, AT_ONCE):
        outcomes += run_programs(first, min(options.programs, first + AT_ONCE))
        TABLE.write_text(table(outcomes, ended))
    print(TABLE.read_text())
    wrong = sum(count for outcome, count in outcomes.items() if outcome.partition(":")[0] in ("differs", "raised"))
    return 1 if wrong or any(what != "as it should be" for _, what in ended) else 0


def work(first: int, end: int) -> None:
    """Runs some programs here, and prints each outcome as a line of JSON."""
    sys.path.insert(0, str(ROOT))
    from tests.random_programs import random_program
    from tests.random_runs import MESHES, expected, run

    for seed in range(first, end):
        program = random_program(seed)
        wanted = expected(program)
        for mesh in MESHES:
            try:
                outcome = run(program, mesh, wanted)
            except Exception as error:  # whatever was not refused
                outcome = f"raised: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            print(json.dumps([seed, mesh, outcome]), flush=True)


def run_programs(first: int, end: int) -> collections.Counter[str]:
    """Outcome -> runs, of some programs in a process of their own; what differs or raises stands with seed and mesh."""
    found: collections.Counter[str] = collections.Counter()
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "AUTOSHARD_CACHE_DIR": ""}
    environment |= {"AUTOSHARD_DATA_DIR": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--worker", str(first), str(end)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    for seed, mesh, outcome in map(json.loads, done.stdout.splitlines()):
        if outcome.startswith(("differs", "raised")):
            outcome += f" (seed {seed}, {mesh})"
            print(outcome, flush=True)
        elif outcome.startswith("refused"):
            outcome = "refused: " + ("no axis divides a batch" if "no mesh axis" in outcome else outcome[9:])
        found[outcome] += 1
    if done.returncode:
        found[f"raised: the process of seeds {first} to {end - 1} ended with {done.returncode}"] += 1
    return found


def run_kills(count: int) -> list[tuple[str, str]]:
    """Signal and what was seen of each command that was ended."""
    draw = random.Random(0)
    seen: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        expected = {line: finished(line, Path(folder) / "whole.json")[1] for line in LINES if count}
        seconds = {line: finished(line, Path(folder) / "whole.json")[0] for line in LINES if count}
        for number in range(count):
            line = draw.choice(LINES)
            sent = draw.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
            what = end_one(line, Path(folder), number, sent, draw.uniform(0.0, seconds[line]), expected[line])
            seen.append((sent.name, what))
            if what != "as it should be":
                print(*line, sent.name, what, flush=True)
    return seen


def command_of(line: tuple[str, ...], out: Path) -> list[str]:
    code = "from autoshard.cli import main; raise SystemExit(main())"
    return [sys.executable, "-c", code, *line, "--quiet", "--no-cache", "--out", str(out)]


def finished(line: tuple[str, ...], out: Path) -> tuple[float, bytes]:
    """Seconds that a command takes, and the file that it writes."""
    out.unlink(missing_ok=True)
    began = time.monotonic()
    subprocess.run(command_of(line, out), check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    return time.monotonic() - began, out.read_bytes()


def end_one(line: tuple[str, ...], folder: Path, number: int, sent: signal.Signals, after: float, whole: bytes) -> str:
    (scratch := folder / f"tmp{number}").mkdir()
    out = folder / f"out{number}.json"
    process = subprocess.Popen(
        command_of(line, out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        start_new_session=True,
    )
    time.sleep(after)
    process.send_signal(sent)
    until = time.monotonic() + GONE_S
    while time.monotonic() < until and (process.poll() is None or living(process.pid)):
        time.sleep(0.05)
    left = living(process.pid)
    if process.poll() is None or left:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"{left} processes left after {GONE_S:g} s"
    if line[0] == "plan" and out.exists() and out.read_bytes() != whole:
        return "half a file"
    if line[0] == "sweep" and out.exists():
        json.loads(out.read_text())
    if list(scratch.iterdir()) or list(folder.glob(".*")):
        return "something left in a folder"
    return "as it should be" if finished(line, out)[1] == whole else "another plan afterwards"


def living(session: int) -> int:
    """Processes of a session that have not ended."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            count += fields[0] != "Z" and int(fields[3]) == session
    return count


MENDED = (
    (
        "a folder `autoshard/` or a file `json.py` in the working directory was executed by helpers, or broke them",
        "children have no working directory on their path",
    ),
    (
        "a topology or an axis with a newline became code in every export",
        "names are text, a literal or one line of a comment",
    ),
    ("`explain` and `export` ran a plan's program without saying so", "it is said before"),
    (
        "`-o` to a link, a pipe or a device was replaced by a file; modes were widened",
        "links, devices, modes and owners stay",
    ),
    (
        "a closed or full stdout, a closed stderr, a deleted working directory: tracebacks",
        "one sentence, exit code 2",
    ),
    (
        "deep JSON, numbers of 5,000 digits, NaN and negative figures, `schema: true`: tracebacks, or valid plans",
        "damaged, in one sentence",
    ),
    ("a gzip file that unpacks to gigabytes was unpacked", "read up to a bound"),
    (
        "`v5e:4x4*99999999`, `--seq 99999999999`, tensors past 64 bits: hours, gigabytes, or wrong sums",
        "refused at once",
    ),
    (
        "a sweep went on after SIGINT, and its workers after SIGTERM and SIGKILL",
        "all gone within two seconds",
    ),
    (
        "plans for `cpu:N` changed with the cores in use",
        "the machine's cores, or those that `cpu:8@4` says",
    ),
)
"""What was found on the way, and how it is now."""


def table(outcomes: collections.Counter[str], ended: list[tuple[str, str]]) -> str:
    runs = sum(outcomes.values())
    kinds = collections.Counter(outcome.partition(":")[0] for outcome in outcomes.elements())
    lines = [
        "# Reliability",
        "",
        f"`python experiments/reliability.py`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}. Bad inputs are counted by `tests/test_bad_input.py`.",
        "",
        f"| {runs} runs of random programs on 8 CPU devices | runs |",
        "| --- | --- |",
        f"| equal, the plan splits something | {kinds['split']} |",
        f"| equal, nothing split | {kinds['whole']} |",
        f"| refused with a reason | {kinds['refused']} |",
        f"| differ | {kinds['differs']} |",
        f"| raised | {kinds['raised']} |",
        "",
    ]
    named = [(what, n) for what, n in sorted(outcomes.items()) if ":" in what]
    if named:
        lines += ["| refused, different or raised | runs |", "| --- | --- |"]
        lines += [f"| {what.replace('|', '/')} | {n} |" for what, n in named]
        lines += [""]
    if ended:
        lines += [f"| {len(ended)} commands ended at random moments | ended | as it should be |", "| --- | --- | --- |"]
        for name in sorted({name for name, _ in ended}):
            own = [what for each, what in ended if each == name]
            lines.append(f"| {name} | {len(own)} | {own.count('as it should be')} |")
    lines += ["", "| found on the way | now |", "| --- | --- |"]
    lines += [f"| {found} | {now} |" for found, now in MENDED]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
