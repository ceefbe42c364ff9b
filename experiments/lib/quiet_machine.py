"""Prevention of other work on a machine while something is timed."""

import contextlib
import shlex
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def held(command: str | None) -> Iterator[None]:
    """Run a command during the body; the body starts once the command has copied a line."""
    if not command:
        yield
        return
    with subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # the command has ended and copies no line
                process.stdin.write("held\n")
                process.stdin.flush()
            if process.stdout.readline() != "held\n":
                raise SystemExit(f"--hold: {command!r} ended or did not copy its input to its output.")
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
