"""Plots written as pictures."""

import os
from pathlib import Path
from typing import Any

from autoshard.errors import UserError


def save_picture(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a matplotlib figure, its kind by the suffix. Raises `UserError` for a suffix that matplotlib has not."""
    kind = Path(path).suffix.lstrip(".").lower()
    kinds = sorted(figure.canvas.get_supported_filetypes())
    if kind not in kinds:
        raise UserError(f"--plot {path}: a picture ends in one of {', '.join('.' + each for each in kinds)}.")
    figure.savefig(path, dpi=150)
