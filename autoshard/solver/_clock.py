"""What a time limit counts."""

import os
import time
from collections.abc import Callable


Clock = Callable[[], float]
"""Seconds since some moment."""


def processor_seconds() -> float:
    """Seconds of processor that this process has taken, and its children that have ended.

    A machine that stands still, or works for others, does not make it go on.
    """
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system
