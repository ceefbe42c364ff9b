"""The dims of a decoder from the fields of its configuration: enough to count with, where nothing need be traced."""

from collections.abc import Mapping
from typing import Any

from autoshard.program._decoder_dims import DecoderDims
from autoshard.program._latent import LatentDims


_DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma2")
_QK_NORM = ("qwen3",)


def config_dims(fields: Mapping[str, Any]) -> DecoderDims | None:
    """The dims that a configuration's fields say; None for a model that is no decoder whose form is known here.

    Learned positions, biases and norms of GPT-2 are not among them: less than 1 % of its parameters from the size of
    `gpt2-xl` on, 0.8 % of `gpt2`.
    """
    kind = fields.get("model_type")
    try:
        if kind == "gpt2":
            return _gpt2(fields)
        if kind in _DENSE:
            return DecoderDims(**_sizes(fields), **_window(fields), qk_norm=kind in _QK_NORM)
        if kind == "mixtral":
            experts = {"experts": fields["num_local_experts"], "active_experts": fields["num_experts_per_tok"]}
            return DecoderDims(**_sizes(fields), **experts)
        if kind == "deepseek_v3":
            return _latent_experts(fields)
    except (KeyError, TypeError, ZeroDivisionError):
        return None  # what is left out has a default that transformers knows
    return None


def _sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
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
    """Gemma 2 has a window in every other layer; of others a window of all layers is not counted."""
    if fields["model_type"] == "gemma2" and fields.get("sliding_window"):
        return {"window": fields["sliding_window"], "global_every": 2}
    return {}


def _gpt2(fields: Mapping[str, Any]) -> DecoderDims:
    width, heads = fields["n_embd"], fields["n_head"]
    return DecoderDims(
        layers=fields["n_layer"],
        width=width,
        mlp_width=fields.get("n_inner") or 4 * width,
        heads=heads,
        kv_heads=heads,
        head_size=width // heads,
        vocabulary=fields["vocab_size"],
        gated=False,
        tied=True,
    )


def _latent_experts(fields: Mapping[str, Any]) -> DecoderDims:
    latent = LatentDims(
        key_rank=fields["kv_lora_rank"],
        plain=fields["qk_nope_head_dim"],
        turned=fields["qk_rope_head_dim"],
        value=fields["v_head_dim"],
        query_rank=fields.get("q_lora_rank") or 0,
    )
    return DecoderDims(
        **_sizes(fields) | {"head_size": latent.head_size, "kv_heads": fields["num_attention_heads"]},
        experts=fields["n_routed_experts"],
        active_experts=fields["num_experts_per_tok"],
        expert_width=fields["moe_intermediate_size"],
        shared_experts=fields["n_shared_experts"],
        dense_layers=fields["first_k_dense_replace"],
        latent=latent,
    )
