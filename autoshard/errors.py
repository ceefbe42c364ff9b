"""Errors that a user can cause and can correct."""

from collections.abc import Callable


class Terminated(BaseException):
    """Request to end the command, raised when SIGTERM arrives."""


ENDINGS = (KeyboardInterrupt, Terminated)
"""Exceptions that a signal raises while a user's own code runs."""


class UserError(Exception):
    """Error in the user's input; its message is one sentence that names the wrong input.

    The command prints the message without a traceback and exits with code 2.
    """


class PinError(UserError):
    """Error for demands on tensors that cannot hold, alone or together."""

    def __init__(self, sentence: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(sentence)
        self.names = names
        """Names of the arguments or results whose demands conflict, the last demand first."""


class InfeasibleError(UserError):
    """Error for a memory limit that no plan satisfies on every device."""

    def __init__(self, reason: str | Callable[[], str]) -> None:
        """Store the sentence, or a function that finds it, which is called when the sentence is read."""
        super().__init__(reason if isinstance(reason, str) else "")
        self._reason = reason

    def __str__(self) -> str:
        """Return the sentence; a `UserError` that its function raises is the sentence."""
        if not isinstance(self._reason, str):
            try:
                self._reason = self._reason()
            except UserError as error:
                self._reason = str(error)
            self.args = (self._reason,)
        return self._reason

    def __reduce__(self) -> tuple[type, tuple[str]]:
        """Return the class and the sentence, in place of its function, for `pickle`."""
        return type(self), (str(self),)


class FormError(UserError):
    """Error for a plan that the form of an export cannot hold; the command exits with code 3."""


class OutOfRangeError(UserError):
    """Error for costs or bytes whose sum exceeds the range of exact integers."""


def reason_of(error: BaseException, lines: int = 1) -> str:
    """Return the first `lines` lines of an error's text as one line, without the full stop; empty if it has no text.

    The error may be of a user's own class, whose `__str__` may raise in turn: a sentence then names that error's type.
    `ENDINGS` are raised.
    """
    try:
        text_lines = str(error).strip().splitlines()
    except ENDINGS:
        raise
    except BaseException as another:
        return f"its text cannot be made, which raises {type(another).__name__}"
    return " ".join(line.strip() for line in text_lines[:lines]).rstrip(".")
