"""This process and its helpers: processes of their own that take part in its work, job by job.

A helper that dies or fails leaves its job to the others; this process can do all of it alone. Which process does what
is left to chance, so no answer may depend on it.

A small call of a helper takes less time than one of `concurrent.futures`' processes, and a twentieth of a task of Ray,
which is for whole candidates (`experiments/results/ray_sweep.md`).
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from autoshard.base.processes import cores, processor_seconds
from autoshard.base.worker_process import Helper, Job, Shared, Stopped, pickled


MOST_HELPERS = 3
"""More find too little to do, and each takes memory."""
JOIN_S = 5.0
"""Seconds that a helper's thread gets to see that the helper has ended."""
HERE = 0
"""The seat of this process; helpers have those from 1 on."""


class Work(Protocol):
    """Jobs that hang together. All methods are called one at a time, `take` for `HERE` only by the main thread."""

    def take(self, seat: int) -> Job | None:
        """The next job for that seat; None if there is none just now."""
        ...

    def put(self, job: Job, seat: int, value: Any) -> None:
        """What a job came to."""
        ...

    def lose(self, job: Job) -> None:
        """A job has not been done after all."""
        ...

    def outdated(self, job: Job) -> bool:
        """Whether what a job that is being done comes to is of no use any more."""
        ...

    @property
    def finished(self) -> bool: ...


class Crew:
    """This process and `count` helpers, which are ended with the `with` block.

    `prepare` (`module:function`) is what a helper calls first. Helpers are started at once, or, with `patience`, when
    this process has worked so many seconds of processor on what it runs.
    """

    def __init__(self, count: int = 0, prepare: str | None = None, patience: float = 0.0) -> None:
        self._changed = threading.Condition()
        self._work: Work | None = None
        self._shared: dict[str, Shared] = {}
        self._helpers: list[Helper] = []
        self._threads: list[threading.Thread] = []
        self._running: dict[int, tuple[Work, Job, Callable[[], None]]] = {}
        """Seat -> what is being done there, and what stops it."""
        self._to_start, self._prepare = count, prepare
        self._due = processor_seconds() + patience
        self._ended = False
        self._said: list[str] = []
        self.progress: Callable[[str], None] = lambda line: None
        """Called with a line for every helper that is lost."""
        self.jobs_helped = 0
        """Jobs that helpers have done."""
        self._helped_s = 0.0
        if patience <= 0:
            self._start()

    @property
    def alone(self) -> bool:
        """Whether there are no helpers, nor will be."""
        return not self._to_start and not self._helpers

    def processor_seconds(self) -> float:
        """Those of this process, and those that helpers took for their jobs."""
        return processor_seconds() + self._helped_s

    def share(self, name: str, thing: object, sent: object = None) -> None:
        """From now on `thing` stands for itself in jobs and answers; helpers have a copy of it (or of `sent`), made
        when there is work for them.

        What is shared later may refer to it. Another thing under the same name takes its place.
        """
        with self._changed:
            self._shared.pop(name, None)
            self._shared[name] = Shared(name, thing, thing if sent is None else sent)

    def drop(self, name: str) -> None:
        """What is shared under this name is not needed any more."""
        with self._changed:
            self._shared.pop(name, None)

    def _write_shared(self) -> None:
        """Pickles what is shared, once for all helpers and while nothing else runs."""
        earlier: dict[int, str] = {}
        for each in self._shared.values():
            if each.data is None:
                try:
                    each.data = pickled((each.name, each.sent), earlier)
                except Exception as error:
                    self._said.append(f"helper processes cannot be told of the {each.name} ({error})")
                    self._work_alone()
                    return
                each.sent = None
            earlier[id(each.thing)] = each.name

    def run(self, work: Work) -> None:
        """Until the work is finished; then no helper gets more of it."""
        with self._changed:
            if self._helpers:
                self._write_shared()
            self._work = work
            self._changed.notify_all()
        try:
            while (job := self._next_here(work)) is not None:
                self._do(work, job)
                while self._said:
                    self.progress(self._said.pop())
                if processor_seconds() > self._due:
                    self._start()
        finally:
            with self._changed:
                self._work = None
                self._running.pop(HERE, None)
                self._stop_outdated()

    def _do(self, work: Work, job: Job) -> None:
        """A job here."""
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
        for work, job, stop in self._running.values():
            if job.stoppable and (work is not self._work or work.outdated(job)):
                stop()

    def map(
        self, call: Callable[..., Any], items: Sequence[Any], arguments: Callable[[Any], tuple[Any, ...]]
    ) -> list[Any]:
        """What the call returns for each item, in their order; arguments are made when it is its turn."""
        work = _Listed(call, items, arguments)
        self.run(work)
        return [work.values[number] for number in range(len(items))]

    def end(self) -> None:
        """Ends the helpers, whatever they do."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            self._work_alone()
        # A thread that outlives Python's own end may take the process down with it.
        for thread in self._threads:
            thread.join(JOIN_S)

    def _work_alone(self) -> None:
        self._to_start = 0
        for helper in self._helpers:
            helper.end()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _start(self) -> None:
        if not self._to_start:
            return
        with self._changed:
            self._write_shared()
        for _ in range(self._to_start):
            try:
                helper = Helper(self._prepare)
            except OSError as error:
                self._said.append(f"no helper process could be started ({error}); the work is done here")
                break
            self._helpers.append(helper)
            thread = threading.Thread(target=self._serve, args=(helper, len(self._helpers)), daemon=True)
            self._threads.append(thread)
            thread.start()
        self._to_start = 0

    def _next_here(self, work: Work) -> Job | None:
        with self._changed:
            while True:
                job = work.take(HERE)
                if job is not None or work.finished:
                    self._changed.notify_all()
                    return job
                self._changed.wait()

    def _next(self, seat: int) -> tuple[Work, Job, list["Shared"]] | None:
        """The next job of a helper, waited for, and what is shared by then; None at the end."""
        with self._changed:
            while not self._ended:
                work = self._work
                job = None if work is None else work.take(seat)
                if work is not None and job is not None:
                    helper = self._helpers[seat - 1]
                    helper.number += 1
                    self._running[seat] = work, job, helper.stop
                    self._changed.notify_all()
                    return work, job, list(self._shared.values())
                self._changed.wait()
        return None

    def _serve(self, helper: "Helper", seat: int) -> None:
        """Gives one helper jobs until the end, or its own."""
        while (given := self._next(seat)) is not None:
            work, job, shared = given
            try:
                value, seconds = helper.call(job, shared)
            except Exception as error:
                with self._changed:
                    del self._running[seat]
                    work.lose(job)
                    if not self._ended:
                        self._said.append(f"a helper process failed ({error}); its work is done here")
                    self._changed.notify_all()
                helper.end()
                return
            with self._changed:
                del self._running[seat]
                self._helped_s += seconds
                if isinstance(value, Stopped):
                    work.lose(job)
                elif self._work is work:
                    self.jobs_helped += 1
                    work.put(job, seat, value)
                    self._stop_outdated()
                self._changed.notify_all()


def helpers_here() -> int:
    """How many helpers the cores of this machine can feed beside this process."""
    return min(MOST_HELPERS, cores() - 1)


class _Listed:
    """One call for each item of a list."""

    def __init__(
        self, call: Callable[..., Any], items: Sequence[Any], arguments: Callable[[Any], tuple[Any, ...]]
    ) -> None:
        self.call, self.items, self.arguments = call, items, arguments
        self.waiting = list(range(len(items)))
        self.values: dict[int, Any] = {}

    def take(self, seat: int) -> Job | None:
        if not self.waiting:
            return None
        number = self.waiting.pop(0)
        return Job(number, self.call, self.arguments(self.items[number]))

    def put(self, job: Job, seat: int, value: Any) -> None:
        self.values[job.key] = value  # type: ignore[index]

    def lose(self, job: Job) -> None:
        self.waiting.insert(0, job.key)  # type: ignore[arg-type]

    def outdated(self, job: Job) -> bool:
        return False

    @property
    def finished(self) -> bool:
        return len(self.values) == len(self.items)
