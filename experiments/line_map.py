"""A plugin of pytest for `mutants.py`: record the seconds and the lines of the package of every test that passes.

`LINE_MAP` names the file of JSON that it writes: tests with their seconds, and lines by file with the tests that ran
each. Lines that ran while a module was imported are of the test "".
"""

import json
import os
import signal
from pathlib import Path

import coverage
import pytest


PACKAGE = Path(__file__).parent.parent / "autoshard"
# What ran until there is no time left is written all the same.
signal.signal(signal.SIGXCPU, signal.default_int_handler)
# Started before anything imports the package.
_lines = coverage.Coverage(data_file=None, source=[str(PACKAGE)], config_file=False)
_lines.start()
_seconds: dict[str, float] = {}
_bad: set[str] = set()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    _lines.switch_context(item.nodeid)
    yield
    _lines.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if not report.passed:
        _bad.add(report.nodeid)


def pytest_sessionfinish() -> None:
    _lines.stop()
    data = _lines.get_data()
    seconds = {name: round(s, 2) for name, s in _seconds.items() if name not in _bad}
    lines = {
        str(Path(file).relative_to(PACKAGE)): {
            line: [name for name in names if not name or name in seconds]
            for line, names in data.contexts_by_lineno(file).items()
        }
        for file in data.measured_files()
    }
    Path(os.environ["LINE_MAP"]).write_text(json.dumps({"seconds": seconds, "lines": lines}))
