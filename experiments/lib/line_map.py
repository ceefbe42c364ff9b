"""Plugin of pytest for `mutants.py`, which records the seconds and the executed package lines of every passing test.

`LINE_MAP` names the JSON file that it writes: tests with their seconds, and lines by file with the tests that ran each.
Lines that ran while a module was imported belong to the test "". A child process that imports this file at startup
records its lines if it ends normally.
"""

import atexit
import json
import os
import signal
from pathlib import Path
from typing import Any

import coverage


PACKAGE = Path(__file__).parents[2] / "autoshard"
CHILD_OF = "LINE_MAP_TEST"
"""Environment variable with the name of the running test, for processes that the test starts."""
# Coverage starts before anything imports the package.
_lines = coverage.Coverage(data_file=None, source=[str(PACKAGE)], config_file=False)
_lines.start()
_seconds: dict[str, float] = {}
_bad: set[str] = set()


def _write_child(test: str) -> None:
    _lines.stop()
    data = _lines.get_data()
    lines = {str(Path(file).relative_to(PACKAGE)): data.lines(file) for file in data.measured_files()}
    Path(f"{os.environ['LINE_MAP']}.{os.getpid()}").write_text(json.dumps({"test": test, "lines": lines}))


if CHILD_OF in os.environ:
    atexit.register(_write_child, os.environ[CHILD_OF])
else:
    # Lines that ran before the time limit are written too.
    signal.signal(signal.SIGXCPU, signal.default_int_handler)


def pytest_runtest_logstart(nodeid: str) -> None:
    _lines.switch_context(nodeid)
    os.environ[CHILD_OF] = nodeid


def pytest_runtest_logfinish() -> None:
    del os.environ[CHILD_OF]
    _lines.switch_context("")


def pytest_runtest_logreport(report: Any) -> None:
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
    path = Path(os.environ["LINE_MAP"])
    for child in path.parent.glob(f"{path.name}.*"):
        ran = json.loads(child.read_text())
        for file, numbers in ran["lines"].items() if ran["test"] in seconds else ():
            for number in numbers:
                lines.setdefault(file, {}).setdefault(number, []).append(ran["test"])
    path.write_text(json.dumps({"seconds": seconds, "lines": lines}))
