"""One worker and its messages: imports, answers that cannot be read, stops, kills, and processor seconds."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autoshard.base.processes import processor_seconds
from autoshard.base.worker import Job, Worker, WorkerEnded
from tests.base.test_crew import PATIENCE_S, is_gone, nap


@pytest.mark.heavy
def test_jobs_arrive_while_their_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import one module for `prepare` and for the first job: two threads would meet it half imported."""
    (tmp_path / "slow_to_import.py").write_text(
        "import time\ntime.sleep(1)\ndef answer(size):\n    return bytes(size)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    import slow_to_import  # type: ignore[import-not-found]

    worker = Worker("slow_to_import")
    try:
        assert worker.call(Job("size", slow_to_import.answer, (1 << 20,)))[0] == bytes(1 << 20)
    finally:
        worker.end()


class Unreadable:
    """A value that the process with the id `where` cannot unpickle."""

    def __init__(self, where: int) -> None:
        self.where = where

    def __reduce__(self):
        return (refuse, (self.where,))


def refuse(where: int) -> Unreadable:
    assert os.getpid() != where, "not readable here"
    return Unreadable(where)


@pytest.mark.heavy
def test_an_answer_that_cannot_be_read_costs_that_answer_alone() -> None:
    worker = Worker()
    try:
        with pytest.raises(AssertionError, match="not readable here"):
            worker.call(Job("bad", refuse, (os.getpid(),)))
        assert worker.call(Job("good", nap, (0.0,)))[0] not in (0, os.getpid())
    finally:
        worker.end()


def until_stopped(stop: threading.Event) -> bool:
    return stop.wait(PATIENCE_S)


@pytest.mark.heavy
def test_a_job_is_stopped_before_it_arrives_and_later_ones_are_not() -> None:
    worker = Worker()
    try:
        job = Job("first", until_stopped, (), stoppable=True)
        worker.stop(job)
        assert worker.call(job)[0] is True
        worker.stop(job)  # too late
        began = time.monotonic()
        later = Job("second", until_stopped, (), stoppable=True)
        threading.Timer(0.3, worker.stop, (later,)).start()
        assert worker.call(later)[0] is True and time.monotonic() - began >= 0.3
    finally:
        worker.end()


def start_child(seconds: float) -> tuple[int, int]:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"], stdin=subprocess.DEVNULL)
    return os.getpid(), child.pid


@pytest.mark.heavy
def test_the_processes_of_a_session_end_together(tmp_path: Path) -> None:
    with open(log := tmp_path / "log", "wb") as stderr:
        worker = Worker(environment={**os.environ, "TESTED": "yes"}, stderr=stderr, session=True)
        (here, child), _ = worker.call(Job("start", start_child, (PATIENCE_S,)))
        assert os.getpgid(here) == os.getpgid(child) == here != os.getpgid(0)
        assert worker.call(Job("print", print, ("to the log",)))[0] is None
        assert worker.call(Job("named", os.getenv, ("TESTED",)))[0] == "yes"
        worker.end()
    assert is_gone(here) and is_gone(child) and log.read_text() == "to the log\n"


@pytest.mark.heavy
@pytest.mark.parametrize(("call", "argument", "how"), [(os._exit, 3, "ended with code 3"), (os.abort, None, "")])
def test_the_end_of_a_worker_is_explained(call, argument: int | None, how: str) -> None:
    worker = Worker()
    with pytest.raises(WorkerEnded) as caught:
        worker.call(Job("end", call, () if argument is None else (argument,)))
    assert caught.value.how == (how or "was ended by signal 6") and str(caught.value) == f"it {caught.value.how}"
    assert not worker.alive
    worker.end()


def burn(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        sum(range(1000))


@pytest.mark.heavy
def test_seconds_of_a_counted_worker_count_before_and_after_its_end() -> None:
    began = processor_seconds()
    worker = Worker(counted=True)
    worker.call(Job("burn", burn, (0.3,)))
    worked = processor_seconds() - began
    worker.end()
    assert worked >= 0.3 and processor_seconds() - began < 1.5 * worked
