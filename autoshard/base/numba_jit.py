"""Compilation of functions with numba, for every room, cached on disk wherever numba finds a place for it."""

from collections.abc import Callable
from typing import Any

import numba


def njit(function: Callable[..., Any] | None = None, *, cache: bool = False, **options: Any) -> Any:
    """Compile a function as `numba.njit` does, but compile without a cache where `cache=True` would fail.

    numba refuses to cache if it can write neither next to the source, nor below the user's home, nor in
    `NUMBA_CACHE_DIR`. A read-only container is an example. Each process then compiles the function again.
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
        _flush_incompatible_cache(compiled._cache)
    return compiled


def _flush_incompatible_cache(cache: Any) -> None:
    """Discard the cache of an older version of the package, whose types had another name or module.

    numba unpickles such an index before it compares the source's time stamp, and fails with an AttributeError.
    """
    load = cache.load_overload

    def load_or_forget(*signature: Any) -> Any:
        """Load a cached overload, or flush the cache if it cannot be unpickled."""
        try:
            return load(*signature)
        except (AttributeError, ImportError):
            cache.flush()
            return None

    cache.load_overload = load_or_forget
