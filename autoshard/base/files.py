"""Reading and writing files, for every room: written whole or not at all, and read within bounds."""

import contextlib
import os
import stat
from pathlib import Path


PRIVATE = 0o600
"""The mode of a file that is its user's alone."""
BESIDE = ".autoshard-"
"""How files are called while they are written; a process that is killed leaves them."""
_DESCRIPTORS = ("/dev/fd/", "/dev/std", "/proc/")
"""Paths that stand for a file which is open already."""


def write_whole(path: str | os.PathLike[str], content: bytes, mode: int = 0o666) -> None:
    """Write beside `path`, flush to the disk, then rename over it, so that nobody ever sees half a file.

    A file that is replaced keeps its mode, and its owner where that may be given; a new one gets `mode` less what the
    user's mask takes away. Through a link the file that it names is written; a device or a pipe is written to, never
    replaced. Raises `OSError` and leaves nothing behind if it cannot be written.
    """
    before = _status(path)
    if before is not None and (not stat.S_ISREG(before.st_mode) or _is_open_already(path)):
        _write_into(path, content)
        return
    _put(Path(os.path.realpath(path)), content, mode, before)


def write_own(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file of this package's own, of mode `PRIVATE`, in place of whatever has its name, a link included.

    Others may have put it there, in a directory that they may write to. Raises `OSError` and leaves nothing behind if
    it cannot be written.
    """
    _put(Path(path), content, PRIVATE, None)


def _put(target: Path, content: bytes, mode: int, before: os.stat_result | None) -> None:
    """Write beside `target` and rename over it; the file is made like the one that was there `before`, if any."""
    # The mode is the creation's own, since to ask for the mask is to change it for all threads.
    beside = target.with_name(f"{BESIDE}{os.urandom(6).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(beside, flags, mode if before is None else PRIVATE)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            if before is not None:
                _make_like(file.fileno(), before)
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def is_ours(status: os.stat_result) -> bool:
    """Whether a file is the user's own, or the system's; what others put there may say what they like."""
    return not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())


def is_replaced(path: str | os.PathLike[str]) -> bool:
    """Whether `write_whole` makes or replaces a file there, rather than write into a device, a pipe or an open file."""
    status = _status(path)
    return status is None or (stat.S_ISREG(status.st_mode) and not _is_open_already(path))


def _status(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Of the file that a path names in the end; None if there is none."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _is_open_already(path: str | os.PathLike[str]) -> bool:
    return os.path.abspath(path).startswith(_DESCRIPTORS)


def _write_into(path: str | os.PathLike[str], content: bytes) -> None:
    # A pipe that nobody reads is refused by the system, where an ordinary opening would wait for ever.
    handle = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    os.set_blocking(handle, True)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _make_like(handle: int, before: os.stat_result) -> None:
    """Give an open file the owner of another, where that is allowed, then its mode."""
    if not hasattr(os, "fchmod"):
        return  # Windows, where modes say next to nothing
    own = os.fstat(handle)
    if (own.st_uid, own.st_gid) != (before.st_uid, before.st_gid):
        with contextlib.suppress(PermissionError):
            os.fchown(handle, before.st_uid, before.st_gid)
    os.fchmod(handle, stat.S_IMODE(before.st_mode))
