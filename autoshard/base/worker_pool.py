"""Helpers as an executor of `concurrent.futures`: calls that know nothing of one another, each in another process.

Unlike those of Python's own pool these processes end with the one that started them, however that ends, and at once
when it does not want them any more.
"""

import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from autoshard.base.worker_process import Helper, Job


JOIN_S = 5.0
"""Seconds that a thread gets to see that its helper has ended."""
RETRIES = 2
"""Times that a call is given to another worker when one has died at it."""


_T = TypeVar("_T")
_V = TypeVar("_V")


def as_ended(
    executor: concurrent.futures.Executor, call: Callable[[_T], _V], items: Iterable[_T]
) -> Iterator[tuple[int, _V]]:
    """Make a call for each item by an executor; yields the number of the item and its outcome as they end.

    Calls begin while later items are still made. A call whose worker died is given to another one. Raises what a call
    raises, and `BrokenExecutor` when workers die at one again and again, or the executor is broken as a whole.
    """
    given: list[_T] = []
    running: dict[concurrent.futures.Future[_V], tuple[int, int]] = {}
    for item in items:
        running[executor.submit(call, item)] = len(given), 0
        given.append(item)
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
                    running[executor.submit(call, given[number])] = number, tries + 1
                except RuntimeError:  # it takes no more
                    raise error from None
                continue
            yield number, value


class HelperPool(concurrent.futures.Executor):
    """`count` processes, each started with its first call; `prepare` (`module:function`) is what they call before."""

    def __init__(self, count: int, prepare: str | None = None) -> None:
        self._waiting: queue.SimpleQueue[tuple[concurrent.futures.Future[Any], Job]] = queue.SimpleQueue()
        self._prepare = prepare
        self._lock = threading.Lock()
        self._helpers: set[Helper] = set()
        self._threads: list[threading.Thread] = []
        self._most, self._number, self._ended = count, 0, False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[Any]":
        """What the call comes to, once it has: call, arguments and result can be pickled.

        A call that raises has a `RuntimeError` of the same text as its outcome, or its `UserError`, and one whose
        process dies a `BrokenExecutor`. Raises `RuntimeError` after `shutdown`, and for arguments by keyword.
        """
        if kwargs:
            raise RuntimeError("arguments by keyword are not taken to another process")
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
        """Ends all processes at once, whatever they do, and cancels what has not begun."""
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
                future.set_result(helper.call(job, ())[0])
            except Exception as error:
                alive = helper is not None and helper.alive
                future.set_exception(error if alive else concurrent.futures.BrokenExecutor(str(error)))
                if helper is not None and not alive:
                    helper.end()
                    helper = None
        if helper is not None:
            helper.end()

    def _start(self) -> Helper:
        with self._lock:
            if self._ended:
                raise RuntimeError("the processes have been ended")
            helper = Helper(self._prepare)
            self._helpers.add(helper)
        return helper
