"""The process of one command, and its tasks on a Ray cluster."""

import argparse
import atexit
import contextlib
import gc
import os
import re
import signal
import threading
import time
from typing import TYPE_CHECKING

from autoshard.base.processes import check_addresses, collect_seldom, scratch_folders, temporary_folder
from autoshard.base.workers import Crew, helpers_here
from autoshard.errors import Terminated


if TYPE_CHECKING:
    from autoshard.base.ray_pool import RayPool
    from autoshard.report import ProgressLine


WORKER = "autoshard.cli.session:settle_worker"
"""What every process that plans for a command calls first."""


def add_on(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--on",
        type=ray_address,
        metavar="RAY",
        help=f"{what} as tasks of a Ray cluster: ray (the one that is here, else one of this machine alone), "
        "HOST:PORT, or ray://HOST:PORT from elsewhere",
    )


def ray_address(text: str) -> str:
    if text != "ray" and not re.fullmatch(r"(ray://)?([^\s/:]+|\[[^\s/]+\]):\d{1,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not ray, HOST:PORT or ray://HOST:PORT")
    return text


def ray_of(arguments: argparse.Namespace) -> "contextlib.AbstractContextManager[RayPool | None]":
    """What `--on` names, to which a connection has begun; None without the flag. Raises `UserError` without Ray."""
    if arguments.on is None:
        return contextlib.nullcontext()
    from autoshard.base.ray_pool import RayPool

    return RayPool(arguments.on, getattr(arguments, "jobs", None), WORKER)


def connect(pool: "RayPool | None", progress: "ProgressLine") -> None:
    """Wait for the connection, before anything is done in vain. Raises `UserError` if it cannot be had."""
    if pool is not None:
        progress("Connecting to Ray")
        pool.connect()


GRACE_S = 1.2
"""Seconds that a command which is interrupted or terminated gets to clear up after itself."""
_own = False


def settle() -> None:
    """Say that this process is the command's own: collect garbage seldom, and none at the end."""
    global _own
    _own = True
    collect_seldom()
    atexit.register(gc.freeze)  # registered first, so it runs last


def obey_signals() -> None:
    """End soon after SIGINT or SIGTERM: by an exception that clears up, and if that cannot be raised, because libraries
    are at work that do not return for minutes, all the same. Children end with their stdin."""
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, _terminate)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_end_in_time, args=(reading,), daemon=True).start()


def _terminate(*_: object) -> None:
    raise Terminated


def _end_in_time(signals: int) -> None:
    """Python writes the number of a signal here at once, long before the main thread sees to it."""
    while (number := os.read(signals, 1)[0]) not in (signal.SIGINT, signal.SIGTERM):
        continue
    if signal.getsignal(number) not in (signal.default_int_handler, _terminate):
        return  # the command itself sees to it, as `solve` does
    time.sleep(GRACE_S)
    import shutil

    for folder in tuple(scratch_folders):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


def settle_files() -> None:
    """Let libraries make their temporary files where they go with this process, also if it cannot run to its end.

    Apart from `settle`, since `tempfile` takes long to import.
    """
    if _own and (folder := temporary_folder()) is not None:
        import tempfile

        tempfile.tempdir = str(folder)


def settle_imports() -> None:
    """Import no more than the command needs, in a process of its own. Apart, since it is slow itself."""
    if _own:
        from autoshard.program import import_lean

        import_lean()


def settle_worker() -> None:
    """Both, for a process that a command starts."""
    settle()
    settle_imports()


def start_helpers() -> Crew:
    """A helper process for each further core, which imports what it needs while this one still traces.

    Raises `UserError` where there is not enough memory for it all.
    """
    check_addresses()
    return Crew(helpers_here(), "autoshard.planning.warm_planner:ready") if _own else Crew()
