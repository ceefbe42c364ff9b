"""Clock of time limits, and the question that ends a piece of work."""

from collections.abc import Callable

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
