"""Atomic writes and size-bounded reads of files, for every room."""

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
"""Mode of a file that only its owner may read and write."""
TEMPORARY_PREFIX = ".autoshard-"
"""Prefix of temporary files that are being written. A process that is killed leaves them behind."""
_DESCRIPTORS = ("/dev/fd/", "/dev/std", "/proc/")
"""Prefixes of paths that stand for a file which is already open."""


def write_whole(path: str | os.PathLike[str], content: bytes, mode: int = 0o666) -> None:
    """Write a temporary file next to `path` and rename it over `path`, so that no reader sees half a file.

    A replaced file keeps its mode, and its owner if the system permits. A new file gets `mode` less the bits of the
    user's umask. A link is followed: the file that it names is replaced. A device or a pipe is written into, never
    replaced. Raises `OSError` and leaves nothing behind if the file cannot be written, or if a pipe has no reader.
    """
    before = _status(path)
    if before is not None and (not stat.S_ISREG(before.st_mode) or _is_open_already(path)):
        _write_into(path, content)
        return
    _put(Path(os.path.realpath(path)), content, mode, before)


def write_own(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file of autoshard's own with mode `PRIVATE`, replacing any file or link of that name.

    The link is not followed, since another user may have put it into a directory that others may write to. Raises
    `OSError` and leaves nothing behind if the file cannot be written.
    """
    _put(Path(path), content, PRIVATE, None)


def _put(target: Path, content: bytes, mode: int, before: os.stat_result | None) -> None:
    """Write a temporary file next to `target`, flush it to the disk and rename it over `target`.

    The file gets the mode and owner of `before`, or `mode` less the umask if that is None. After any error the
    temporary file is deleted and the error raised.
    """
    # The mode is set by the creation itself: reading the umask would require setting it, which affects all threads.
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{os.urandom(6).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(temporary, flags, mode if before is None else PRIVATE)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            if before is not None:
                _make_like(file.fileno(), before)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def is_ours(status: os.stat_result) -> bool:
    """Return True if a file belongs to the user or to root; always True on Windows.

    The content of another user's file cannot be trusted.
    """
    return not hasattr(os, "geteuid") or status.st_uid in (0, os.geteuid())


def is_replaced(path: str | os.PathLike[str]) -> bool:
    """Return True if `write_whole` replaces the file, and does not write into a device, a pipe or an open file."""
    status = _status(path)
    return status is None or (stat.S_ISREG(status.st_mode) and not _is_open_already(path))


def _status(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Return the status of the file that a path names, links followed; None if it does not exist."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _is_open_already(path: str | os.PathLike[str]) -> bool:
    """Return True if the path begins with one of `_DESCRIPTORS`, so that it stands for an open file of a process."""
    return os.path.abspath(path).startswith(_DESCRIPTORS)


def _write_into(path: str | os.PathLike[str], content: bytes) -> None:
    # O_NONBLOCK makes the system refuse a pipe without a reader; a blocking open would wait for ever.
    """Write into an existing device, pipe or open file; raise `OSError` for a pipe without a reader."""
    handle = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    os.set_blocking(handle, True)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _make_like(handle: int, before: os.stat_result) -> None:
    """Set the owner of an open file to that of `before`, if permitted, then its mode; change nothing on Windows."""
    if not hasattr(os, "fchmod"):
        return  # Windows, whose modes carry almost no permissions
    own = os.fstat(handle)
    if (own.st_uid, own.st_gid) != (before.st_uid, before.st_gid):
        with contextlib.suppress(PermissionError):
            os.fchown(handle, before.st_uid, before.st_gid)
    os.fchmod(handle, stat.S_IMODE(before.st_mode))


MOST_BYTES = 1 << 28
"""Most bytes of a file that people or autoshard write: plans, settings, rows of tables."""
MOST_DATA_BYTES = 1 << 29
"""Most bytes of a problem or a profile, both packed and unpacked."""
_MOST_TIMES = 8
"""Most bytes of memory that parsed JSON may occupy for each byte that its file may have."""
_OBJECT_BYTES = {"[": 100, "{": 200, ",": 45, '"': 15}
"""Estimated bytes of memory for each such character: a list, an object, a number or reference, half a string."""


def read_bytes(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """Return the content of a file, unpacked if it is gzipped.

    Raises `OSError` if the file cannot be read, is a directory, or has more than `most` bytes, packed or unpacked.
    Raises `ValueError` for a gzip file that is cut off or damaged. A pipe without a writer is empty.
    """
    # A blocking open of a pipe would wait for ever for a writer.
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
    """Read a file to its end and return its bytes; raise `OSError` (EFBIG) once it has more than `most` bytes."""
    parts, left = [], most
    while part := file.read(min(left + 1, 1 << 20)):
        left -= len(part)
        if left < 0:
            reason = f"it has more than the {most >> 20} MiB that are read of such a file"
            raise OSError(errno.EFBIG, reason, os.fspath(path))
        parts.append(part)
    return b"".join(parts)


def parse_json(text: str | bytes, most: int = MOST_BYTES, loads: Callable[[str], Any] = json.loads) -> Any:
    """Parse JSON text with `loads`; `most` is the largest size in bytes that its file may have.

    Raises `ValueError`, with a message of one line, if the text is not JSON or is nested too deeply. It is also raised
    if the values would occupy more than `_MOST_TIMES * most` bytes of memory, or if a number has thousands of digits.
    """
    room = _MOST_TIMES * most
    estimate = len(text)
    for mark, size in _OBJECT_BYTES.items():
        estimate += size * (text.count(mark) if isinstance(text, str) else text.count(mark.encode()))
    if estimate > room:
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
    """Return the parsed JSON of a file. Raises `OSError` and `ValueError` as `read_bytes` and `parse_json` do."""
    return parse_json(read_bytes(path, most), most)


def is_shallow(value: Any, most: int) -> bool:
    """Return True if objects and lists of parsed JSON are nested at most `most` deep; a scalar has depth 0."""
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
