"""Errors that a user can cause and can mend."""


class UserError(Exception):
    """Something the user wrote is wrong; the message is one sentence that names it.

    The command prints the message without a traceback and exits with code 2.
    """


class InfeasibleError(UserError):
    """No plan keeps every device within the memory limit."""


class OutOfRangeError(UserError):
    """Costs or bytes add up to more than is reckoned exactly."""
