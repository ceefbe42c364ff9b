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


def print_rich(renderable: Any, answer: TextIO) -> None:
    """Print a rich page to the stream `answer`."""
    from rich.console import Console

    from autoshard.report import Printable

    Console(file=answer).print(Printable(renderable))
