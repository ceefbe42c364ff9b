"""The `autoshard` command: parse, call one function, print."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TextIO

from autoshard.cli._parser import parse
from autoshard.cli._process import settle
from autoshard.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 past a tolerance, 2 for bad input.

    Without `argv` the process is the command's own, and is set up for it.
    """
    if argv is None:
        settle()
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    try:
        arguments = parse(argv)
        with _stdout_kept_for_the_answer() as answer:
            return arguments.run(arguments, answer)
    except UserError as error:
        if debug:
            traceback.print_exc()
        print(f"autoshard: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has seen enough (`| head`); without this, Python complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except KeyboardInterrupt:
        print("autoshard: interrupted", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _stdout_kept_for_the_answer() -> Iterator[TextIO]:
    """Whatever libraries or the user's own file print goes to stderr; yields the true stdout."""
    answer = sys.stdout
    answer.flush()
    try:
        descriptor = answer.fileno()
    except OSError:  # a stream in memory, as under pytest
        with contextlib.redirect_stdout(sys.stderr):
            yield answer
        return
    kept = os.dup(descriptor)
    os.dup2(sys.stderr.fileno(), descriptor)
    try:
        with contextlib.redirect_stdout(sys.stderr), _open_answer(kept, answer) as stream:
            yield stream
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


def _open_answer(descriptor: int, like: TextIO) -> TextIO:
    # A terminal that cannot show a character gets `?` rather than a traceback.
    return open(descriptor, "w", encoding=like.encoding, errors="replace", closefd=False)
