"""Jobs in another process or on another thread, and the clock of time limits."""

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
"""Function that returns seconds since some fixed moment."""

Due = Callable[[], bool]
"""Function that returns True once the time for a piece of work is up. Work that calls it often ends soon after, at any
speed.
"""


def never() -> bool:
    """Return False: the time is never up."""
    return False


class OnThread:
    """A call on a daemon thread, which never blocks the end of the process."""

    def __init__(self, call: Callable[[], object]):
        self._answer: queue.Queue = queue.Queue()
        self._outcome: tuple | None = None
        self.seconds = 0.0

        def work() -> None:
            tick = time.monotonic()
            try:
                value = (call(), None)
            except BaseException as error:  # raised by `result`
                value = (None, error)
            self.seconds = time.monotonic() - tick
            self._answer.put(value)

        threading.Thread(target=work, daemon=True).start()

    def done(self) -> bool:
        """Return True if the call has ended."""
        return self._outcome is not None or not self._answer.empty()

    def result(self, stopped: Callable[[], bool] | None = None) -> Any:
        """Wait for the call, and return its value or raise its error; return None if `stopped` becomes true first."""
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
"""Message that asks for the current answer, sent instead of a job."""


class JobProcess:
    """A child process that runs a module's `main`, which calls `serve`, and the thread that waits for its answer."""

    def __init__(self, module: str):
        self._process = start_python(module)
        self._outcome: tuple[Any, Exception | None] | None = None
        self._thread: threading.Thread | None = None
        self._speaking = threading.Lock()

    def send(self, messages: Iterable[object]) -> None:
        """Send messages, the last of which gets an answer; the process must be idle."""
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

    def request_current_answer(self, seconds: float) -> bool:
        """Ask for the current answer and wait up to `seconds`; return True if it arrived."""
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
        """Return True if the answer has arrived, or if the process died."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for the answer."""
        if self._thread is not None:
            self._thread.join(seconds)

    def answer(self) -> Any:
        """Wait for the answer and return it.

        Raises the error of the job, or `RuntimeError` if the process died (out of memory, for example).
        """
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
        """Terminate the process."""
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
    """Answer each job from stdin with the result of `do`, until stdin ends; `setup` receives the first message.

    The second argument of `do` returns True once the current answer is requested. The end of stdin ends the process
    even during a job, since no reader is left.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process is interrupted, and terminates this one
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the output of libraries goes to stderr
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
    """Read messages from stdin into `inbox`, or set `hurried`."""
    while True:
        try:
            message = pickle.load(sys.stdin.buffer)
            if isinstance(message, str):
                hurried.set()
            else:
                hurried.clear()  # the request may have arrived after the previous job was done
                inbox.put(message)
        except EOFError:
            os._exit(0)
        except Exception as error:
            print(f"autoshard: the process for exact solves cannot read its work: {error}", file=sys.stderr, flush=True)
            os._exit(1)
