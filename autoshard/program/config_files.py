"""Model configurations, bundled or in a user's file, and the dims of their decoders."""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from autoshard.base.files import read_json
from autoshard.errors import UserError
from autoshard.program.jax.decoder_dims import DecoderDims
from autoshard.program.jax.mla import LatentDims


_FOLDER = Path(__file__).parent / "configs"
"""Folder of the bundled configurations."""


_COUNTS = (
    *("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "n_embd", "n_positions", "d_model"),
    *("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "d_ff", "d_kv", "image_size", "patch_size"),
    *("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "head_dim"),
)
"""Fields that count something with at least one member, in each layer or in the model."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
"""Fields that count layers."""
_MOST, _MOST_LAYERS = 2**31 - 1, 10_000
"""Most of a count, since frameworks index with 32 bits; and most layers, each of which is built as modules."""


def bundled() -> list[str]:
    """Return the names of the bundled configurations, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def read_config(given: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return (short name, fields) of a configuration.

    `given` is the mapping of fields, or names a JSON file, a folder with a `config.json`, or a bundled configuration.
    It may also be a model of the hub (`OWNER/NAME`) whose `config.json` is in the local cache of huggingface_hub. The
    short name is the file's stem, for a `config.json` its folder's name. A model of the hub has its own, a mapping its
    `model_type`.
    Raises `UserError` if there is no such configuration, or if it is not that of a model.
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
    hub_name = ""
    if not path.is_file() and (hub_id := _HUB_ID.fullmatch(text)):
        path, hub_name = _cached_config(text), hub_id[2]
    elif not path.is_file():
        path = _FOLDER / f"{text}.json"
        if not path.is_file():
            near = difflib.get_close_matches(text, bundled(), 3, 0.5)
            hint = (
                f"did you mean {' or '.join(f'`{name}`' for name in near)}?"
                if near
                else f"bundled are {', '.join(bundled())}."
            )
            raise UserError(
                f"`hf:{text}` is neither a file nor a bundled configuration; {hint} Any model's own config.json works "
                "too: `hf:FOLDER/config.json`."
            )
    try:
        fields = read_json(path)
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"`{path}` is not a readable JSON file: {reason}.") from None
    _check_fields(fields, str(path))
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    return hub_name or name, fields


_HUB_ID = re.compile(r"([\w-][\w.-]*)/([\w-][\w.-]*(?<!\.json))")
"""Owner and name of a model of Hugging Face's hub."""


def _cached_config(model: str) -> Path:
    """Return the `config.json` of a model of the hub in the local cache, of its main branch if several are there.

    Raises `UserError` if it is not there, with the command that gets it.
    """
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    folder = cache / f"models--{model.replace('/', '--')}"
    main = folder / "refs" / "main"
    revisions = [main.read_text().strip()] if main.is_file() else []
    revisions += sorted(each.name for each in (folder / "snapshots").glob("*"))
    for revision in revisions:
        path = folder / "snapshots" / revision / "config.json"
        if path.is_file():
            return path
    raise UserError(
        f"`hf:{model}` is neither a file nor in the cache {cache}: get it once with `hf download {model} config.json`, "
        "or name the path of its config.json."
    )


def _check_fields(fields: Any, origin: str) -> None:
    """Raise `UserError` for fields that are no dict with a `model_type`, or have impossible sizes.

    `origin` names the configuration in errors.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise UserError(f"`{origin}` has no `model_type`; expected the config.json of a Hugging Face model.")
    _check_counts(fields, origin)


def _check_counts(fields: dict[str, Any], origin: str) -> None:
    """Raise `UserError` for sizes that no model has, before a model is built, in nested configurations too.

    Counts are whole numbers from 1 to `_MOST` or `_MOST_LAYERS`; missing fields and None have defaults.
    """
    for key, value in fields.items():
        if isinstance(value, dict):
            _check_counts(value, f"{origin}, {key}")
        most = _MOST if key in _COUNTS else _MOST_LAYERS if key in _LAYERS else None
        if most is None or value is None or isinstance(value, dict):
            continue
        if key == "head_dim" and value == 0 and fields.get("qk_rope_head_dim") == 0:
            continue  # no part of a head is rotated by positions
        for each in value if isinstance(value, list) and key not in _LAYERS else [value]:
            number = each if isinstance(each, (int, float)) else 0  # some classes save floats that are whole
            if isinstance(each, bool) or number % 1 or not 1 <= number <= most:
                raise UserError(f"`{origin}`: {key} is {str(value)[:60]!r}, expected a whole number from 1 to {most}.")


_DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")
"""Model types of dense decoders whose fields have the names in `_sizes`."""
_QK_NORM = ("qwen3",)
"""Model types that normalise queries and keys."""

Dims = TypeVar("Dims", bound=DecoderDims)


def config_dims(fields: Mapping[str, Any], record: type[Dims]) -> Dims | None:
    """Return the dims that a configuration's fields give; None for a model that is no decoder of a known form.

    A configuration that lacks a needed field gives None too. `record` is the class of the dims, `DecoderDims` or a
    class that extends it.

    The dims of GPT-2 omit learned positions, biases and norms. These are 0.8 % of the parameters of `gpt2`, and less
    than 1 % from `gpt2-xl` on.
    """
    kind = fields.get("model_type")
    try:
        if kind == "gpt2":
            return record(**_gpt2(fields))
        if kind in _DENSE:
            return record(**_sizes(fields), **_window(fields), qk_norm=kind in _QK_NORM)
        if kind == "mixtral":
            experts = {"experts": fields["num_local_experts"], "active_experts": fields["num_experts_per_tok"]}
            return record(**_sizes(fields), **experts)
        if kind == "qwen3_moe" and not fields.get("mlp_only_layers") and fields.get("decoder_sparse_step", 1) == 1:
            # transformers 5 saves the number of experts under another name than the hub's files have.
            count = fields["num_experts" if "num_experts" in fields else "num_local_experts"]
            experts = {"experts": count, "active_experts": fields["num_experts_per_tok"]}
            return record(**_sizes(fields), **experts, expert_width=fields["moe_intermediate_size"], qk_norm=True)
        if kind == "deepseek_v3":
            return record(**_latent_experts(fields))
    except (KeyError, TypeError, ZeroDivisionError):
        return None  # transformers has the default of a missing field
    return None


def _sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that most configurations give under the same names, as fields of `DecoderDims`.

    Raises `KeyError` for a missing field.
    """
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    return {
        "layers": fields["num_hidden_layers"],
        "width": width,
        "mlp_width": fields["intermediate_size"],
        "heads": heads,
        "kv_heads": fields.get("num_key_value_heads") or heads,
        "head_size": fields.get("head_dim") or width // heads,
        "vocabulary": fields["vocab_size"],
        "tied": bool(fields.get("tie_word_embeddings", fields["model_type"].startswith("gemma"))),
    }


def _window(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window fields of Gemma 2, which has a window in every other layer; nothing for other models.

    A window that all layers of another model have is not counted.
    """
    if fields["model_type"] == "gemma2" and fields.get("sliding_window"):
        return {"window": fields["sliding_window"], "global_every": 2}
    return {}


def _gpt2(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dims of a GPT-2 configuration, as fields of `DecoderDims`; raise `KeyError` for a missing field."""
    width, heads = fields["n_embd"], fields["n_head"]
    return {
        "layers": fields["n_layer"],
        "width": width,
        "mlp_width": fields.get("n_inner") or 4 * width,
        "heads": heads,
        "kv_heads": heads,
        "head_size": width // heads,
        "vocabulary": fields["vocab_size"],
        "gated": False,
        "tied": True,
    }


def _latent_experts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dims of a DeepSeek-V3 configuration, with latent attention and experts.

    They are fields of `DecoderDims`. Raises `KeyError` for a missing field.
    """
    latent = LatentDims(
        key_rank=fields["kv_lora_rank"],
        nope_size=fields["qk_nope_head_dim"],
        rope_size=fields["qk_rope_head_dim"],
        value=fields["v_head_dim"],
        query_rank=fields.get("q_lora_rank") or 0,
    )
    return _sizes(fields) | {
        "head_size": latent.head_size,
        "kv_heads": fields["num_attention_heads"],
        "experts": fields["n_routed_experts"],
        "active_experts": fields["num_experts_per_tok"],
        "expert_width": fields["moe_intermediate_size"],
        "shared_experts": fields["n_shared_experts"],
        "dense_layers": fields["first_k_dense_replace"],
        "latent": latent,
    }
