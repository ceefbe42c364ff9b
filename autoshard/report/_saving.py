"""Plots written as pictures."""

import io
import os
from pathlib import Path
from typing import Any

from autoshard.base.files import write_whole
from autoshard.errors import UserError


def save_picture(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a matplotlib figure, its kind by the suffix. Raises `UserError` for a suffix that matplotlib has not,
    and if it cannot be written."""
    kind = Path(path).suffix.lstrip(".").lower()
    kinds = sorted(figure.canvas.get_supported_filetypes())
    if kind not in kinds:
        raise UserError(f"--plot {path}: a picture ends in one of {', '.join('.' + each for each in kinds)}.")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=150)
    try:
        write_whole(path, picture.getvalue())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error
