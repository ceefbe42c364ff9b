"""Shapes of a decoder's weights under Hugging Face's names, and the number of layers that have each."""

from collections.abc import Mapping
from typing import Any

from autoshard.program.jax.decoder_dims import DecoderDims, decoder_weights


def weight_shapes(fields: Mapping[str, Any], dims: DecoderDims) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return the shape and the number of copies of every weight of `decoder_weights`, which has the same arguments.

    A weight of layers is counted once for each layer that has it, another one once. Layers that look ahead are left
    out, since no server loads them to decode.
    """
    ends = (_gpt2_shapes if fields["model_type"] == "gpt2" else _shapes)(fields, dims)
    return {name: (_found(ends, name), _layers(dims, name)) for name in decoder_weights(fields, dims)}


def _found(ends: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
    """Return the shape under the longest suffix of a name."""
    return ends[max((end for end in ends if name.endswith(end)), key=len)]


def _layers(dims: DecoderDims, name: str) -> int:
    """Return the number of layers with a weight; 1 for a weight outside of layers."""
    if "*" not in name:
        return 1
    if dims.experts > 1 and ".mlp." in name:
        dense = ".experts." not in name and ".shared_experts." not in name and "_proj." in name
        return dims.dense_layers if dense else dims.layers - dims.dense_layers
    return dims.layers


def _shapes(fields: Mapping[str, Any], dims: DecoderDims) -> dict[str, tuple[int, ...]]:
    """Return shapes by the last parts of names. Matrices are [out, in], and both up projections of experts are one."""
    width, queries, keys = dims.width, dims.heads * dims.head_size, dims.kv_heads * dims.head_size
    inner = dims.expert_inner
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (dims.vocabulary, width),
        "lm_head.weight": (dims.vocabulary, width),
        "norm.weight": (width,),
        "layernorm.weight": (width,),
        "q_proj.weight": (queries, width),
        "k_proj.weight": (keys, width),
        "v_proj.weight": (keys, width),
        "o_proj.weight": (width, queries),
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
        "q_norm.weight": (dims.head_size,),
        "k_norm.weight": (dims.head_size,),
        "mlp.gate.weight": (dims.experts, width),
        "mlp.gate.e_score_correction_bias": (dims.experts,),
        "mlp.experts.gate_up_proj": (dims.experts, (2 if dims.gated else 1) * inner, width),
        "mlp.experts.down_proj": (dims.experts, width, inner),
    }
    for mlp, size in (("mlp", dims.mlp_width), ("mlp.shared_experts", dims.shared_experts * inner)):
        shapes |= {f"{mlp}.{part}_proj.weight": (size, width) for part in ("gate", "up")}
        shapes[f"{mlp}.down_proj.weight"] = (width, size)
    if dims.latent is not None:
        own = dims.latent
        shapes |= {
            "q_proj.weight": (dims.heads * own.head_size, width),
            "q_a_proj.weight": (own.query_rank, width),
            "q_b_proj.weight": (dims.heads * own.head_size, own.query_rank),
            "q_a_layernorm.weight": (own.query_rank,),
            "kv_a_proj_with_mqa.weight": (own.key_rank + own.rope_size, width),
            "kv_a_layernorm.weight": (own.key_rank,),
            "kv_b_proj.weight": (dims.heads * (own.nope_size + own.value), own.key_rank),
            "o_proj.weight": (width, dims.heads * own.value),
        }
    return shapes


def _gpt2_shapes(fields: Mapping[str, Any], dims: DecoderDims) -> dict[str, tuple[int, ...]]:
    """Return the shapes of GPT-2's weights by the last parts of names; matrices are [in, out]."""
    width, inner = dims.width, dims.mlp_width
    return {
        "wte.weight": (dims.vocabulary, width),
        "wpe.weight": (fields["n_positions"], width),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "mlp.c_fc.weight": (width, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, width),
        "mlp.c_proj.bias": (width,),
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }
