"""One process of `torch_xla_spmd.py`: run the tests of a file, and write the outcome of each at once.

python experiments/lib/torch_xla_spmd_run.py FILE FOLDER
"""

import importlib.util
import json
import os
import sys
import unittest
from pathlib import Path
from typing import Any, TextIO


class Told(unittest.TestResult):
    """Result that writes a line for every test, so that a process that dies has reported the tests before."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    def tell(self, test: Any, came: str) -> None:
        print(json.dumps({test.id().rpartition(".")[2]: came}), file=self._out, flush=True)

    def addSuccess(self, test: Any) -> None:
        self.tell(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self.tell(test, f"skipped: {reason}")

    def addFailure(self, test: Any, err: Any) -> None:
        self.tell(test, _last(err))

    def addError(self, test: Any, err: Any) -> None:
        self.tell(test, _last(err))

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self.tell(test, "passed")


def _last(err: Any) -> str:
    return f"{err[0].__name__}: {' '.join(str(err[1]).split())[:300]}"


def _each(suite: Any) -> Any:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _each(test)
        else:
            yield test


def main() -> None:
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    sys.argv = [str(path)]  # upstream's tests parse options of their own
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    with (folder / "results").open("w") as out:
        told = Told(out)
        for test in _each(suite):
            told.tell(test, "asked")
        suite.run(told)
    sys.stdout.flush()
    os._exit(0)  # torch_xla takes seconds to end


if __name__ == "__main__":
    main()
