"""Compiling functions with numba, for every room: kept on disk between processes wherever there is a place for it."""

from collections.abc import Callable
from typing import Any

import numba


def njit(function: Callable[..., Any] | None = None, *, cache: bool = False, **options: Any) -> Any:
    """`numba.njit`, which `cache=True` never makes fail.

    numba refuses to cache a function where it can write neither beside the source nor below the user's home nor in
    `NUMBA_CACHE_DIR`, as in a read-only container. There the function is compiled anew by every process.
    """
    if function is None:
        return lambda each: njit(each, cache=cache, **options)
    try:
        return numba.njit(cache=cache, **options)(function)
    except RuntimeError as error:
        if not cache or "no locator available" not in str(error):
            raise
        return numba.njit(**options)(function)
