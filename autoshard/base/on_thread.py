"""Call on a daemon thread, for work that this process waits for in short steps."""

import threading
import time
from collections.abc import Callable
from typing import Any


class OnThread:
    """A call on a daemon thread, which starts at once and never blocks the end of the process."""

    def __init__(self, call: Callable[[], object]):
        self._outcome: tuple[Any, BaseException | None] = None, None
        self.seconds = 0.0
        """Seconds that the call lasted; 0 until it ends."""

        def work() -> None:
            """Call, and store the value or the error, and the seconds."""
            tick = time.monotonic()
            try:
                self._outcome = call(), None
            except BaseException as error:  # raised by `result`
                self._outcome = None, error
            self.seconds = time.monotonic() - tick

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Return True if the call has ended, by a value or by an error."""
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for the end of the call."""
        self._thread.join(seconds)

    def result(self, stopped: Callable[[], bool] | None = None) -> Any:
        """Wait for the call, and return its value or raise its error.

        Return None as soon as `stopped`, polled every 0.2 s, is true; the call then runs on.
        """
        while not self.done():
            if stopped is not None and stopped():
                return None
            # Short waits, so that signals are handled.
            self.wait(0.2)
        value, error = self._outcome
        if error is not None:
            raise error
        return value
