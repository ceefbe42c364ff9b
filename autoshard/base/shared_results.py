"""Results that the parts of one computation share, such as the traces and analyses of several recipes of a source."""

import contextlib
import contextvars
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar


T = TypeVar("T")

_results: contextvars.ContextVar[dict[str, OrderedDict[Hashable, object]] | None] = contextvars.ContextVar(
    "results", default=None
)
"""Results by kind and key, the most recently used last; None outside of `sharing_results`."""


@contextlib.contextmanager
def sharing_results() -> Iterator[None]:
    """Let `shared` return a result again while inside. An inner block uses the results of the outer one."""
    if _results.get() is not None:
        yield
        return
    token = _results.set({})
    try:
        yield
    finally:
        _results.reset(token)


def shared(kind: str, key: Hashable, make: Callable[[], T], most: int) -> T:
    """Return the result of `make`, or its earlier result for the same key.

    Outside of `sharing_results`, `make` is called every time.

    - `kind`, `key`: name of the results, and key among them. Equal keys must have equal results, which nobody changes.
    - `most`: number of results of this kind that are stored; the one that was not used for longest is discarded.
    """
    kinds = _results.get()
    if kinds is None:
        return make()
    results = kinds.setdefault(kind, OrderedDict())
    if key not in results:
        result = make()
        results[key] = result
        while len(results) > most:
            results.popitem(last=False)
    results.move_to_end(key)
    return results[key]  # type: ignore[return-value]
