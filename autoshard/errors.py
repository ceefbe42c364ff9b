"""Errors that a user can cause and can mend."""


class Terminated(BaseException):
    """The command has been asked to end, by SIGTERM."""


ENDINGS = (KeyboardInterrupt, Terminated)
"""Exceptions that a signal raises while a user's own code runs."""


class UserError(Exception):
    """Something the user wrote is wrong; the message is one sentence that names it.

    The command prints the message without a traceback and exits with code 2.
    """


class InfeasibleError(UserError):
    """No plan keeps every device within the memory limit."""


class OutOfRangeError(UserError):
    """Costs or bytes add up to more than is reckoned exactly."""


def reason_of(error: BaseException, lines: int = 1) -> str:
    """Return the first lines of an error's text as one, without the full stop; empty if it has no text.

    The error may be of a user's own class, whose text may raise in turn.
    """
    try:
        said = str(error).strip().splitlines()
    except ENDINGS:
        raise
    except BaseException as another:
        return f"its text cannot be made, which raises {type(another).__name__}"
    return " ".join(line.strip() for line in said[:lines]).rstrip(".")
