"""What commands print: progress on stderr, one JSON object or a rich page as the answer."""

import argparse
import json
from typing import TYPE_CHECKING, Any, TextIO


if TYPE_CHECKING:
    from autoshard.report import ProgressLine


def show_progress(arguments: argparse.Namespace) -> "ProgressLine":
    from autoshard.report import ProgressLine

    return ProgressLine(quiet=arguments.quiet)


def print_json(value: dict[str, Any], answer: TextIO) -> None:
    json.dump(value, answer, indent=2, allow_nan=False)
    answer.write("\n")


def print_rich(renderable: Any, answer: TextIO) -> None:
    from rich.console import Console

    from autoshard.report import Printable

    Console(file=answer).print(Printable(renderable))
