"""`--on`: a Ray cluster gives the command's results, also if a node or the command itself is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import run
from tests.ray_cluster import LocalCluster, local_cluster


pytestmark = pytest.mark.full  # tests/base/test_ray_pool.py has a smaller case of each

SWEEP = "sweep hf:llama-tiny --train --seq 64 --remat full --batch 8,16 --topology v5e:1x1,v5e:2x2 --mesh auto".split()
ROWS = 4


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of the sweep without a cluster."""
    folder = tmp_path_factory.mktemp("alone")
    done = run(*SWEEP, "--out", str(folder))
    assert done.returncode == 0, done.stderr
    contents = files(folder)
    assert len(contents) == ROWS + 1
    return contents


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with local_cluster() as cluster:
        yield cluster


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


START = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background ignores it
from autoshard.cli import main
raise SystemExit(main())
"""


def start(folder: Path, on: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", START, *SWEEP, "--out", str(folder), "--on", on]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def started(folder: Path) -> set[int]:
    """Return the processes that Ray runs for a session in this folder."""
    processes = set()
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                words = (each / "cmdline").read_bytes() + (each / "environ").read_bytes()
            except OSError:
                continue
            if f"{folder}".encode() in words and int(each.name) != os.getpid():
                processes.add(int(each.name))
    return processes


def test_a_node_that_is_killed_changes_no_file(cluster: LocalCluster, alone: dict[str, bytes], tmp_path: Path) -> None:
    with start(tmp_path / "out", cluster.address) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line.split()[0])
            if line.startswith("1/"):
                assert cluster.tell("kill") == "done"
    assert process.returncode == 0
    assert lines == ["Connecting", *(f"{row + 1}/{ROWS}" for row in range(ROWS))]
    assert files(tmp_path / "out") == alone


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_ray_of_its_own_ends_with_the_command_which_goes_on_where_it_was(
    how: signal.Signals, alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", short := f"/tmp/ray{os.getpid()}{how.value}")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with start(tmp_path / "out", "ray") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("1/"):
                assert started(Path(short))
                process.send_signal(how)
                break
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    until = time.monotonic() + 60
    while (left := started(Path(short))) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
    assert 1 < len(files(tmp_path / "out")) < ROWS + 1
    again = run(*SWEEP, "--out", str(tmp_path / "out"), "--quiet", "--on", "ray")
    assert again.returncode == 0 and again.stderr == ""
    assert files(tmp_path / "out") == alone
    subprocess.run(["rm", "-r", short], check=True)


def test_compilations_are_the_same_from_a_cluster(cluster: LocalCluster, tmp_path: Path) -> None:
    line = ("compare", "hf:llama-tiny", "--train", "--batch", "8", "--seq", "64", "--topology", "v5e:2x2")
    line += ("--mesh", "data=2,model=2", "--compile", "--json")
    found = []
    for on in ([], ["--on", cluster.address]):
        done = run(*line, *on)
        assert done.returncode == 0, done.stderr
        plans = json.loads(done.stdout)["plans"]
        assert len(plans) > 2 and all(each["compiled"]["compile_s"] > 0 for each in plans.values())
        for each in plans.values():
            del each["compiled"]["compile_s"]
        found.append(plans)
    assert found[0] == found[1]
