"""CPU devices that keep their memory between steps, as an accelerator's runtime does."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any


# Parameters of `mallopt`, and the largest values that glibc gives the thresholds by itself (malloc/malloc.c, 2.36:
# `DEFAULT_MMAP_THRESHOLD_MAX`, and twice that to trim).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_KEPT = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 64 << 20, _MMAP_MAX: 0}
_USUAL = {_TRIM_THRESHOLD: 64 << 20, _TOP_PAD: 0, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65536}


@contextlib.contextmanager
def memory_kept() -> Iterator[None]:
    """While the body runs, memory that was freed stays with this process, so that no step pays for fresh pages.

    XLA asks for the temporaries of a step on CPU devices in one piece a device and frees them afterwards. glibc gives
    large pieces back to the system, which zeroes every page again that the next step touches: 8 devices of 28 MB spent
    a fifth of their step there, more or less as sizes fell on either side of glibc's thresholds. No accelerator does,
    whose memory is one pool from the start. Does nothing with another C library. Afterwards what is free goes back.
    """
    libc = _glibc()
    if libc is None:
        yield
        return
    for parameter, value in _KEPT.items():
        libc.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in _USUAL.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)


@functools.cache
def _glibc() -> Any:
    """The C library of this process if it is glibc."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError, TypeError):
        return None
    return libc
