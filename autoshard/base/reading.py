"""Reading what others wrote, within bounds: how large a file is, how far it unpacks, and how deep its JSON is nested
and how much memory it takes."""

import errno
import io
import json
import os
import stat
from collections.abc import Callable
from typing import Any

from autoshard.base.json_text import parse_pieces


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
