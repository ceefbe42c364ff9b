"""Finding a model configuration: a file of the user's, or one of the bundled ones."""

import difflib
import json
from pathlib import Path
from typing import Any

from autoshard.errors import UserError


_FOLDER = Path(__file__).parent / "configs"


def bundled() -> list[str]:
    """Names of the bundled configurations."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def read_config(text: str) -> tuple[str, dict[str, Any]]:
    """(short name, fields) of the configuration that `text` names: a file, a directory with one, or a bundled name.

    Raises `UserError` if there is none, or if it is not a model configuration.
    """
    if not text:
        raise UserError(f"`hf:` needs the path of a config.json or a bundled name: {', '.join(bundled())}.")
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        path = _FOLDER / f"{text}.json"
        if not path.is_file():
            near = difflib.get_close_matches(text, bundled(), 3, 0.5)
            hint = (
                f"did you mean {' or '.join(f'`{name}`' for name in near)}?"
                if near
                else f"bundled are {', '.join(bundled())}."
            )
            raise UserError(f"`hf:{text}` is neither a file nor a bundled configuration; {hint}")
    try:
        fields = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"`{path}` is not a readable JSON file: {error}.") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise UserError(f"`{path}` has no `model_type`; expected the config.json of a Hugging Face model.")
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    return name, fields
