"""Plugin of `make check`: a selected test that starts a child process or XLA's compiler fails.

Such a test is marked `heavy`, which leaves it to `make test`.
"""

import subprocess
from collections.abc import Iterator

import jax
import pytest

from autoshard.base import workers


_STARTED: list[str] = []
_START = subprocess.Popen.__init__


def _start(self: subprocess.Popen, *arguments: object, **options: object) -> None:
    """Note a child process, and start it."""
    _STARTED.append(f"the child process {arguments[0] if arguments else options.get('args')}")
    _START(self, *arguments, **options)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _compiled(event: str, seconds: float, **_: object) -> None:
    """Note a compilation."""
    if event == "/jax/core/compile/backend_compile_duration":
        _STARTED.append("XLA's compiler")


@pytest.fixture(autouse=True)
def is_light() -> Iterator[None]:
    """Fail the test if it started a child process or the compiler."""
    _STARTED.clear()
    yield
    assert not _STARTED, f"mark the test `heavy`: it started {', '.join(sorted(set(_STARTED)))}"


def pytest_configure() -> None:
    """Watch the starts of processes and the compilations, and let no plan start helpers on a busy machine."""
    workers.MOST_HELPERS = 0
    subprocess.Popen.__init__ = _start
    jax.monitoring.register_event_duration_secs_listener(_compiled)
