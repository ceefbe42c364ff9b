"""`autoshard list` and `autoshard completion`: what there is, and what a shell may fill in."""

import argparse
from typing import TextIO

from autoshard.cli._output import print_json, print_rich
from autoshard.errors import UserError


LISTS = ("models", "topologies", "chips")
"""What can be listed."""
SHELLS = ("bash", "zsh", "tcsh")
"""Shells whose completions can be written."""


def run_list(arguments: argparse.Namespace, answer: TextIO) -> int:
    if arguments.pattern is not None and arguments.what != "topologies":
        raise UserError(f"a pattern is for topologies: write `autoshard list topologies '{arguments.pattern}'`.")
    from autoshard.report import chip_rows, listing_report, model_rows, topology_rows

    rows = {
        "models": model_rows,
        "chips": chip_rows,
        "topologies": lambda: topology_rows(arguments.pattern),
    }[arguments.what]()
    if arguments.json:
        print_json({arguments.what: rows}, answer)
    else:
        print_rich(listing_report(rows), answer)
    return 0


def run_completion(arguments: argparse.Namespace, answer: TextIO) -> int:
    import shtab

    text = shtab.complete(arguments.whole, arguments.shell)
    if arguments.json:
        print_json({"shell": arguments.shell, "text": text}, answer)
    else:
        print(text, file=answer)
    return 0
