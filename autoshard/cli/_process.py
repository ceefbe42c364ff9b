"""What only a process that runs one command and then ends may do to be fast."""

import atexit
import gc
import os
import signal
import threading
import time

from autoshard.base.crew import Crew, helpers_here
from autoshard.base.process import check_addresses, collect_seldom, scratch_folders, temporary_folder
from autoshard.errors import Terminated


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
    return Crew(helpers_here(), "autoshard.plan._warm:ready") if _own else Crew()
