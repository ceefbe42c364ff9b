"""What each dim of a decoder's weights is: names as checkpoints have them, `*` for the number of a layer."""

import enum
from collections.abc import Mapping
from typing import Any

from autoshard.program._decoder_dims import DecoderDims


class WeightDim(enum.Enum):
    """What a dim of a weight counts."""

    KV = "heads of keys and values"
    HEADS = "heads"
    INNER = "ffn"
    EXPERT = "experts"
    EXPERT_INNER = "ffn of an expert"
    VOCABULARY = "vocabulary"
    OTHER = "something that serving does not split, such as the width of the model"


Kinds = tuple[WeightDim, ...]


def decoder_weights(fields: Mapping[str, Any], dims: DecoderDims) -> dict[str, Kinds]:
    """The kind of each dim of each weight of the decoder that `config_dims` read from these fields."""
    if fields["model_type"] == "gpt2":
        return _gpt2_weights()
    found: dict[str, Kinds] = {
        "model.embed_tokens.weight": (WeightDim.VOCABULARY, WeightDim.OTHER),
        "model.norm.weight": (WeightDim.OTHER,),
    }
    if not dims.tied:
        found["lm_head.weight"] = (WeightDim.VOCABULARY, WeightDim.OTHER)
    layer = _attention(fields, dims)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if fields["model_type"] == "gemma2":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    layer |= {f"{name}.weight": (WeightDim.OTHER,) for name in norms}
    if dims.experts == 1 or dims.dense_layers:
        layer |= _mlp("mlp", WeightDim.INNER)
    if dims.experts > 1:
        layer |= {
            "mlp.gate.weight": (WeightDim.OTHER, WeightDim.OTHER),
            "mlp.experts.gate_up_proj": (WeightDim.EXPERT, WeightDim.EXPERT_INNER, WeightDim.OTHER),
            "mlp.experts.down_proj": (WeightDim.EXPERT, WeightDim.OTHER, WeightDim.EXPERT_INNER),
        }
    if dims.shared_experts:
        layer |= _mlp("mlp.shared_experts", WeightDim.INNER)
    if dims.latent is not None:
        layer["mlp.gate.e_score_correction_bias"] = (WeightDim.OTHER,)
    return found | {f"model.layers.*.{name}": kinds for name, kinds in layer.items()}


def _mlp(name: str, inner: WeightDim) -> dict[str, Kinds]:
    made = {f"{name}.{part}_proj.weight": (inner, WeightDim.OTHER) for part in ("gate", "up")}
    return made | {f"{name}.down_proj.weight": (WeightDim.OTHER, inner)}


def _attention(fields: Mapping[str, Any], dims: DecoderDims) -> dict[str, Kinds]:
    if dims.latent is not None:
        queries: dict[str, Kinds] = {"q_proj.weight": (WeightDim.HEADS, WeightDim.OTHER)}
        if dims.latent.query_rank:
            queries = {
                "q_a_proj.weight": (WeightDim.OTHER, WeightDim.OTHER),
                "q_b_proj.weight": (WeightDim.HEADS, WeightDim.OTHER),
            }
            queries["q_a_layernorm.weight"] = (WeightDim.OTHER,)
        parts = queries | {
            "kv_a_proj_with_mqa.weight": (WeightDim.OTHER, WeightDim.OTHER),
            "kv_a_layernorm.weight": (WeightDim.OTHER,),
            "kv_b_proj.weight": (WeightDim.HEADS, WeightDim.OTHER),
            "o_proj.weight": (WeightDim.OTHER, WeightDim.HEADS),
        }
    else:
        kinds = {"q": WeightDim.HEADS, "k": WeightDim.KV, "v": WeightDim.KV}
        parts: dict[str, Kinds] = {f"{name}_proj.weight": (kind, WeightDim.OTHER) for name, kind in kinds.items()}
        parts["o_proj.weight"] = (WeightDim.OTHER, WeightDim.HEADS)
        if fields.get("attention_bias") or fields["model_type"] == "qwen2":
            parts |= {f"{name}_proj.bias": (kind,) for name, kind in kinds.items()}
        if dims.qk_norm:
            parts |= {f"{name}_norm.weight": (WeightDim.OTHER,) for name in ("q", "k")}
    return {f"self_attn.{name}": kinds for name, kinds in parts.items()}


def _gpt2_weights() -> dict[str, Kinds]:
    """Its matrices are turned around, and those of queries, keys and values are one."""
    layer: dict[str, Kinds] = {
        "attn.c_attn.weight": (WeightDim.OTHER, WeightDim.HEADS),
        "attn.c_attn.bias": (WeightDim.HEADS,),
        "attn.c_proj.weight": (WeightDim.HEADS, WeightDim.OTHER),
        "attn.c_proj.bias": (WeightDim.OTHER,),
        "mlp.c_fc.weight": (WeightDim.OTHER, WeightDim.INNER),
        "mlp.c_fc.bias": (WeightDim.INNER,),
        "mlp.c_proj.weight": (WeightDim.INNER, WeightDim.OTHER),
        "mlp.c_proj.bias": (WeightDim.OTHER,),
    }
    layer |= {f"{name}.{part}": (WeightDim.OTHER,) for name in ("ln_1", "ln_2") for part in ("weight", "bias")}
    found: dict[str, Kinds] = {
        "transformer.wte.weight": (WeightDim.VOCABULARY, WeightDim.OTHER),
        "transformer.wpe.weight": (WeightDim.OTHER, WeightDim.OTHER),
    }
    found |= {f"transformer.ln_f.{part}": (WeightDim.OTHER,) for part in ("weight", "bias")}
    return found | {f"transformer.h.*.{name}": kinds for name, kinds in layer.items()}
