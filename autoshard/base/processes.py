"""Python processes of our own, and what one that does its work and then ends may do to be fast."""

import contextlib
import functools
import gc
import os
import pathlib
import select
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from autoshard.errors import UserError


def end_with_stdin() -> None:
    """From now on this process ends when the other end of its stdin is closed: whoever started it is gone."""
    when_stdin_ends(lambda: os._exit(0))


def when_stdin_ends(call: Callable[[], None]) -> None:
    """From now on a thread makes this call when the other end of this process' stdin is closed.

    Also while it imports or works, and with unread messages; a thread that reads them would see the end only after.
    """
    if not hasattr(select, "poll") or not stat.S_ISFIFO(os.fstat(0).st_mode):
        return

    def watch() -> None:
        closed = select.poll()
        closed.register(0, 0)  # nothing but its end
        closed.poll()
        call()

    threading.Thread(target=watch, daemon=True).start()


_PACKAGES = str(pathlib.Path(__file__).parents[2])
"""The directory in which this package lies."""

# The child has this very package, whatever else is installed, and all other modules from where Python has them: its
# directory only has its turn after those, since it may be a checkout.
_START = """\
import sys
sys.path.insert(0, {packages!r})
from autoshard.base.processes import end_with_stdin
sys.path.append(sys.path.pop(0))
{watch}
from {module} import main
main(*sys.argv[1:])
"""


def python_command(module: str, *arguments: str, watched: bool = True) -> list[str]:
    """The command of a Python process that calls the module's `main` with these texts.

    Nothing is imported from the working directory (`-P`), where a file may be called `json.py` as well. It ends with
    its stdin, unless it sees to that itself (`watched`).
    """
    # Not `-m`: the records of the module would then belong to `__main__` and could not be read back here.
    watch = "end_with_stdin()" if watched else ""
    return [sys.executable, "-P", "-c", _START.format(packages=_PACKAGES, module=module, watch=watch), *arguments]


def told_by(script: str, seconds: float) -> tuple[str, str, int] | None:
    """What a script of ours prints, what it complains of, and its exit code; None if it takes longer.

    It imports nothing from the working directory.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", script],
            capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    return done.stdout, done.stderr, done.returncode


def start_python(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a Python process that calls the module's `main` with these texts, and takes and gives bytes.

    Its temporary files go to `temporary_folder`, since it is killed in the end and removes none.
    """
    folder = temporary_folder()
    environment = None if folder is None else {**os.environ, "TMPDIR": str(folder)}
    command = python_command(module, *arguments)
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


_SELDOM = (100_000, 50, 100)
"""How many new objects are looked through at once, and how many such looks lie between those at older ones."""


def collect_seldom() -> None:
    """Collect garbage seldom: for a process of our own whose imports and graphs of ops live until its end.

    Looking through them again and again finds nothing: that was a quarter of the CPU time of planning a model.
    """
    gc.set_threshold(*_SELDOM)


@contextlib.contextmanager
def collecting_seldom() -> Iterator[None]:
    """The same for a block in a process of somebody else's, which has its own way again afterwards."""
    before = gc.get_threshold()
    if before[0]:  # it collects at all
        gc.set_threshold(*map(max, before, _SELDOM))
    try:
        yield
    finally:
        gc.set_threshold(*before)


LEAST_ADDRESSES = 5 << 30
"""Bytes of addresses that XLA needs on two cores; with 4 GiB it aborts the process as it starts its threads."""


def check_addresses() -> None:
    """Refuse a limit (`ulimit -v`) below which XLA would end the process with no word of ours. Raises `UserError`."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESSES:
        raise UserError(
            f"there is not enough memory: this process is limited to {limit / 2**30:.3g} GiB of addresses, and XLA, "
            f"which reads the program, needs {LEAST_ADDRESSES >> 30}; raise the limit (`ulimit -v`)."
        )


scratch_folders: set[pathlib.Path] = set()
"""Folders that are taken away when the work in them is done, or given up."""


@contextlib.contextmanager
def scratch_folder(what: str) -> Iterator[pathlib.Path]:
    """A folder of the user alone for temporary files, gone after the `with` block, and when a signal ends the command.

    Also when that comes just as it is made: `tempfile` makes a folder first, and then sees to its end.
    """
    import shutil  # here, since every command starts with this module

    folder = _temporary_root() / f"autoshard-{what}-{os.urandom(8).hex()}"
    try:
        scratch_folders.add(folder)
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except BaseException:  # a signal, in the middle of it
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            scratch_folders.discard(folder)


def _temporary_root() -> pathlib.Path:
    """Return the folder for temporary files that the environment names, else the system's.

    `tempfile` writes a file there to see whether it can, and a signal in between would leave it.
    """
    known = getattr(sys.modules.get("tempfile"), "tempdir", None)  # found before, or set by the program
    for folder in filter(None, (known, *map(os.environ.get, ("TMPDIR", "TEMP", "TMP")), "/tmp")):
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return pathlib.Path(os.path.abspath(folder))
    import tempfile

    return pathlib.Path(tempfile.gettempdir())


@functools.cache
def temporary_folder() -> pathlib.Path | None:
    """Return a folder for temporary files that libraries leave, the same in each call; None where none can be made.

    It is removed when this process ends, also by a signal that ends a command.
    """
    import atexit

    stack, owner = contextlib.ExitStack(), os.getpid()
    # A process that forks off this one and ends is not to remove it.
    atexit.register(lambda: stack.close() if os.getpid() == owner else None)
    try:
        return stack.enter_context(scratch_folder("temporary"))
    except OSError:
        return None


_living: dict[int, float] = {}
"""Seconds of processor that children which go on have said to have taken, by their process id."""


def processor_seconds() -> float:
    """Seconds of processor that this process has taken, its children that have ended, and others as far as they said.

    A machine that stands still, or works for others, does not make it go on.
    """
    ended = os.times()
    said = sum(list(_living.values()))
    return time.process_time() + ended.children_user + ended.children_system + said


def count_living(child: int, seconds: float) -> None:
    """From now on `processor_seconds` counts these, all that the child with that process id has taken so far."""
    _living[child] = seconds


def count_ended(child: int) -> None:
    """That child has been waited for: the system counts it now."""
    _living.pop(child, None)


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
