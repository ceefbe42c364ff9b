"""Eight CPU devices and quick compilation for every test: set before anything imports jax.

A run ends with the files that took longest, since each is the work of one process.
"""

import gc
import os
from collections import Counter, defaultdict

import pytest

from tests.compiling import QUICKLY


_COUNT = "--xla_force_host_platform_device_count"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("PJRT_DEVICE", "CPU")
# Threads of torch that wait for their part of small tensors take the time of other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["AUTOSHARD_CACHE_DIR"] = ""  # no entries of earlier runs, and none left in the home directory
os.environ["AUTOSHARD_DATA_DIR"] = ""
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()
os.environ["XLA_FLAGS"] += f" {QUICKLY}"
# Tracing creates many long-lived objects. Garbage collections of all of them would be a tenth of the time.
gc.set_threshold(20_000, 20, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all cases of a test `full` but as many as its mark `few` says, spread evenly over them."""
    cases: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        few = item.get_closest_marker("few")
        if few is not None and item.get_closest_marker("full") is None:
            cases[item.nodeid.partition("[")[0], few.args[0]].append(item)
    for (_, count), each in cases.items():
        kept = {(2 * number + 1) * len(each) // (2 * count) for number in range(count)}
        for number, item in enumerate(each):
            if number not in kept:
                item.add_marker("full")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the ten slowest files."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > 1:
        terminalreporter.write_sep("=", "slowest 10 files")
        for name, taken in seconds.most_common(10):
            terminalreporter.write_line(f"{taken:.1f}s {name}")
