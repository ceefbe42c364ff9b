"""Commands that are killed, and incomplete environments: a slice of what `make bench` counts."""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard import UserError, cli
from autoshard.base.processes import LEAST_ADDRESSES, check_addresses
from tests import environments
from tests.faults import COMMANDS, PLANNING, STEP, Command, Ending, Whole, end_one, made
from tests.planning.record.test_store import PLAN


if not Path("/proc/self/stat").exists():
    pytest.skip("processes are looked up in /proc", allow_module_level=True)

PROBLEM = {
    "nodes": {"intervals": [[0, 1], [0, 2]], "costs": [[1, 2], [3, 1]], "usages": [[3, 1], [4, 1]]},
    "edges": {"nodes": [[0, 1]], "costs": [[5, 0, 0, 1]]},
    "usage_limit": 5,
}
SOLVE = next(command for command in COMMANDS if command.name == "solve")
DEGREES = next(command for command in COMMANDS if command.name == "degrees")
REPORT = Command("report plan.json -o new.html", same=("new.html",))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "step.py").write_text(STEP)
    (folder / "problem.json").write_text(json.dumps({"problem": PROBLEM}))
    PLAN.save(folder / "plan.json")
    return folder


def wholly(command: Command, prepared: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Whole:
    """Run a command in this process without a kill, and return its outputs."""
    for path in prepared.iterdir():
        shutil.copy(path, folder / path.name)
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert cli.main([*command.line.split(), "--quiet"]) == 0
    return Whole(0.0, 0, made(command, folder, said.getvalue().encode()))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("command", "ending"),
    [
        (PLANNING[0], Ending(signal.SIGKILL, event=3)),
        (REPORT, Ending(signal.SIGKILL, event=1)),
        (REPORT, Ending(signal.SIGTERM, event=0)),
        (DEGREES, Ending(signal.SIGINT, event=1)),
        (SOLVE, Ending(signal.SIGKILL, event=1)),
        (SOLVE, Ending(signal.SIGTERM, seconds=0.2)),
    ],
    ids=lambda value: value.name if isinstance(value, Command) else value.sent.name,
)
def test_the_next_run_makes_the_same(
    command: Command, ending: Ending, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (whole := tmp_path / "whole").mkdir()
    found = end_one(command, prepared, tmp_path / "place", ending, wholly(command, prepared, whole, monkeypatch))
    assert not found.wrong
    assert ending.event is None or not found.early


@pytest.mark.parametrize("place", [pytest.param("a full disk", marks=pytest.mark.full), "2048 MiB of addresses"])
def test_what_is_missing_is_reported(place: str, prepared: Path, tmp_path: Path):
    shutil.copy(prepared / "step.py", tmp_path)
    wrong = environments.seen(place, tmp_path, b"")
    if wrong == "not here":
        pytest.skip("this system does not let us make that place")
    assert not wrong


CRASHES = """
import argparse, atexit, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background ignores it
from autoshard import cli

def run(*_):
    atexit.register(os.abort)
    os.kill(os.getpid(), {sent})
    time.sleep(60)

cli.parse = lambda argv: argparse.Namespace(run=run, writes={{}}, places=())
sys.argv = ["autoshard", "diff"]
raise SystemExit(cli.main())
"""


@pytest.mark.parametrize(
    ("sent", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")], ids=["SIGINT", "SIGTERM"]
)
def test_a_library_that_crashes_at_exit_leaves_the_exit_code_of_a_signal(
    sent: signal.Signals, word: str, tmp_path: Path
):
    """Let an exit handler crash, as threads of XLA that still run a step may do."""
    environment = {**os.environ, "PYTHONPATH": str(environments.ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", CRASHES.format(sent=int(sent))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (128 + sent, f"autoshard: {word}\n")
    assert not list(tmp_path.iterdir())


HARSH = environments.WORKS["a home that is not there"] + environments.WORKS["the locale C"].replace(
    "import os", "\nimport os"
)
HARSH += environments.WORKS["no further process"] + "\nimport resource\n"
HARSH += environments.WORKS["few open files"].partition("; ")[2]


def test_without_a_home_a_locale_and_processes_the_plan_is_the_same(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Combine the environments that `make bench` tests one at a time."""
    command = PLANNING[0]
    assert environments.PLAN.replace(" --quiet", "") == command.line
    wanted = wholly(command, prepared, tmp_path, monkeypatch)
    (tmp_path / "new.json").unlink()
    done = environments.run("", tmp_path, made=HARSH)
    assert done.returncode == 0, done.stderr
    assert made(command, tmp_path, b"") == wanted.made


def test_a_limit_that_xla_would_not_survive_is_reported(monkeypatch: pytest.MonkeyPatch):
    check_addresses()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (LEAST_ADDRESSES - 1, resource.RLIM_INFINITY))
    with pytest.raises(UserError, match=r"limited to 5 GiB of addresses, and XLA, which reads the program, needs 5"):
        check_addresses()
    monkeypatch.setitem(sys.modules, "resource", None)
    check_addresses()
