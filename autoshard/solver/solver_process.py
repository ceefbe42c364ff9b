"""Exact solves in a child process, one after the other."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.base.on_thread import OnThread
from autoshard.base.worker import Job, Shared, Worker, WorkerEnded


class SolverProcess:
    """A child process that imports `module` first, and the thread that waits for its answer; one call at a time."""

    def __init__(self, module: str):
        self._worker = Worker(module, counted=True)
        self._job: Job | None = None
        self._run: OnThread | None = None

    def start(self, call: Callable[..., Any], *arguments: Any, shared: Sequence[Shared] = ()) -> None:
        """Begin the call with the arguments and, as the last one, a `Due`; return at once.

        The `Due` is true once the current answer is requested. The process must be idle. `shared` are the objects that
        arguments refer to by name.
        """
        self._job = job = Job(call.__name__, _outcome, (call, *arguments), stoppable=True)
        self._run = OnThread(lambda: self._worker.call(job, shared)[0])

    def request_current_answer(self, seconds: float) -> bool:
        """Ask for the current answer and wait up to `seconds`; return True if it arrived."""
        job = self._job
        assert job is not None
        # The job itself may still be on its way.
        OnThread(lambda: self._worker.stop(job))
        self.wait(seconds)
        return self.done()

    def done(self) -> bool:
        """Return True if the answer has arrived, or if the process died."""
        return self._run is not None and self._run.done()

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for the answer; return at once before the first `start`."""
        if self._run is not None:
            self._run.wait(seconds)

    def answer(self) -> Any:
        """Wait for the answer and return it.

        Raises the error of the call, or `RuntimeError` if the process died (out of memory, for example). `start` must
        precede.
        """
        assert self._run is not None
        try:
            outcome = self._run.result()
        except WorkerEnded:
            raise RuntimeError("the process for exact solves ended unexpectedly") from None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def end(self) -> None:
        """Terminate the process, without an answer, and wait up to a second for its thread."""
        self._worker.end()
        self.wait(1.0)


def _outcome(call: Callable[..., Any], *arguments: Any, stop: threading.Event) -> Any:
    """Return the value of a call in the child process, or its exception as a value, which preserves its type."""
    try:
        return call(*arguments, stop.is_set)
    except Exception as error:
        return error
