"""Writing a report: whole, or not at all."""

from pathlib import Path

from autoshard.base.files import write_whole
from autoshard.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Write a report as UTF-8, whole or not at all. Raises `UserError` if it cannot be written."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error
