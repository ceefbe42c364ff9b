"""Compilation of functions with numba, for every room, cached on disk wherever numba finds a place for it."""

from collections.abc import Callable
from typing import Any

import numba


def njit(function: Callable[..., Any] | None = None, *, cache: bool = False, **options: Any) -> Any:
    """Compile a function as `numba.njit` does, but compile without a cache where `cache=True` would fail.

    numba refuses to cache if it can write neither next to the source, nor below the user's home, nor in
    `NUMBA_CACHE_DIR`. A read-only container is an example. Each process then compiles the function again.

    Without `function` the result is a decorator. `options` are those of `numba.njit`.
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
    """Wrap the loader of numba's cache, so that it discards a cache that names types which do not exist any more.

    numba unpickles such an index before it compares the source's time stamp, and fails with an AttributeError.
    """
    load = cache.load_overload

    def load_or_forget(*signature: Any) -> Any:
        """Return a cached overload; flush a cache that cannot be unpickled and return None, so that numba compiles."""
        try:
            return load(*signature)
        except (AttributeError, ImportError):
            cache.flush()
            return None

    cache.load_overload = load_or_forget
