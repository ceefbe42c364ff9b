"""Files for every room: written whole or not at all, and read within bounds."""

import contextlib
import errno
import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoshard.base.json_text import parse_pieces


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


MOST_BYTES = 1 << 28
"""Most bytes of a file that people or this package write: plans, settings, rows of tables."""
MOST_DATA_BYTES = 1 << 29
"""Most bytes of a problem or a profile, packed and unpacked."""
_MOST_TIMES = 8
"""Bytes of memory that parsed JSON may take for each byte that its file may have."""
_OBJECT_BYTES = {"[": 100, "{": 200, ",": 45, '"': 15}
"""Memory that each of these characters stands for: a list, an object, a number or reference, half of a string."""


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """The content of a file, unpacked if it is gzipped.

    Raises `OSError` if it cannot be read, is a directory, or has more than `most` bytes; a pipe that nobody writes into
    is empty. Raises `ValueError` for a gzip file that is cut off or damaged.
    """
    # An ordinary opening waits for ever for somebody to write into a pipe.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(handle, True)
        raw = _bounded(file, path, most)
    if raw[:2] != b"\x1f\x8b":
        return raw
    import gzip
    import zlib

    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as packed:
            return _bounded(packed, path, most)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError("it is a gzip file that is cut off or damaged") from error


def _bounded(file: Any, path: str | os.PathLike[str], most: int) -> bytes:
    parts, left = [], most
    while part := file.read(min(left + 1, 1 << 20)):
        left -= len(part)
        if left < 0:
            reason = f"it has more than the {most >> 20} MiB that are read of such a file"
            raise OSError(errno.EFBIG, reason, os.fspath(path))
        parts.append(part)
    return b"".join(parts)


def parse_json(text: str | bytes, most: int = MOST_BYTES, loads: Callable[[str], Any] = json.loads) -> Any:
    """Return what JSON says, parsed by `loads`; `most` is the size that its file may have.

    Raises `ValueError`, in one line, for what is no JSON, or would take much more memory than its file may have bytes,
    or is nested too deeply, or has a number of more digits than can be meant.
    """
    room = _MOST_TIMES * most
    taken = len(text)
    for mark, size in _OBJECT_BYTES.items():
        taken += size * (text.count(mark) if isinstance(text, str) else text.count(mark.encode()))
    if taken > room:
        raise ValueError(f"it would take more than {room >> 30} GiB of memory")
    try:
        return parse_pieces(text if isinstance(text, str) else text.decode(json.detect_encoding(text)), loads)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8") from None
    except ValueError:
        raise ValueError("a number in it has thousands of digits") from None


def read_json(path: str | os.PathLike[str], most: int = MOST_BYTES) -> Any:
    """What a file of JSON says. Raises as `read_bytes` and `parse_json` do."""
    return parse_json(read_bytes(path, most), most)


def is_shallow(value: Any, most: int) -> bool:
    """Whether no more than `most` objects and lists of parsed JSON are in one another."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return True
    return not any(isinstance(each, (dict, list)) for each in level)
