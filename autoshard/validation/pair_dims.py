"""Construction of the decoder that a measured group and its rows state by dims."""

import re
from collections.abc import Mapping
from typing import Any

from autoshard.program import LatentDims
from autoshard.serving import Decoder
from autoshard.validation.published_runs import FUSED_QKV, LOCAL_WINDOWS, IncompleteError


_FAMILIES = ("llama", "mistral", "mixtral", "qwen", "gemma", "deepseek", "hunyuan", "gpt3", "fuji", "palm", "grug")
"""Beginnings of the names of model families that can be rebuilt."""
DIMS = {
    "layers": "layers",
    "emb": "width",
    "mlp": "mlp_width",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "head_dim": "head_size",
    "vocab": "vocabulary",
}
"""Keys of a model's dims -> arguments of `Decoder`."""
_LATENT = {
    "key_rank": ("kv_lora_rank", "kv_lora"),
    "nope_size": ("qk_nope", "nope"),
    "rope_size": ("qk_rope", "rope"),
    "value": ("v_head", "v"),
    "query_rank": ("q_lora_rank", "q_lora"),
}
"""Sizes of latent attention -> a row's key for the size, and the word before the size in a row's `attention`."""


def stated_decoder(model: Any, said: Mapping[str, Any]) -> Decoder:
    """Return the decoder of a group's model, with the dims that a row (`said`) changes.

    Defaults: a head's size is `emb` over `heads`, an MLP is as wide as an expert, the family is llama. Families with
    local attention have their windows; Gemma ties embedding and head. Raises `IncompleteError` for a model that is not
    stated in full, or of an unknown family.
    """
    if not isinstance(model, dict):
        raise IncompleteError("the model's dims are not stated")
    dims: dict[str, Any] = {**model, **{key: said[key] for key in DIMS if key in said}}
    family = str(dims.get("family", "llama")).lower()
    if not family.startswith(_FAMILIES):
        raise IncompleteError(f"the model family {dims['family']!r} is not known ({', '.join(_FAMILIES)} are)")
    if dims.get("parallel_block"):
        raise IncompleteError("attention and MLP side by side are not rebuilt")
    sizes: dict[str, Any] = {}
    latent = _latent(dims)
    if latent is not None:
        others: dict[str, Any] = {"kv_heads": dims.get("heads"), "head_dim": latent.head_size}
        dims = others | dims
    for key, name in DIMS.items():
        value = dims.get(key)
        if key == "mlp" and value is None:
            value = dims.get("moe_mlp")  # all layers are mixtures of experts
        if key == "head_dim" and value is None and {"emb", "heads"} <= dims.keys():
            value = dims["emb"] // dims["heads"]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise IncompleteError(f"the model's {key} is not stated ({value})")
        sizes[name] = value
    # A row that widens the model presumably widens its MLP too.
    if "emb" in said and "emb" in model and said["emb"] > model["emb"] and "mlp" not in said:
        raise IncompleteError(f"the MLP's width at emb {said['emb']} is not stated")
    name = next((each for each in LOCAL_WINDOWS if family.startswith(each)), None)
    window, every = LOCAL_WINDOWS[name] if name else (None, 1)
    if window is None and dims.get("sliding_window"):
        window, every = _sliding(dims["sliding_window"])
    if "pair" in str(model.get("note", "")) or model.get("layers_a_block") == 2:
        sizes["layers"] *= 2  # the source counts a local and a global layer as one
    if sizes["layers"] % every:
        raise IncompleteError(f"{sizes['layers']} layers are not whole groups of {every}")
    tied = bool(dims.get("tied_head", family.startswith("gemma")))
    gated = dims.get("gated", True)
    if not isinstance(gated, bool):
        raise IncompleteError(f"gated is {gated!r}, neither true nor false")
    return Decoder(
        **sizes, **_experts(dims), gated=gated, tied=tied, window=window, global_every=every, latent=latent,
        fused_qkv=family.startswith(FUSED_QKV),
    )  # fmt: skip


def _sliding(text: Any) -> tuple[int, int]:
    """Return the window of local layers, and the layers of a group that ends with a global one, of `2048 on 18 of 24`.

    Raises `IncompleteError` for other texts, and if the layers are no whole groups.
    """
    stated = re.fullmatch(r"(\d+) on (\d+) of (\d+)", str(text).strip())
    window, local, layers = map(int, stated.groups()) if stated else (0, 0, 0)
    if layers <= local or layers % (layers - local):
        raise IncompleteError(f"sliding_window={text} is not rebuilt")
    return window, layers // (layers - local)


def _shared_count(dims: Mapping[str, Any]) -> int:
    """Return the number of shared experts of an expert's width; `1 x 2048` are two experts of 1024."""
    stated = re.fullmatch(r"(\d+) ?x ?(\d+)", str(dims.get("shared_experts") or "").strip())
    width = whole_number(dims, "moe_mlp" if dims.get("moe_mlp") else "mlp")
    if stated and int(stated[1]) * int(stated[2]) % width == 0:
        return int(stated[1]) * int(stated[2]) // width
    return whole_number(dims, "shared_experts") if dims.get("shared_experts") else 0


def _experts(dims: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dims of a mixture of experts as arguments of `Decoder`; empty for a dense model.

    Experts are as wide as `moe_mlp`, else as `mlp`. Raises `IncompleteError` without the experts of a token (`top_k`).
    """
    if whole_number(dims, "experts", 1) == 1:
        return {}
    if not dims.get("top_k"):
        raise IncompleteError("the number of experts for each token is not stated")
    dense = "first_dense_layers"
    return {
        "experts": whole_number(dims, "experts"),
        "active_experts": whole_number(dims, "top_k"),
        "expert_width": whole_number(dims, "moe_mlp" if dims.get("moe_mlp") else "mlp"),
        "shared_experts": _shared_count(dims),
        "dense_layers": whole_number(dims, dense) if dims.get(dense) else 0,
        "qk_norm": bool(dims.get("qk_norm")),
    }


def _latent(dims: Mapping[str, Any]) -> LatentDims | None:
    """Return the sizes of latent attention, from keys of their own or from the text of `attention`.

    None if that text does not contain `MLA`. Raises `IncompleteError` for a missing size; only the rank of queries may
    be absent.
    """
    text = str(dims.get("attention", ""))
    if "MLA" not in text:
        return None
    sizes: dict[str, int] = {}
    for name, (key, word) in _LATENT.items():
        listed = re.search(rf"\b{word} (\d+)", text)
        if dims.get(key) or listed:
            sizes[name] = whole_number(dims, key) if dims.get(key) else int(listed[1])  # type: ignore[index]
        elif name != "query_rank":
            raise IncompleteError(f"the {key} of latent attention is not stated")
    return LatentDims(**sizes)


def whole_number(said: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a stated whole number above 0, also if it is stated as text; `default` if `said` lacks the key.

    Raises `IncompleteError` for any other value, and without the key and a default.
    """
    value = said.get(key, default)
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise IncompleteError(f"{key} is not stated ({value})" if key not in said else f"{key} is {value!r}")
    return value
