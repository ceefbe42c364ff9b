"""Writing files whole or not at all, for every room."""

import os
import tempfile
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write beside `path`, flush to the disk, then rename over it, so that nobody ever sees half a file.

    The new file gets the permissions of any file the user creates. Raises `OSError` and leaves nothing behind if it
    cannot be written.
    """
    target = Path(path)
    handle, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.absolute().parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(beside, 0o666 & ~mask)
        os.replace(beside, target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
