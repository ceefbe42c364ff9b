"""Finding a model configuration: a file of the user's, or one of the bundled ones."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.base.reading import read_json
from autoshard.errors import UserError


_FOLDER = Path(__file__).parent / "configs"


_COUNTS = (
    *("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "n_embd", "n_positions", "d_model"),
    *("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "d_ff", "d_kv", "image_size", "patch_size"),
    *("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "head_dim"),
)
"""Fields that count something of which there is at least one, in each layer or in the model."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
_MOST, _MOST_LAYERS = 2**31 - 1, 10_000
"""Frameworks number in 32 bits; each layer is built as modules of its own (assumed: no model has as many)."""


def bundled() -> list[str]:
    """Names of the bundled configurations."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def read_config(given: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(short name, fields) of a configuration: fields as they are, or what is named: a file, a directory with one, or a
    bundled configuration.

    Raises `UserError` if there is none, or if it is not a model configuration.
    """
    if not isinstance(given, str):
        fields = dict(given)
        _check_fields(fields, "the configuration")
        return str(fields["model_type"]), fields
    text = given
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
        fields = read_json(path)
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"`{path}` is not a readable JSON file: {reason}.") from None
    _check_fields(fields, str(path))
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    return name, fields


def _check_fields(fields: Any, origin: str) -> None:
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise UserError(f"`{origin}` has no `model_type`; expected the config.json of a Hugging Face model.")
    _check_counts(fields, origin)


def _check_counts(fields: dict[str, Any], origin: str) -> None:
    """Refuse sizes that no model has before one is built with them; what is missing has a default."""
    for key, value in fields.items():
        if isinstance(value, dict):
            _check_counts(value, f"{origin}, {key}")
        most = _MOST if key in _COUNTS else _MOST_LAYERS if key in _LAYERS else None
        if most is None or value is None or isinstance(value, dict):
            continue
        if key == "head_dim" and value == 0 and fields.get("qk_rope_head_dim") == 0:
            continue  # the part of a head that positions turn, of which there is none
        for each in value if isinstance(value, list) and key not in _LAYERS else [value]:
            number = each if isinstance(each, (int, float)) else 0  # some classes save floats that are whole
            if isinstance(each, bool) or number % 1 or not 1 <= number <= most:
                raise UserError(f"`{origin}`: {key} is {str(value)[:60]!r}, expected a whole number from 1 to {most}.")
