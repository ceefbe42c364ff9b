"""Start, supervision and tuning of Python child processes, and temporary folders that signals do not leave behind."""

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
    """Exit this process with code 0 as soon as its stdin is closed, as the process that started it is then gone."""
    when_stdin_ends(lambda: os._exit(0))


def when_stdin_ends(call: Callable[[], None]) -> None:
    """Start a thread that calls `call` when the other end of this process's stdin is closed.

    The thread notices the end even while this process imports or works, and before unread messages are read. A thread
    that reads messages would notice the end only after them. No thread starts if stdin is no pipe or the system has no
    `poll`.
    """
    if not hasattr(select, "poll") or not stat.S_ISFIFO(os.fstat(0).st_mode):
        return

    def watch() -> None:
        """Wait for the end of stdin."""
        closed = select.poll()
        closed.register(0, 0)  # no events are requested: poll then reports only the end
        closed.poll()
        call()

    threading.Thread(target=watch, daemon=True).start()


_PACKAGES = str(pathlib.Path(__file__).parents[2])
"""Directory that contains this package."""

# The child imports this very package even if another version is installed. It imports all other modules from Python's
# own path: the package's directory moves to the end of the path, since it may be a checkout.
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
    """Return the command line of a Python process that calls the module's `main` with the arguments.

    `-P` prevents imports from the working directory, where a file may have the name of a standard module (`json.py`).

    - `watched`: the process exits when its stdin ends; False for a module that handles this end on its own.
    """
    # With `-m`, pickles of the module's classes would name `__main__`, and this process could not read them.
    watch = "end_with_stdin()" if watched else ""
    return [sys.executable, "-P", "-c", _START.format(packages=_PACKAGES, module=module, watch=watch), *arguments]


def run_script(script: str, seconds: float) -> tuple[str, str, int] | None:
    """Run the text of a script in a Python process; return its stdout, stderr and exit code.

    A process that runs longer than `seconds` is killed, and the result is None. The process has no stdin and imports
    nothing from the working directory.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", script],
            capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    return done.stdout, done.stderr, done.returncode


_SELDOM = (100_000, 50, 100)
"""Garbage collector thresholds: new objects per collection, and collections per collection of each older generation."""


def collect_seldom() -> None:
    """Set the garbage collector to run seldom, for a process of ours whose modules and op graphs live until its end.

    Frequent collections free nothing there, and used a quarter of the CPU time of planning a model.
    """
    gc.set_threshold(*_SELDOM)


@contextlib.contextmanager
def collecting_seldom() -> Iterator[None]:
    """Run the garbage collector seldom within the `with` block, and restore the thresholds afterwards.

    Higher thresholds stay, and a collector that is disabled stays disabled.
    """
    before = gc.get_threshold()
    if before[0]:  # the collector is enabled
        gc.set_threshold(*map(max, before, _SELDOM))
    try:
        yield
    finally:
        gc.set_threshold(*before)


LEAST_ADDRESSES = 5 << 30
"""Bytes of address space that XLA needs on two cores. With 4 GiB it aborts the process while it starts its threads."""


def check_addresses() -> None:
    """Raise `UserError` if `ulimit -v` is below `LEAST_ADDRESSES`: XLA would abort without a message."""
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
"""Temporary folders that exist now; they are deleted at the end of their block, or when a signal ends the command."""


@contextlib.contextmanager
def scratch_folder(what: str) -> Iterator[pathlib.Path]:
    """Create a private temporary folder, `autoshard-WHAT-...`; delete it after the `with` block or a fatal signal.

    A signal during the creation leaves no folder either, because the name is recorded first. `tempfile` creates the
    folder before it registers the cleanup.
    """
    import shutil  # imported here, since every command imports this module first

    folder = _temporary_root() / f"autoshard-{what}-{os.urandom(8).hex()}"
    try:
        scratch_folders.add(folder)
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except BaseException:  # a signal during the deletion
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            scratch_folders.discard(folder)


def _temporary_root() -> pathlib.Path:
    """Return the first writable folder of `tempfile.tempdir`, `TMPDIR`, `TEMP`, `TMP` and `/tmp`, else the system's.

    `tempfile` writes a test file there to find a writable folder, and a signal at that moment would leave the file
    behind.
    """
    current = getattr(sys.modules.get("tempfile"), "tempdir", None)  # cached by `tempfile`, or set by the program
    for folder in filter(None, (current, *map(os.environ.get, ("TMPDIR", "TEMP", "TMP")), "/tmp")):
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return pathlib.Path(os.path.abspath(folder))
    import tempfile

    return pathlib.Path(tempfile.gettempdir())


@functools.cache
def temporary_folder() -> pathlib.Path | None:
    """Return a folder for temporary files that libraries leave, the same in each call; None if it cannot be created.

    The folder is deleted when this process ends, also if a signal ends it.
    """
    import atexit

    stack, owner = contextlib.ExitStack(), os.getpid()
    # A forked child must not delete the folder when it exits.
    atexit.register(lambda: stack.close() if os.getpid() == owner else None)
    try:
        return stack.enter_context(scratch_folder("temporary"))
    except OSError:
        return None


_living: dict[int, float] = {}
"""Process id of each running child -> processor seconds that it has reported."""


def processor_seconds() -> float:
    """Return the processor seconds of this process, its ended children, and running children that report theirs.

    This clock does not advance while the machine is suspended or works for others.
    """
    times = os.times()
    living_s = sum(list(_living.values()))
    return time.process_time() + times.children_user + times.children_system + living_s


def count_living(child: int, seconds: float) -> None:
    """Add a running child's processor seconds to `processor_seconds`; `seconds` is its total so far."""
    _living[child] = seconds


def count_ended(child: int) -> None:
    """Remove the report of a child that has been waited for, since the system now counts its time."""
    _living.pop(child, None)


def cores() -> int:
    """Return the number of processor cores that this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
