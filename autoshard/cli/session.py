"""Settings of a command's process: signals, temporary files, imports, helper processes and the Ray cluster."""

import argparse
import atexit
import contextlib
import gc
import os
import re
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from autoshard.base.processes import check_addresses, collect_seldom, scratch_folders, temporary_folder
from autoshard.base.workers import WorkerCrew, helpers_here
from autoshard.errors import Terminated


if TYPE_CHECKING:
    from autoshard.base.ray_pool import RayPool
    from autoshard.report import ProgressLine


WORKER = "autoshard.cli.session:configure_worker"
"""Function that every process which plans for a command calls first."""


def add_on(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the flag `--on`, a Ray address, None by default; `what` is the verb of its help."""
    parser.add_argument(
        "--on",
        type=ray_address,
        metavar="RAY",
        help=f"{what} as tasks of a Ray cluster: ray (the one that is here, else one of this machine alone), "
        "HOST:PORT, or ray://HOST:PORT from elsewhere",
    )


def ray_address(text: str) -> str:
    """Check that a text is `ray`, `HOST:PORT` or `ray://HOST:PORT`, and return it; nothing is connected.

    Raises `argparse.ArgumentTypeError` for any other text.
    """
    if text != "ray" and not re.fullmatch(r"(ray://)?([^\s/:]+|\[[^\s/]+\]):\d{1,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not ray, HOST:PORT or ray://HOST:PORT")
    return text


def ray_of(arguments: argparse.Namespace) -> "contextlib.AbstractContextManager[RayPool | None]":
    """Return a context manager: the pool of the Ray cluster that `--on` names, or None without the flag.

    The pool begins to connect in the background, and runs at most `--jobs` tasks. Raises `UserError` if Ray is not
    installed.
    """
    if arguments.on is None:
        return contextlib.nullcontext()
    from autoshard.base.ray_pool import RayPool

    return RayPool(arguments.on, getattr(arguments, "jobs", None), WORKER)


def connect(pool: "RayPool | None", progress: "ProgressLine") -> None:
    """Wait for the pool's connection, if there is a pool, before any work is done in vain.

    Raises `UserError` if it fails.
    """
    if pool is not None:
        progress("Connecting to Ray")
        pool.connect()


GRACE_S = 1.2
"""Seconds that an interrupted or terminated command has for its cleanup."""
_own = False
"""True if this process runs one command and nothing else."""


def configure_process() -> None:
    """Mark this process as the command's own (`_own`): collect garbage seldom, and freeze all objects at exit."""
    global _own
    _own = True
    collect_seldom()
    atexit.register(gc.freeze)  # registered first, so it runs last


def obey_signals() -> None:
    """End the process soon after SIGINT or SIGTERM, by an exception that lets the command clean up.

    SIGTERM raises `Terminated`; the handler of SIGINT is not changed. If a library call does not return for minutes,
    the exception cannot be raised. A thread then exits the process after `GRACE_S`, unless the command has its own
    handler of that signal. Children end with their stdin. Outside the main thread nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, _terminate)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_end_in_time, args=(reading,), daemon=True).start()


def _terminate(*_: object) -> None:
    """Raise `Terminated`: the handler of SIGTERM."""
    raise Terminated


def _end_in_time(signals: int) -> None:
    """Exit the process `GRACE_S` after the first SIGINT or SIGTERM, with 128 and the signal's number as the code.

    If the command has its own handler of that signal, return instead; later signals are then not watched. Python
    writes a signal's number to the descriptor `signals` at once, long before the main thread handles the signal.
    """
    while (number := os.read(signals, 1)[0]) not in (signal.SIGINT, signal.SIGTERM):
        continue
    if signal.getsignal(number) not in (signal.default_int_handler, _terminate):
        return  # the command handles the signal, as `solve` does
    time.sleep(GRACE_S)
    _exit_at_once(128 + number)


def _exit_at_once(code: int) -> None:
    """Delete this process's temporary folders and exit, without Python's exit handlers."""
    import shutil

    for folder in tuple(scratch_folders):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def exit_after_signal(code: int) -> int:
    """Exit the command's own process once a signal has ended the command; elsewhere return the exit code.

    Flush stdout and delete the temporary folders first. Threads of XLA may still run a step, and crash the process
    while Python finalises.
    """
    if _own:
        if sys.stdout is not None:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
        _exit_at_once(code)
    return code


def configure_files() -> None:
    """Set the folder of libraries' temporary files to one that is deleted with this process, even if a signal ends it.

    Nothing is changed if the process is not the command's own, or if no temporary folder can be had. It is separate
    from `configure_process`, since `tempfile` takes long to import.
    """
    if _own and (folder := temporary_folder()) is not None:
        import tempfile

        tempfile.tempdir = str(folder)


def configure_imports() -> None:
    """Import only the modules that the command needs, if this process is its own. It is separate, since it is slow."""
    if _own:
        from autoshard.program import import_lean

        import_lean()


def configure_worker() -> None:
    """Apply `configure_process` and `configure_imports` to a process that a command starts."""
    configure_process()
    configure_imports()


def start_helpers() -> WorkerCrew:
    """Return a crew with one helper process for each further core, up to `MOST_HELPERS`, for a `with` block.

    The helpers start at once and import their modules while this process traces. A process that is not the command's
    own gets a crew without helpers.

    Raises `UserError` if the address space is limited too much for XLA.
    """
    check_addresses()
    return WorkerCrew(helpers_here(), "autoshard.planning.warm_planner:ready") if _own else WorkerCrew()
