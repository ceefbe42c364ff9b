"""Jobs in a process or on a thread of their own, and the clock of time limits."""

import contextlib
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from autoshard.base.processes import count_ended, count_living, start_python
from autoshard.base.processes import processor_seconds as processor_seconds


Clock = Callable[[], float]
"""Seconds since some moment."""

Due = Callable[[], bool]
"""Says that the time for a piece of work is up. Work that asks often enough ends soon after, however slow it runs."""


def never() -> bool:
    """The time is never up."""
    return False


class OnThread:
    """A call on a thread of its own, which never keeps the process alive."""

    def __init__(self, call: Callable[[], object]):
        self._answer: queue.Queue = queue.Queue()
        self._outcome: tuple | None = None
        self.seconds = 0.0

        def work() -> None:
            tick = time.monotonic()
            try:
                value = (call(), None)
            except BaseException as error:  # handed to whoever asks for the result
                value = (None, error)
            self.seconds = time.monotonic() - tick
            self._answer.put(value)

        threading.Thread(target=work, daemon=True).start()

    def done(self) -> bool:
        return self._outcome is not None or not self._answer.empty()

    def result(self, stopped: Callable[[], bool] | None = None) -> Any:
        """What the call returned or raised, waited for; None when `stopped` says so before it is there."""
        while self._outcome is None:
            if stopped is not None and stopped():
                return None
            try:
                # Short waits, so that signals are handled.
                self._outcome = self._answer.get(timeout=0.2)
            except queue.Empty:
                continue
        value, error = self._outcome
        if error is not None:
            raise error
        return value


_HURRY = "hurry"
"""Said instead of a job."""


class Apart:
    """The process that runs a module's `main`, which calls `serve`, and the thread that waits for its answer."""

    def __init__(self, module: str):
        self._process = start_python(module)
        self._outcome: tuple[Any, Exception | None] | None = None
        self._thread: threading.Thread | None = None
        self._speaking = threading.Lock()

    def give(self, messages: Iterable[object]) -> None:
        """Sends all of these; the last is the one that is answered. No answer may be due."""
        self._outcome = None

        def work() -> None:
            pipe, source = self._process.stdin, self._process.stdout
            assert pipe is not None and source is not None
            try:
                with self._speaking:
                    for message in messages:
                        pickle.dump(message, pipe, protocol=5)
                    pipe.flush()
                value, error, worked = pickle.load(source)
            except (OSError, EOFError, pickle.UnpicklingError):
                return
            except Exception as error:
                self._outcome = None, error
                return
            count_living(self._process.pid, worked)
            self._outcome = value, error

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def hurry(self, seconds: float) -> bool:
        """Asks for the answer as it stands, and waits so long for it; whether it is there."""
        pipe = self._process.stdin
        assert pipe is not None
        until = time.monotonic() + seconds
        if self._speaking.acquire(timeout=seconds):
            try:
                pickle.dump(_HURRY, pipe, protocol=5)
                pipe.flush()
            except OSError:
                return self.done()
            finally:
                self._speaking.release()
            self.wait(max(0.0, until - time.monotonic()))
        return self.done()

    def done(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def answer(self) -> Any:
        """The answer, waited for. Raises what the job raised; `RuntimeError` if the process died (of memory, say)."""
        while not self.done():
            # Short waits, so that signals are handled.
            self.wait(0.1)
        if self._outcome is None:
            raise RuntimeError("the process for exact solves ended unexpectedly")
        value, error = self._outcome
        if error is not None:
            raise error
        return value

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._thread is not None:
            self._thread.join(1.0)
        count_ended(self._process.pid)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def serve(do: Callable[[Any, Due], Any], setup: Callable[[Any], None] | None = None) -> None:
    """Answers what comes in on stdin with what `do` makes of it, until stdin ends; `setup` gets the first message.

    What `do` is given beside the job says when the answer is wanted as it stands.
    The end of stdin ends the process in the middle of a job too: nobody is left who waits for it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it is interrupted, and ends it
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print goes to stderr
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    hurried = threading.Event()
    threading.Thread(target=_listen, args=(inbox, hurried), daemon=True).start()
    if setup is not None:
        setup(inbox.get())
    while True:
        job = inbox.get()
        value, failed = None, None
        try:
            value = do(job, hurried.is_set)
        except Exception as error:
            failed = error
        try:
            pickle.dump((value, failed, processor_seconds()), sink, protocol=5)
            sink.flush()
        except BrokenPipeError:
            os._exit(0)


def _listen(inbox: "queue.SimpleQueue[Any]", hurried: threading.Event) -> None:
    while True:
        try:
            message = pickle.load(sys.stdin.buffer)
            if isinstance(message, str):
                hurried.set()
            else:
                hurried.clear()  # it may have come when the job before was done
                inbox.put(message)
        except EOFError:
            os._exit(0)
        except Exception as error:
            print(f"autoshard: the process for exact solves cannot read its work: {error}", file=sys.stderr, flush=True)
            os._exit(1)
