"""What the hook does beside a script can neither break it nor outlive it: whatever goes wrong is said once."""

import os
import warnings
from collections.abc import Callable
from types import TracebackType

from autoshard.errors import UserError


STRICT_VARIABLE = "AUTOSHARD_STRICT"


def is_strict() -> bool:
    """Whether `AUTOSHARD_STRICT` asks for errors instead of warnings."""
    return os.environ.get(STRICT_VARIABLE, "0") not in ("", "0")


def said_of(error: Exception) -> str:
    """An error in a sentence."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


class Guard:
    """Around work of our own, never around the script's: a failure is warned of, and `give_up` is called, once.

    A `UserError` is the user's to see, and so is every error where `AUTOSHARD_STRICT` is set.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self.failed = False
        self._give_up = give_up

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is None:
            return False
        if not isinstance(error, Exception) or isinstance(error, UserError) or is_strict():
            return False
        if not self.failed:
            self.failed = True
            warnings.warn(
                f"autoshard: auto-sharding is off from here on, since watching this script failed: {said_of(error)}",
                stacklevel=3,
            )
            try:
                self._give_up()
            except Exception as another:  # what is half begun may not end well either
                warnings.warn(f"autoshard: {said_of(another)}", stacklevel=3)
        return True
