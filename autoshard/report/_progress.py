"""Progress of long work: a spinner on a terminal, plain lines when piped, nothing when quiet."""

import sys
import time
from types import TracebackType
from typing import TextIO

from autoshard.report._names import clean


class ProgressLine:
    """Call it with one line at the start of every phase; it says how long the previous phase took.

    It writes to stderr only, so that stdout stays free for the answer.
    """

    def __init__(self, quiet: bool = False, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._phase: tuple[str, float] | None = None
        self._status = None
        if not quiet and self._stream.isatty():
            from rich.console import Console

            self._console = Console(file=self._stream)
            self._status = self._console.status("")

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._finish(failed=kind is not None)
        if self._status:
            self._status.stop()

    def __call__(self, line: str) -> None:
        if self._quiet:
            return
        line = clean(line)  # it may name what a plan says is run, and must not be made to hide that
        self._finish()
        self._phase = (line, time.perf_counter())
        if self._status:
            from rich.markup import escape

            self._status.update(escape(line))
            self._status.start()
        else:
            print(line, file=self._stream, flush=True)

    def _finish(self, failed: bool = False) -> None:
        if self._phase and self._status:
            line, start = self._phase
            mark, style = ("failed", "red") if failed else (f"{time.perf_counter() - start:.1f} s", "dim")
            self._console.print(f"{line} ({mark})", style=style, markup=False, highlight=False)
        self._phase = None
