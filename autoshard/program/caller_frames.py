"""Tracebacks for errors that are raised later and elsewhere than the code that they are about."""

import sys
import types
from typing import TypeVar


_FRAMES = 48
"""Most frames between a module's code and the operations on its tensors."""

_Error = TypeVar("_Error", bound=Exception)


def with_callers(error: _Error) -> _Error:
    """Return `error` with the frames that now call the caller as its traceback, so that it can be raised later."""
    frame, trace = sys._getframe(2), error.__traceback__
    for _ in range(_FRAMES):
        if frame is None:
            break
        trace = types.TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return error.with_traceback(trace)
