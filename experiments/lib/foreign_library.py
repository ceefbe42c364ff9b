"""Helpers of experiments with another's training library, which may be an unpacked folder without its dependencies."""

import argparse
import importlib.machinery
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from experiments.lib.harness import own_parser


class _StandIns:
    """Finder of missing modules, which replaces them by mocks."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == known or name.startswith(f"{known}.") for known in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # pyrefly: ignore[bad-argument-type]
        return None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__, module.__file__ = [], spec, spec.name, spec.name
        return module

    def exec_module(self, module: Any) -> None:
        pass


def find(folder: Path | None, packages: Iterable[str], never: Sequence[str] = ()) -> None:
    """Make a library in `folder` importable.

    Missing `packages`, and modules of `never`, are replaced by mocks.
    """
    if folder is not None:
        sys.path.insert(0, str(folder))
    names = list(never)
    for name in packages:
        try:
            there = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            there = False
        if not there:
            names.append(name)
    sys.meta_path.insert(0, _StandIns(names))  # pyrefly: ignore[bad-argument-type]


def apart(work: Callable[..., None], *args: Any) -> dict[str, Any]:
    """Run `work(*args, send)` in a process of its own, so that devices and configurations do not mix; return what it
    sends.
    """
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    worker = spawn.Process(target=work, args=(*args, theirs))
    worker.start()
    theirs.close()
    try:
        return mine.recv()
    except EOFError:
        raise SystemExit(f"{work.__name__} ended with {worker.exitcode}") from None
    finally:
        worker.join()


def foreign_parser(library: str) -> argparse.ArgumentParser:
    """Make the parser of an experiment with a library, whose folder is an option."""
    parser = own_parser()
    parser.add_argument(
        f"--{library.lower()}",
        dest="folder",
        type=Path,
        metavar="FOLDER",
        help=f"where {library} is: installed beside, or its wheel unpacked",
    )
    return parser


def is_missing(library: str, given: argparse.Namespace) -> bool:
    """Return True, with a sentence on the terminal, if rows are asked for without the library."""
    package = library.lower()
    missing = not given.table and given.folder is None and importlib.util.find_spec(package) is None
    if missing:
        print(f"{library} is not installed: install `{package}`, or give its folder with --{package}.")
    return missing
