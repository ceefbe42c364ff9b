"""Errors that are raised later, elsewhere than what they are about."""

import sys
import types
from typing import TypeVar


_FRAMES = 48
"""Frames between a module's code and what is done with its tensors, at most."""

_Error = TypeVar("_Error", bound=Exception)


def with_callers(error: _Error) -> _Error:
    """An error that may be raised later, with the frames that call the caller now."""
    frame, trace = sys._getframe(2), error.__traceback__
    for _ in range(_FRAMES):
        if frame is None:
            break
        trace = types.TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return error.with_traceback(trace)
