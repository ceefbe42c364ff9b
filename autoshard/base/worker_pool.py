"""Executor of `concurrent.futures` that runs each call in one of several helper processes.

Unlike those of Python's `ProcessPoolExecutor`, these processes end with the process that started them, even if it is
killed. `shutdown` ends them at once.
"""

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from autoshard.base.worker import Job, Worker


JOIN_S = 5.0
"""Seconds within which a thread must notice that its helper has ended."""
RETRIES = 2
"""Most times that a call is repeated by another worker after one has died during it."""


_T = TypeVar("_T")
_V = TypeVar("_V")


def as_ended(
    executor: concurrent.futures.Executor, call: Callable[[_T], _V], items: Iterable[_T]
) -> Iterator[tuple[int, _V]]:
    """Run a call for each item in an executor and yield pairs (number of the item, result) as the calls end.

    Calls begin while `items` is still being iterated, but results are yielded only after its end. A call whose worker
    died is retried. Raises the exceptions of calls, and `BrokenExecutor` if workers die `RETRIES + 1` times during one
    call or if the executor accepts no more calls.
    """
    submitted: list[_T] = []
    running: dict[concurrent.futures.Future[_V], tuple[int, int]] = {}
    for item in items:
        running[executor.submit(call, item)] = len(submitted), 0
        submitted.append(item)
    while running:
        ended, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in ended:
            number, tries = running.pop(future)
            try:
                value = future.result()
            except concurrent.futures.BrokenExecutor as error:
                if tries == RETRIES:
                    raise
                try:
                    running[executor.submit(call, submitted[number])] = number, tries + 1
                except RuntimeError:  # the executor accepts no more calls
                    raise error from None
                continue
            yield number, value


class HelperPool(concurrent.futures.Executor):
    """Executor of at most `count` helper processes, started as calls arrive.

    - `prepare`: `module:function` that a helper calls before its first call; None for none.
    """

    def __init__(self, count: int, prepare: str | None = None) -> None:
        self._waiting: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Job]] = queue.SimpleQueue()
        self._prepare = prepare
        self._lock = threading.Lock()
        self._helpers: set[Worker] = set()
        self._threads: list[threading.Thread] = []
        self._most, self._number, self._ended = count, 0, False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        """Schedule a call and return the future of its result. Call, arguments and result must be picklable.

        The future's error is the call's own `UserError`, or a `RuntimeError` with the text of any other exception. It
        is a `BrokenExecutor` if the process dies. Raises `RuntimeError` after `shutdown` and for keyword arguments.
        """
        if kwargs:
            raise RuntimeError("keyword arguments cannot be sent to another process")
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._ended:
                raise RuntimeError("the processes have been ended")
            self._number += 1
            self._waiting.put((future, Job(self._number, fn, args)))
            if len(self._threads) < self._most:
                self._threads.append(threading.Thread(target=self._serve, daemon=True))
                self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """End all processes at once, and cancel the calls that have not begun; `cancel_futures` changes nothing.

        Running calls get a `BrokenExecutor`. With `wait`, wait up to `JOIN_S` for each thread of the pool.
        """
        with self._lock:
            self._ended = True
            for helper in self._helpers:
                helper.end()
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()[0].cancel()
        for thread in self._threads if wait else ():
            thread.join(JOIN_S)

    def _serve(self) -> None:
        """Run waiting calls in one helper until `shutdown`; start it with the first call, and replace it if it dies."""
        helper = None
        while not self._ended:
            try:
                future, job = self._waiting.get(timeout=0.1)
            except queue.Empty:
                continue
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if helper is None:
                    helper = self._start()
                future.set_result(helper.call(job)[0])
            except Exception as error:
                alive = helper is not None and helper.alive
                future.set_exception(error if alive else concurrent.futures.BrokenExecutor(str(error)))
                if helper is not None and not alive:
                    helper.end()
                    helper = None
        if helper is not None:
            helper.end()

    def _start(self) -> Worker:
        """Start a helper; raise `RuntimeError` after `shutdown`."""
        with self._lock:
            if self._ended:
                raise RuntimeError("the processes have been ended")
            helper = Worker(self._prepare)
            self._helpers.add(helper)
        return helper
