"""What a time limit counts."""

from collections.abc import Callable

from ..process import processor_seconds as processor_seconds


Clock = Callable[[], float]
"""Seconds since some moment."""
