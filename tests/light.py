"""Plugin of `make check`: a selected test fails if it starts a child process, or compiles more than small arrays.

Such a test is marked `heavy`, which leaves it to `make test`. The solver's process is allowed, since all solves of a
test process share it. The first test with a solve would be blamed for it.
"""

import subprocess
from collections.abc import Iterator

import jax
import pytest

from autoshard.base import workers


_SOLVER = "autoshard.solver.exact_solves"
"""Module whose process all solves share."""
_COMPILER = "XLA's compiler"
_MOST_COMPILED = 3
"""Compilations that one test may need for `jnp.zeros` and the like, which later tests find in JAX's cache."""

_STARTED: list[str] = []
_START = subprocess.Popen.__init__


def _start(self: subprocess.Popen, *arguments: object, **options: object) -> None:
    """Note a child process, and start it."""
    words = arguments[0] if arguments else options.get("args")
    if not isinstance(words, list) or _SOLVER not in words:
        _STARTED.append(f"the child process {words}")
    _START(self, *arguments, **options)  # pyrefly: ignore[bad-argument-type]


def _compiled(event: str, seconds: float, **_: object) -> None:
    """Note a compilation."""
    if event == "/jax/core/compile/backend_compile_duration":
        _STARTED.append(_COMPILER)


@pytest.fixture(autouse=True)
def is_light() -> Iterator[None]:
    """Fail the test if it started a child process, or the compiler more than `_MOST_COMPILED` times."""
    _STARTED.clear()
    yield
    if set(_STARTED) == {_COMPILER} and len(_STARTED) <= _MOST_COMPILED:
        return
    assert not _STARTED, f"mark the test `heavy`: it started {', '.join(sorted(set(_STARTED)))}"


def pytest_configure() -> None:
    """Watch the starts of processes and the compilations, and let no plan start helpers on a busy machine."""
    workers.MOST_HELPERS = 0
    subprocess.Popen.__init__ = _start
    jax.monitoring.register_event_duration_secs_listener(_compiled)
