"""Calls in processes of their own: outcomes are returned, and no process outlives the first one."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from autoshard.base.worker_pool import HelperPool
from tests.base.test_crew import is_gone


@pytest.mark.heavy
def test_outcomes_come_back_from_several_processes() -> None:
    with HelperPool(2) as pool:
        waiting = [pool.submit(nap, 0.2) for _ in range(6)]
        processes = {each.result(30) for each in concurrent.futures.as_completed(waiting)}
        assert len(processes) == 2 and os.getpid() not in processes
        with pytest.raises(RuntimeError, match="ValueError: no luck"):
            pool.submit(fail).result(30)
        assert pool.submit(nap, 0.0).result(30) in processes
    assert all(is_gone(process) for process in processes)
    with pytest.raises(RuntimeError, match="have been ended"):
        pool.submit(nap, 0.0)


@pytest.mark.heavy
def test_a_process_that_dies_breaks_its_call_alone() -> None:
    with HelperPool(1) as pool:
        with pytest.raises(concurrent.futures.BrokenExecutor, match="ended by signal 9"):
            pool.submit(die).result(30)
        assert pool.submit(nap, 0.0).result(30)


@pytest.mark.heavy
def test_the_end_waits_for_nothing() -> None:
    pool = HelperPool(1)
    running, waiting = pool.submit(nap, 60.0), pool.submit(nap, 60.0)
    while not running.running():
        time.sleep(0.01)
    began = time.monotonic()
    pool.shutdown()
    assert time.monotonic() - began < 2
    assert isinstance(running.exception(1), concurrent.futures.BrokenExecutor) and waiting.cancelled()


LEAVES = """
    import hashlib, os, signal, sys
    sys.path.insert(0, {root!r})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background ignores it
    from autoshard import cli
    from autoshard.base.worker_pool import HelperPool
    from autoshard.cli import session
    from tests.base.test_pool import leave_folder

    def run(*_):
        with HelperPool(2) as pool:
            leave_folder()
            for each in [pool.submit(leave_folder) for _ in range(4)]:
                each.result()
            print("here", file=sys.stderr, flush=True)
            if {waits}:
                # A library that does not return, so that nothing is cleared up at the end.
                hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
        return 0

    if {command}:
        cli.parse = lambda argv: __import__("argparse").Namespace(run=run, writes={{}}, places=())
        sys.argv = ["autoshard", "diff"]
        raise SystemExit(cli.main())
    else:
        with HelperPool(2) as pool:
            [each.result() for each in [pool.submit(leave_folder) for _ in range(4)]]
"""


@pytest.mark.few(2)
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("command", "sent"),
    [(True, None), (True, signal.SIGTERM), (True, signal.SIGINT), (False, None)],
    ids=["a command", "terminated", "interrupted", "a script"],
)
def test_folders_that_libraries_leave_go_with_the_process(tmp_path: Path, command: bool, sent: signal.Signals | None):
    """Delete the folders in any case: torch creates one at import, and removes it only in an ordinary exit."""
    root = str(Path(__file__).parents[2])
    (temporary := tmp_path / "tmp").mkdir()
    (script := tmp_path / "script.py").write_text(
        textwrap.dedent(LEAVES.format(root=root, command=command, waits=sent is not None))
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, env=environment) as process:
        if sent is not None:
            assert process.stderr is not None
            process.stderr.readline()
            process.send_signal(sent)
        code = process.wait(30)
    assert code == (0 if sent is None else 128 + sent)
    assert not list(temporary.iterdir())


def leave_folder() -> str:
    return tempfile.mkdtemp()


def nap(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def fail() -> None:
    raise ValueError("no luck")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


SCRIPT = """
    import signal, sys, time
    sys.path.insert(0, {root!r})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background ignores it
    from autoshard.base.worker_pool import HelperPool
    from autoshard.cli.session import obey_signals
    from tests.base.test_pool import nap

    obey_signals()
    with HelperPool(2) as pool:
        print(*{{each.result() for each in [pool.submit(nap, 0.5), pool.submit(nap, 0.5)]}}, flush=True)
        waiting = [pool.submit(nap, 60.0) for _ in range(4)]
        if {native}:
            from ctypes import CDLL
            CDLL(None).sleep(60)  # a library that does not return, nor let Python handle a signal
        waiting[0].result()
"""


@pytest.mark.few(2)
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("sent", "native"),
    [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGKILL, False)],
    ids=["interrupted", "terminated", "terminated in a library", "killed"],
)
def test_signals_end_everything_within_two_seconds(tmp_path: Path, sent: signal.Signals, native: bool) -> None:
    root = Path(__file__).parents[2]
    (script := tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT.format(root=str(root), native=native)))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        helpers = [int(word) for word in process.stdout.readline().split()]
        assert len(helpers) == 2
        time.sleep(0.3)
        began = time.monotonic()
        process.send_signal(sent)
        process.wait(10)
        assert all(is_gone(helper) for helper in helpers)
        assert time.monotonic() - began < 2
