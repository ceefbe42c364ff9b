"""Helper processes that share the work; no result depends on them."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autoshard.base.worker import Job, Stopped
from autoshard.base.workers import HERE, WorkerCrew, helpers_here


PATIENCE_S = 60.0


class Box:
    """A value to share; each process has its own `opened`."""

    def __init__(self, content: int) -> None:
        self.content = content

    def add(self, number: int) -> tuple["Box", int, int]:
        return self, self.content + number, os.getpid()

    def die(self, parent: int) -> int:
        nap(0.02)
        if os.getpid() != parent:
            os._exit(3)
        return self.content

    def fail(self, parent: int) -> int:
        nap(0.02)
        if os.getpid() != parent:
            raise ValueError("not here")
        return self.content


def nap(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def wait_for_helpers(crew: WorkerCrew) -> None:
    """Wait until a helper has finished a job, which shows that it has started."""
    until = time.monotonic() + PATIENCE_S
    while not crew.jobs_helped:
        assert time.monotonic() < until, "no helper ever took a job"
        crew.map(nap, [0.02] * 4, lambda seconds: (seconds,))


@pytest.mark.heavy
def test_helpers_take_part_and_answers_come_in_order() -> None:
    with WorkerCrew(2) as crew:
        wait_for_helpers(crew)
        done = crew.map(nap, [0.1] * 8, lambda seconds: (seconds,))
        assert len(done) == 8 and os.getpid() in done and len(set(done)) > 1
        assert crew.map(max, range(20), lambda number: (number, 7)) == [max(number, 7) for number in range(20)]


@pytest.mark.heavy
def test_nothing_is_left_of_a_crew_that_has_ended() -> None:
    """Join all threads: a thread that is alive when Python exits may abort the process."""
    before = threading.active_count()
    with WorkerCrew(2) as crew:
        wait_for_helpers(crew)
        assert threading.active_count() == before + 2
    assert threading.active_count() == before
    with pytest.raises(KeyboardInterrupt), WorkerCrew(2) as crew:  # in the middle of a job
        wait_for_helpers(crew)
        crew.map(interrupted, [os.getpid()] * 3, lambda parent: (parent,))
    assert threading.active_count() == before


def interrupted(parent: int) -> None:
    if os.getpid() == parent:
        time.sleep(0.1)
        raise KeyboardInterrupt
    time.sleep(PATIENCE_S)


def test_alone_everything_is_done_here() -> None:
    crew = WorkerCrew()
    assert crew.alone and set(crew.map(nap, [0.0] * 3, lambda seconds: (seconds,))) == {os.getpid()}


@pytest.mark.heavy
def test_what_is_shared_stands_for_itself_on_both_sides() -> None:
    with WorkerCrew(1) as crew:
        wait_for_helpers(crew)
        for content in (5, 50):  # the second replaces the first
            box = Box(content)
            crew.share("box", box)
            answers = crew.map(slow_add, range(6), lambda number, box=box: (box, number))
            assert all(same is box for same, _, _ in answers)
            assert [total for _, total, _ in answers] == [content + number for number in range(6)]
            assert {pid for _, _, pid in answers} > {os.getpid()}


def slow_add(box: Box, number: int) -> tuple[Box, int, int]:
    time.sleep(0.05)
    return box.add(number)


@pytest.mark.heavy
def test_a_copy_may_be_sent_of_what_cannot_be() -> None:
    with WorkerCrew(1) as crew:
        wait_for_helpers(crew)
        box, sent = Box(1), Box(2)
        box.add = lambda number: (box, 1 + number, os.getpid())  # type: ignore[method-assign]
        crew.share("box", box, sent)
        answers = crew.map(slow_add, range(6), lambda number: (box, number))
        assert {(total - number, pid == os.getpid()) for number, (_, total, pid) in enumerate(answers)} == {
            (1, True),
            (2, False),
        }


@pytest.mark.heavy
def test_what_cannot_be_pickled_leaves_this_process_alone() -> None:
    said: list[str] = []
    with WorkerCrew(1) as crew:
        crew.progress = said.append
        wait_for_helpers(crew)
        crew.share("secret", threading.Lock())
        before = crew.jobs_helped
        crew.run(Naps(3))
        assert crew.jobs_helped == before
        assert any("helper processes cannot receive the secret" in line for line in said)


class Naps:
    """Naps of given lengths, as work."""

    def __init__(self, count: int) -> None:
        self.count, self.begun, self.done = count, 0, 0

    def take(self, slot: int) -> Job | None:
        if self.begun == self.count:
            return None
        self.begun += 1
        return Job(self.begun, nap, (0.02,))

    def put(self, job: Job, slot: int, value: Any) -> None:
        self.done += 1

    def lose(self, job: Job) -> None:
        self.begun -= 1

    def outdated(self, job: Job) -> bool:
        return False

    @property
    def finished(self) -> bool:
        return self.done == self.count


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("what", "why"), [("die", "it ended with code 3"), ("fail", "ValueError: not here")], ids=["dies", "fails"]
)
def test_what_a_lost_helper_had_is_done_here(what: str, why: str) -> None:
    said: list[str] = []
    with WorkerCrew(1) as crew:
        crew.progress = said.append
        wait_for_helpers(crew)
        box = Box(9)
        found = crew.map(getattr(box, what), [os.getpid()] * 10, lambda parent: (parent,))
        assert found == [9] * 10
    assert said == [f"a helper process failed ({why}); its work is done here"]


class Race:
    """A long job in one slot that is outdated as soon as the other slot has finished its own job."""

    def __init__(self, long_seat: int) -> None:
        self.long_seat, self.begun, self.finished, self.lost = long_seat, set[int](), False, False

    def take(self, slot: int) -> Job | None:
        if slot in self.begun or (self.long_seat not in self.begun and slot != self.long_seat):
            return None
        self.begun.add(slot)
        return Job(slot, until_stopped, (), stoppable=True) if slot == self.long_seat else Job(slot, nap, (0.1,))

    def put(self, job: Job, slot: int, value: Any) -> None:
        assert slot != self.long_seat
        self.begun.add(-1)
        self.finished = self.long_seat != HERE or self.lost

    def lose(self, job: Job) -> None:
        self.lost = self.finished = True

    def outdated(self, job: Job) -> bool:
        return -1 in self.begun


def until_stopped(stop: threading.Event) -> None:
    assert stop.wait(PATIENCE_S)
    raise Stopped


@pytest.mark.heavy
@pytest.mark.parametrize("slot", [0, 1], ids=["here", "at a helper"])
def test_an_outdated_job_is_stopped(slot: int) -> None:
    with WorkerCrew(1) as crew:
        wait_for_helpers(crew)
        began = time.monotonic()
        crew.run(Race(slot))
        wait_for_helpers(crew)
        assert set(crew.map(nap, [0.1] * 6, lambda seconds: (seconds,))) > {os.getpid()}, "it is free again"
        assert time.monotonic() - began < PATIENCE_S


@pytest.mark.heavy
def test_a_patient_crew_starts_its_helpers_when_there_is_much_to_do() -> None:
    with WorkerCrew(1, start_delay_s=0.3) as crew:
        assert not crew.alone
        crew.share("box", Box(1))
        assert set(crew.map(work, [0.02] * 2, lambda seconds: (seconds,))) == {os.getpid()}
        until = time.monotonic() + PATIENCE_S
        while not crew.jobs_helped:
            assert time.monotonic() < until, "no helper was ever started"
            crew.map(work, [0.05] * 4, lambda seconds: (seconds,))


@pytest.mark.heavy
def test_processor_seconds_of_helpers_count() -> None:
    with WorkerCrew(1) as crew:
        wait_for_helpers(crew)
        began, here = crew.processor_seconds(), time.process_time()
        pids = crew.map(work, [0.2] * 4, lambda seconds: (seconds,))
        helped = sum(pid != os.getpid() for pid in pids)
        assert helped and crew.processor_seconds() - began >= 0.2 * helped + (time.process_time() - here) - 0.01


def work(seconds: float) -> int:
    began = time.process_time()
    while time.process_time() - began < seconds:
        sum(range(1000))
    return os.getpid()


@pytest.mark.heavy
def test_one_core_has_no_helpers() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from autoshard.base.workers import helpers_here; print(helpers_here())"
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system does not bind processes to cores")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "0"
    assert 0 <= helpers_here() <= 3


SCRIPT = """
    import os, signal, sys, time
    sys.path.insert(0, {tests!r})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in a shell's background ignores it
    from autoshard.base.workers import WorkerCrew
    from tests.base.test_crew import nap, wait_for_helpers

    print("script", flush=True)
    with WorkerCrew(1) as crew:
        wait_for_helpers(crew)
        (helper,) = set(crew.map(nap, [0.1] * 4, lambda seconds: (seconds,))) - {{os.getpid()}}
        print(helper, flush=True)
        if "wait" in sys.argv:
            crew.map(nap, [60.0] * 2, lambda seconds: (seconds,))
"""


def start_script(path: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a script without a `__main__` guard."""
    root = Path(__file__).parents[2]
    path.write_text(textwrap.dedent(SCRIPT.format(tests=str(root))))
    command = [sys.executable, str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)


def is_gone(pid: int) -> bool:
    """Return True if a process ends within `PATIENCE_S`."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.heavy
def test_a_script_without_a_guard_is_run_once(tmp_path: Path) -> None:
    out, err = start_script(tmp_path / "script.py").communicate(timeout=PATIENCE_S)
    assert out.count("script") == 1, err
    assert is_gone(int(out.split()[-1]))


@pytest.mark.heavy
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_helpers_end_with_the_process_that_started_them(tmp_path: Path, sent: signal.Signals) -> None:
    process = start_script(tmp_path / "script.py", "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "script\n"
    helper = int(process.stdout.readline())
    time.sleep(0.2)
    process.send_signal(sent)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0 and err.count("KeyboardInterrupt") == (sent is signal.SIGINT)
    assert is_gone(helper)
