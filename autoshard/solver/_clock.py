"""What a time limit counts."""

from collections.abc import Callable

from autoshard.base.process import processor_seconds as processor_seconds


Clock = Callable[[], float]
"""Seconds since some moment."""

Due = Callable[[], bool]
"""Says that the time for a piece of work is up. Work that asks often enough ends soon after, however slow it runs."""


def never() -> bool:
    """The time is never up."""
    return False
