"""Entry point of the `autoshard` command: parse, call one function, print."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TextIO

from autoshard.cli.inputs import check_outputs
from autoshard.cli.parser import parse
from autoshard.cli.session import configure_files, configure_process, exit_after_signal, obey_signals
from autoshard.errors import FormError, Terminated, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 past a tolerance, 2 for bad input, 130 or 143 after a signal.

    It is 3 for an export that cannot hold its plan. Errors become one line on stderr; `--debug` adds the traceback. A
    reader that closes the pipe early is no error.

    Without `argv` the command owns its process: `main` installs signal handlers and process settings.
    """
    if argv is None:
        _hold_descriptors()
        configure_process()
        obey_signals()
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv
    try:
        arguments = parse(argv)
        _check_place()
        check_outputs(arguments)
        configure_files()
        with _redirected_stdout() as answer:
            return arguments.run(arguments, answer)
    except BrokenPipeError:
        # The reader closed the pipe early (`| head`). Without a new stdout, Python would report the error again at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (UserError, OSError, MemoryError) as error:
        if debug:
            traceback.print_exc()
        _say(_sentence(error))
        return 3 if isinstance(error, FormError) else 2
    except KeyboardInterrupt:
        _say("interrupted")
        return exit_after_signal(130)
    except Terminated:
        _say("terminated")
        return exit_after_signal(143)


def _hold_descriptors() -> None:
    """Open `/dev/null` for each of stdin, stdout and stderr that is closed.

    Otherwise the next file to be opened would get that number, and libraries and children would print into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the system assigns the smallest free number


def _check_place() -> None:
    """Raise `UserError` if stdout is closed or the working directory is gone, since no command can work then."""
    if sys.stdout is None:
        raise UserError("stdout is closed, so that the answer could go nowhere; send it to a file or to /dev/null.")
    try:
        os.getcwd()
    except OSError:
        raise UserError("the working directory does not exist any more; change to one that does.") from None


def _sentence(error: BaseException) -> str:
    """Return an error's message as one printable line, for `OSError` with the file and for `MemoryError` a remedy."""
    if isinstance(error, MemoryError):
        return f"there is not enough memory ({str(error) or 'the system gives no more'}); give the process more."
    if isinstance(error, OSError) and not isinstance(error, UserError):
        about = f"{error.filename}: " if error.filename else "a file or the answer cannot be written: "
        return f"{about}{error.strerror or error}."
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in str(error))


def _say(line: str) -> None:
    """Print a line to stderr; ignore a stderr that is missing or fails."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"autoshard: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _redirected_stdout() -> Iterator[TextIO]:
    """Send the stdout of libraries and of the user's file to stderr; yield a stream on the true stdout.

    Raises `UserError` if the answer cannot be written, and `BrokenPipeError` if its reader is gone.
    """
    answer = sys.stdout
    answer.flush()
    try:
        descriptor = answer.fileno()
    except OSError:  # a stream in memory, as under pytest
        with contextlib.redirect_stdout(sys.stderr):
            yield answer
        return
    saved = os.dup(descriptor)
    os.dup2(2 if sys.stderr is None else sys.stderr.fileno(), descriptor)
    try:
        with contextlib.redirect_stdout(sys.stderr), _open_answer(saved, answer) as stream:
            yield stream
            try:
                stream.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                raise UserError(f"the answer cannot be written to stdout: {error.strerror}.") from None
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)


def _open_answer(descriptor: int, like: TextIO) -> TextIO:
    # A character that the terminal's encoding lacks is printed as `?`, without a traceback.
    """Open a text stream on a file descriptor with the encoding of another stream."""
    return open(descriptor, "w", encoding=like.encoding, errors="replace", closefd=False)
