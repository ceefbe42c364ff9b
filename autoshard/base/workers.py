"""Crew of this process and its helper processes, which share the jobs of one computation.

If a helper dies or fails, the other processes do its job; this process can do all jobs alone. No answer may depend on
the assignment of jobs to processes, which is arbitrary.

A small call of a helper is faster than one of `concurrent.futures`' processes. It costs a twentieth of a Ray task,
which suits whole candidates (`experiments/results/ray_sweep.md`).
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from autoshard.base.processes import cores, processor_seconds
from autoshard.base.worker import Job, Shared, Stopped, Worker, pickled


MOST_HELPERS: int = 3
"""Most helpers of one crew: further ones find too little work, and each uses memory."""
JOIN_S = 5.0
"""Seconds within which a helper's thread must notice that the helper has ended."""
HERE = 0
"""Slot of this process; helpers have the slots from 1 on."""


class Work(Protocol):
    """Source of jobs that belong to one computation.

    The crew calls one method at a time, and calls `take` for `HERE` only from the main thread.
    """

    def take(self, slot: int) -> Job | None:
        """Return the next job for a slot; None if no job is ready."""
        ...

    def put(self, job: Job, slot: int, value: Any) -> None:
        """Accept the result of a job."""
        ...

    def lose(self, job: Job) -> None:
        """Accept back a job that was not finished."""
        ...

    def outdated(self, job: Job) -> bool:
        """Return True if the result of a running job is no longer needed."""
        ...

    @property
    def finished(self) -> bool:
        """True if every job is done, so that no more can follow."""
        ...


class WorkerCrew:
    """This process and `count` helper processes, which end with the `with` block.

    - `prepare`: `module:function` that a helper calls first.
    - `start_delay_s`: processor seconds that this process works before it starts the helpers; 0 starts them at once.
    """

    def __init__(self, count: int = 0, prepare: str | None = None, start_delay_s: float = 0.0) -> None:
        self._changed = threading.Condition()
        self._work: Work | None = None
        self._shared: dict[str, Shared] = {}
        self._helpers: list[Worker] = []
        self._threads: list[threading.Thread] = []
        self._running: dict[int, tuple[Work, Job, Callable[[], None]]] = {}
        """Slot -> its work, its running job, and the function that stops the job."""
        self._to_start, self._prepare = count, prepare
        self._due = processor_seconds() + start_delay_s
        self._ended = False
        self._lines: list[str] = []
        self.progress: Callable[[str], None] = lambda line: None
        """Callback that receives one line for every helper that is lost."""
        self.jobs_helped = 0
        """Number of jobs that helpers have finished."""
        self._helped_s = 0.0
        if start_delay_s <= 0:
            self._start()

    @property
    def alone(self) -> bool:
        """True if the crew has no helpers and will start none."""
        return not self._to_start and not self._helpers

    def processor_seconds(self) -> float:
        """Return the processor seconds of this process and of the helpers' jobs."""
        return processor_seconds() + self._helped_s

    def share(self, name: str, thing: object, sent: object = None) -> None:
        """Share an object with the helpers: jobs and answers refer to it by name, and each helper has a copy.

        The copy (of `sent` if given, else of `thing`) is pickled when there is work for helpers. Objects that are
        shared later may refer to earlier ones. A later object under the same name replaces the earlier one.
        """
        with self._changed:
            self._shared.pop(name, None)
            self._shared[name] = Shared(name, thing, thing if sent is None else sent)

    def drop(self, name: str) -> None:
        """Stop sharing the object of this name, if there is one."""
        with self._changed:
            self._shared.pop(name, None)

    def _write_shared(self) -> None:
        """Serialise the shared objects, once for all helpers; if one cannot be pickled, end the helpers.

        This process runs no job while it serialises.
        """
        earlier: dict[int, str] = {}
        for each in self._shared.values():
            if each.data is None:
                try:
                    each.data = pickled((each.name, each.sent), earlier)
                except Exception as error:
                    self._lines.append(f"helper processes cannot receive the {each.name} ({error})")
                    self._work_alone()
                    return
                each.sent = None
            earlier[id(each.thing)] = each.name

    def run(self, work: Work) -> None:
        """Run jobs here and in the helpers until the work is finished; helpers then get no more of its jobs.

        Errors of jobs that run here are raised. A helper whose job fails is ended, and another process does the job.
        """
        with self._changed:
            if self._helpers:
                self._write_shared()
            self._work = work
            self._changed.notify_all()
        try:
            while (job := self._next_here(work)) is not None:
                self._do(work, job)
                while self._lines:
                    self.progress(self._lines.pop())
                if processor_seconds() > self._due:
                    self._start()
        finally:
            with self._changed:
                self._work = None
                self._running.pop(HERE, None)
                self._stop_outdated()

    def _do(self, work: Work, job: Job) -> None:
        """Run one job in this process and hand its result to the work, or the job back if it raised `Stopped`."""
        stop = threading.Event()
        with self._changed:
            self._running[HERE] = work, job, stop.set
        value, stopped = None, False
        try:
            value = job.call(*job.arguments, **({"stop": stop} if job.stoppable else {}))
        except Stopped:
            stopped = True
        with self._changed:
            del self._running[HERE]
            if stopped:
                work.lose(job)
            else:
                work.put(job, HERE, value)
            self._stop_outdated()
            self._changed.notify_all()

    def _stop_outdated(self) -> None:
        """Stop the running stoppable jobs of other works, and those that the work calls outdated."""
        for work, job, stop in self._running.values():
            if job.stoppable and (work is not self._work or work.outdated(job)):
                stop()

    def map(
        self, call: Callable[..., Any], items: Sequence[Any], arguments: Callable[[Any], tuple[Any, ...]]
    ) -> list[Any]:
        """Return the call's result for each item, in order; `arguments` maps an item to the call's arguments.

        It is called in this process when the item's job is created. Errors are raised as in `run`.
        """
        work = _Listed(call, items, arguments)
        self.run(work)
        return [work.values[number] for number in range(len(items))]

    def end(self) -> None:
        """End the helpers at once, running jobs included."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            self._work_alone()
        # A thread that is still alive when the interpreter finalises may crash the process.
        for thread in self._threads:
            thread.join(JOIN_S)

    def _work_alone(self) -> None:
        """End all helpers and start no more."""
        self._to_start = 0
        for helper in self._helpers:
            helper.end()

    def __enter__(self) -> "WorkerCrew":
        """Return the crew itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the helpers, also after an error."""
        self.end()

    def _start(self) -> None:
        """Start the helpers that are not started yet, and a thread for each; go on with fewer if one cannot start."""
        if not self._to_start:
            return
        with self._changed:
            self._write_shared()
        for _ in range(self._to_start):
            try:
                helper = Worker(self._prepare)
            except OSError as error:
                self._lines.append(f"no helper process could be started ({error}); the work is done here")
                break
            self._helpers.append(helper)
            thread = threading.Thread(target=self._serve, args=(helper, len(self._helpers)), daemon=True)
            self._threads.append(thread)
            thread.start()
        self._to_start = 0

    def _next_here(self, work: Work) -> Job | None:
        """Wait for the next job of this process; return None once the work is finished."""
        with self._changed:
            while True:
                job = work.take(HERE)
                if job is not None or work.finished:
                    self._changed.notify_all()
                    return job
                self._changed.wait()

    def _next(self, slot: int) -> tuple[Work, Job, list[Shared]] | None:
        """Wait for the next job of a helper; return it with the objects shared by then, or None when the crew ends."""
        with self._changed:
            while not self._ended:
                work = self._work
                job = None if work is None else work.take(slot)
                if work is not None and job is not None:
                    self._running[slot] = work, job, functools.partial(self._helpers[slot - 1].stop, job)
                    self._changed.notify_all()
                    return work, job, list(self._shared.values())
                self._changed.wait()
        return None

    def _serve(self, helper: Worker, slot: int) -> None:
        """Give one helper jobs until the crew ends or a job fails; then hand that job back and end the helper."""
        while (assignment := self._next(slot)) is not None:
            work, job, shared = assignment
            try:
                value, seconds = helper.call(job, shared)
            except Exception as error:
                with self._changed:
                    del self._running[slot]
                    work.lose(job)
                    if not self._ended:
                        self._lines.append(f"a helper process failed ({error}); its work is done here")
                    self._changed.notify_all()
                helper.end()
                return
            with self._changed:
                del self._running[slot]
                self._helped_s += seconds
                if isinstance(value, Stopped):
                    work.lose(job)
                elif self._work is work:
                    self.jobs_helped += 1
                    work.put(job, slot, value)
                    self._stop_outdated()
                self._changed.notify_all()


def helpers_here() -> int:
    """Return the number of helpers for which this machine has cores beyond that of this process.

    The number is from 0 to `MOST_HELPERS`.
    """
    return min(MOST_HELPERS, cores() - 1)


class _Listed:
    """Work that consists of one call for each item of a list."""

    def __init__(
        self, call: Callable[..., Any], items: Sequence[Any], arguments: Callable[[Any], tuple[Any, ...]]
    ) -> None:
        self.call, self.items, self.arguments = call, items, arguments
        self.waiting = list(range(len(items)))
        self.values: dict[int, Any] = {}

    def take(self, slot: int) -> Job | None:
        """Return the job of the first waiting item; None if none is waiting."""
        if not self.waiting:
            return None
        number = self.waiting.pop(0)
        return Job(number, self.call, self.arguments(self.items[number]))

    def put(self, job: Job, slot: int, value: Any) -> None:
        """Store the result under the number of its item."""
        self.values[job.key] = value  # type: ignore[index]

    def lose(self, job: Job) -> None:
        """Put the item first in the queue again."""
        self.waiting.insert(0, job.key)  # type: ignore[arg-type]

    def outdated(self, job: Job) -> bool:
        """Return False, since every result is needed."""
        return False

    @property
    def finished(self) -> bool:
        """True if every item has its result."""
        return len(self.values) == len(self.items)
