"""Output of commands: progress on stderr; the answer, one JSON object or a rich page, on stdout."""

import argparse
import json
from typing import TYPE_CHECKING, Any, TextIO


if TYPE_CHECKING:
    from autoshard.report import ProgressLine


def show_progress(arguments: argparse.Namespace) -> "ProgressLine":
    """Return a context manager whose value prints progress lines to stderr, unless `--quiet`."""
    from autoshard.report import ProgressLine

    return ProgressLine(quiet=arguments.quiet)


def print_json(value: dict[str, Any], answer: TextIO) -> None:
    """Print an object as indented JSON and a line end; raise `ValueError` for NaN and infinity."""
    json.dump(value, answer, indent=2, allow_nan=False)
    answer.write("\n")


def print_rich(renderable: Any, answer: TextIO, whole: bool = False) -> None:
    """Print a rich page to the stream `answer`; with `whole`, as wide as its lines are unless that is a terminal."""
    from rich.console import Console
    from rich.measure import Measurement

    from autoshard.report import Printable

    console = Console(file=answer)
    if whole and not console.is_terminal:
        limitless = console.options.update(width=_LIMITLESS)
        console = Console(
            file=answer, width=max(console.width, Measurement.get(console, limitless, renderable).maximum)
        )
    console.print(Printable(renderable), crop=False)  # commands to paste may be longer than the screen is wide


_LIMITLESS = 10_000
"""Width in characters that no line of a report has."""
