"""A call on a thread of its own."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


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
