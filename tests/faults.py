"""Kills of every command at random moments, and checks of its leftovers.

A command is killed by the clock, or from within just before it opens, renames or removes its n-th file. Half a file
could result there. A seed determines the moment and the signal.
"""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[1]
GONE_S = 2.0
MARK = "ending"
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "sqlite3.connect"}
"""Python's audit events that change a disk; opening counts only if it is for writing."""

STEP = """
import jax
import jax.numpy as jnp


def step(x, w1, w2):
    return jnp.tanh(x @ w1) @ w2


program = (step, tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in ((32, 64), (64, 128), (128, 64))))
"""
ROW = "gemm-tpu7x-16384"
"""The published run that is checked, by its id."""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A command, and its outputs that are the same in every run."""

    line: str
    same: tuple[str, ...] = ()
    """Files that it writes with the same bytes each time."""
    whole: tuple[str, ...] = ()
    """JSON files that it writes and that contain times."""
    said: bool = False
    """True if the answer on stdout is always the same."""
    differs: tuple[str, ...] = ()
    """Figures of its JSON on stdout that are times."""

    @property
    def name(self) -> str:
        return self.line.split()[0]


PLANNING = (
    Command("plan step.py --topology cpu:8@2 --mesh data=4,model=2 --out new.json", same=("new.json",)),
    Command(
        "plan step.py --topology v5e:2x2 --out new.json --save-problem newproblem.json",
        same=("new.json", "newproblem.json"),
    ),
)
"""Commands that run first, since they write the files that the others read."""

COMMANDS = (
    *PLANNING,
    Command("plan hf:llama-tiny --topology v5e:2x2 --mesh data=4 --out new.json", same=("new.json",)),
    Command("compare step.py --topology v5e:2x2 --json", said=True),
    Command("measure step.py --plan plan.json --check --json --profile new.json.gz --steps 2"),
    Command("compile step.py --plan tpuplan.json --json --hlo new.txt", same=("new.txt",), differs=("compile_s",)),
    Command(
        "refine step.py --topology cpu:8@2 --mesh data=4,model=2 --plans 2 --rounds 1 --steps 2 --out new.json",
        whole=("new.json",),
    ),
    Command("sweep step.py --topology v5e:2x2,cpu:8@2 --jobs 2 --out new.json --json", same=("new.json",), said=True),
    Command("degrees hf:llama3-8b --topology h100:8 --batch 8 --seq 4096 --out new.toml", same=("new.toml",)),
    Command("diff plan.json tpuplan.json --json", said=True),
    Command("explain plan.json w1", said=True),
    Command("report plan.json -o new.html --perfetto new.json", same=("new.html", "new.json")),
    Command("export plan.json --to jax -o new.py", same=("new.py",)),
    Command("graph step.py --plan plan.json -o new.json", same=("new.json",)),
    Command("solve problem.json --out new.json --iterations 100", same=("new.json",)),
    Command("validate --data rows.json --json", said=True),
    Command("doctor", said=True),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """Moment of a kill: after `seconds`, or just before the command changes its file number `event`."""

    sent: signal.Signals
    seconds: float = 0.0
    event: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """A run that was not killed."""

    seconds: float
    events: int
    """Files that its first process opened for writing, renamed or removed."""
    made: dict[str, Any]
    """Its reproducible outputs by file; stdout has the empty name."""


def prepare(folder: Path) -> None:
    """Write the input files of the commands into an empty folder."""
    (folder / "step.py").write_text(STEP)
    rows = json.loads((ROOT / "autoshard/validation/published.json").read_text())["rows"]
    (folder / "rows.json").write_text(json.dumps([row for row in rows if row["id"] == ROW]))
    for command, name in zip(PLANNING, ("plan.json", "tpuplan.json"), strict=True):
        whole(command, folder)
        (folder / "new.json").rename(folder / name)
    (folder / "newproblem.json").rename(folder / "problem.json")


def whole(command: Command, folder: Path, home: Path | None = None) -> Whole:
    """Run a command in a folder until it ends. Raise `RuntimeError` if it fails."""
    home = folder / "home" if home is None else home
    began = time.monotonic()
    process = start(command, folder, home, counting=True)
    said, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command.line} ended with {process.returncode}: {errors.decode()[-500:]}")
    events = int((home / "events").read_text())
    return Whole(time.monotonic() - began, events, made(command, folder, said))


def made(command: Command, folder: Path, said: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {name: _content(folder, name) for name in command.same}
    for name in command.whole:
        json.loads((folder / name).read_text())
    if command.name == "measure" and not json.loads(said)["passed"]:
        raise RuntimeError("the planned step differs")
    if command.said:
        found[""] = said
    if command.differs:
        found[""] = {key: value for key, value in json.loads(said).items() if key not in command.differs}
    return found


def _content(folder: Path, name: str) -> bytes:
    """Read a command's file without the folder's name: a compiled program contains the paths of its source lines."""
    return (folder / name).read_bytes().replace(str(folder).encode(), b"FOLDER")


def start(
    command: Command, folder: Path, home: Path, ending: Ending | None = None, counting: bool = False
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, whose home and temporary folder are in `home`."""
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("AUTOSHARD_", "XDG_"))}
    environment |= {"HOME": str(home), "TMPDIR": str(home / "tmp"), "JAX_PLATFORMS": "cpu"}
    environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(ROOT)}
    hook = "None, 0" if ending is None or ending.event is None else f"{ending.event}, {int(ending.sent)}"
    counted = str(home / "events") if counting else ""
    code = f"from tests.faults import watch; watch({hook}, {counted!r}, {str(folder)!r}, {str(home)!r})\n"
    code += "from autoshard.cli import main; raise SystemExit(main())"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background jobs ignore this signal, and a child would too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [sys.executable, "-c", code, *command.line.split(), "--quiet"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )


def watch(event: int | None, sent: int, counted: str, *folders: str) -> None:
    """Count, in a command's own process, the file changes below `folders`, and kill the process before number `event`.

    The count is written to the file `counted` at the end. A file in the last folder marks a kill.
    """
    import atexit

    number = 0

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal number
        if name not in EVENTS or not arguments or not isinstance(arguments[0], (str, os.PathLike, bytes)):
            return
        if name == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if not os.path.abspath(os.fsdecode(arguments[0])).startswith(folders):
            return
        number += 1
        if number - 1 == event:
            os.close(os.open(os.path.join(folders[-1], MARK), os.O_WRONLY | os.O_CREAT))
            os.kill(os.getpid(), sent)

    sys.addaudithook(audit)
    if counted:
        atexit.register(lambda: Path(counted).write_text(str(number)))


def draw_ending(draw: random.Random, known: Whole) -> Ending:
    """Draw a kill by the clock or at a file, with equal chances."""
    sent = draw.choice(SIGNALS)
    if known.events and draw.random() < 0.5:
        return Ending(sent, event=draw.randrange(known.events))
    return Ending(sent, draw.uniform(0.0, known.seconds))


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """Result of one killed command."""

    wrong: str
    """The fault, or empty for none."""
    early: bool
    """True if the command had ended before the kill."""
    beside: int
    """Temporary files of a killed command, which it could not remove any more."""


def end_one(command: Command, prepared: Path, place: Path, ending: Ending, known: Whole) -> Seen:
    """Start a command, kill it, check its leftovers, and run it again in the same place, which is then removed."""
    folder, home = place / "work", place / "home"
    folder.mkdir(parents=True)
    for path in prepared.iterdir():
        if path.is_file():
            shutil.copy(path, folder / path.name)
    shared = set(Path("/dev/shm").glob("*")) if Path("/dev/shm").is_dir() else set()
    process = start(command, folder, home, ending)
    if ending.event is None:
        time.sleep(ending.seconds)
        early = process.poll() is not None
        process.send_signal(ending.sent)
    else:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None and not (home / MARK).exists():
            time.sleep(0.01)
        early = not (home / MARK).exists()
    until = time.monotonic() + GONE_S
    while time.monotonic() < until and (process.poll() is None or living(process.pid)):
        time.sleep(0.02)
    wrong = []
    if process.poll() is None or living(process.pid):
        wrong.append(f"after {GONE_S:g} s {living(process.pid)} processes are left")
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    wrong += left_over(command, folder, home, ending, known, shared)
    beside = sum(1 for inner in (folder, home) for _ in inner.rglob(".autoshard-*"))
    try:
        if whole(command, folder, home).made != known.made:
            wrong.append("the next run makes something else")
    except (RuntimeError, ValueError, OSError) as error:
        wrong.append(f"the next run fails: {' '.join(str(error).split())}")
    shutil.rmtree(place)
    return Seen("; ".join(wrong), early, beside)


def left_over(command: Command, folder: Path, home: Path, ending: Ending, known: Whole, shared: set[Path]) -> list[str]:
    """Return the faults that a killed command left."""
    wrong = []
    for name in command.same:
        # A sweep stores its rows one by one.
        if (folder / name).exists() and command.name != "sweep" and _content(folder, name) != known.made[name]:
            wrong.append(f"{name} is half written")
    for name in (*command.whole, *(command.same if command.name == "sweep" else ())):
        try:
            json.loads((folder / name).read_text())
        except FileNotFoundError:
            continue
        except ValueError:
            wrong.append(f"{name} is half written")
    if Path("/dev/shm").is_dir() and set(Path("/dev/shm").glob("*")) - shared:
        wrong.append("shared memory is left")
    if ending.sent is signal.SIGKILL:
        return wrong  # a killed process could not clean up; the next run must cope with its files
    wrong += [f"{path.name} is left" for path in (home / "tmp").iterdir()]
    wrong += [f"{path.name} is left" for place in (folder, home) for path in place.rglob(".autoshard-*")]
    return wrong


def living(session: int) -> int:
    """Count the processes of a session that have not ended."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            count += fields[0] != "Z" and int(fields[3]) == session
    return count
