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
        compiled: Any = numba.njit(cache=cache, **options)(function)
    except RuntimeError as error:
        if not cache or "no locator available" not in str(error):
            raise
        return numba.njit(**options)(function)
    if cache:
        _forgive_older_versions(compiled._cache)
    return compiled


def _forgive_older_versions(cache: Any) -> None:
    """Compile anew what an older version of the package has left, where its types have another name or place now.

    numba unpickles such an index before it compares what it was made from, and ends in an AttributeError.
    """
    load = cache.load_overload

    def load_or_forget(*signature: Any) -> Any:
        try:
            return load(*signature)
        except (AttributeError, ImportError):
            cache.flush()
            return None

    cache.load_overload = load_or_forget
