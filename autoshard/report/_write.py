"""Writing a report: whole, or not at all."""

import os
import tempfile
from pathlib import Path

from autoshard.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Write beside `path`, then rename, so that nobody ever sees half a file. `UserError` if it cannot be written."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.absolute().parent, prefix=f".{path.name}.", delete=False
        ) as file:
            try:
                file.write(text)
            except BaseException:
                os.unlink(file.name)
                raise
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(file.name, 0o666 & ~umask)
        os.replace(file.name, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error
