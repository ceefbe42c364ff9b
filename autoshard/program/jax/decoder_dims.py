"""Dims of a decoder, the shapes of its parameters, and the meaning of each dim of its weights."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from autoshard.program.jax.mla import LatentDims, latent_shapes
from autoshard.program.moe.decoder_experts import expert_shapes


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderDims:
    """Sizes of a decoder: layers, width, MLP width, query heads, key/value heads, head size, vocabulary.

    `layers` are all but those of `ahead`.
    `gated` MLPs have three matrices, others two. `tied` models use one matrix for embedding and head. One layer in
    `global_every` attends to all tokens, the others to the last `window` tokens (None: all attend to all).
    `autoshard.serving.Decoder` counts the FLOPs and bytes of such a model.
    """

    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    window: int | None = None
    global_every: int = 1
    experts: int = 1
    """Number of experts; above one, a layer has as many MLPs and a router, and `active_experts` of them see a token."""
    active_experts: int = 1
    expert_width: int | None = None
    """Width of an expert's MLP; None: `mlp_width`."""
    shared_experts: int = 0
    """Number of experts that see every token, as one further MLP of that many times an expert's width."""
    dense_layers: int = 0
    """Number of first layers, counted in `layers`, that have one MLP of `mlp_width` and no experts."""
    qk_norm: bool = False
    """True if queries and keys are normed by head."""
    ahead: int = 0
    """Number of further layers for multi-token prediction.

    Each predicts the token after those of the layers before it, from their hidden states and the next token's
    embedding. It has a projection of both, a layer like the last ones, and the head again.
    """
    fused_qkv: bool = False
    """True if one matmul computes queries, keys and values, which then have equal numbers of heads."""
    latent: LatentDims | None = None
    """Sizes of latent attention, which has equal numbers of key-value and query heads; None for plain attention."""

    @property
    def expert_inner(self) -> int:
        """Width of one expert's MLP."""
        return self.mlp_width if self.expert_width is None else self.expert_width


def layer_groups(dims: DecoderDims, prefix: str) -> int:
    """Return the number of groups of layers whose parameters' names start with `prefix`.

    A dense layer is a group of its own; of the others `global_every` layers make a group.
    """
    return dims.dense_layers if prefix == "dense_layers" else (dims.layers - dims.dense_layers) // dims.global_every


def stacks_of(prefix: str, count: int, outside: int = 0) -> dict[str, int]:
    """Return prefix of the stacked parameters' names -> number of layer groups in the stack.

    The first `outside` of `count` groups are a stack of their own, under `prefix.[0:outside].`; the rest follows under
    `prefix.[outside:].`. With 0 there is one stack, `prefix.*.`.
    """
    if not outside:
        return {f"{prefix}.*.": count}
    return {f"{prefix}.[0:{outside}].": outside, f"{prefix}.[{outside}:].": count - outside}


def parameters_of(dims: DecoderDims, dtype: str, axis: int, scanned: bool = True, outside: int = 0) -> dict[str, Any]:
    """Return the shapes of parameters in `dtype` by name; those of layers are stacked along `axis`, an entry a group.

    If the layers are not `scanned`, each has its own parameters under its number. The first `outside` groups (after the
    dense ones) have their own stacks. Layers that look ahead are never stacked, and are named `ahead.0.…`.
    """
    import jax

    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (dims.vocabulary, dims.width),
        "norm.weight": (dims.width,),
    }
    if not dims.tied:
        shapes["lm_head.weight"] = (dims.width, dims.vocabulary)
    kinds = {}
    if dims.dense_layers:
        kinds["dense_layers"] = _attention_shapes(dims) | _mlp_shapes(dims)
    for offset in range(dims.global_every):
        prefix = "layers" if dims.global_every == 1 else f"layers.{offset}"
        kinds[prefix] = _attention_shapes(dims) | (_mlp_shapes(dims) if dims.experts == 1 else expert_shapes(dims))
    last = kinds[next(reversed(kinds))]
    for number in range(dims.ahead):
        joined = {"join_proj.weight": (2 * dims.width, dims.width)}
        joined |= dict.fromkeys(("hidden_norm.weight", "embed_norm.weight"), (dims.width,))
        shapes |= {f"ahead.{number}.{key}": shape for key, shape in (joined | last).items()}
    for prefix, layer in kinds.items():
        count = layer_groups(dims, prefix)
        stacks = stacks_of(prefix, count, 0 if prefix == "dense_layers" else outside)
        for key, shape in layer.items():
            if scanned:
                shapes |= {f"{start}{key}": (*shape[:axis], own, *shape[axis:]) for start, own in stacks.items()}
            else:
                shapes |= {f"{prefix}.{number}.{key}": shape for number in range(count)}
    return {key: jax.ShapeDtypeStruct(shape, dtype) for key, shape in shapes.items()}


def _attention_shapes(dims: DecoderDims) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's attention parameters by name, with the norms before attention and MLP."""
    width, size, group = dims.width, dims.head_size, dims.heads // dims.kv_heads
    norms = {"input_norm.weight": (width,), "mlp_norm.weight": (width,)}
    if dims.latent is not None:
        return norms | latent_shapes(dims, dims.latent)
    shapes: dict[str, tuple[int, ...]] = {
        "attn.q_proj.weight": (width, dims.kv_heads, group, size),
        "attn.k_proj.weight": (width, dims.kv_heads, size),
        "attn.v_proj.weight": (width, dims.kv_heads, size),
        "attn.o_proj.weight": (dims.kv_heads, group, size, width),
    }
    if dims.fused_qkv:
        shapes = {
            "attn.qkv_proj.weight": (width, 3, dims.heads, size),
            "attn.o_proj.weight": shapes["attn.o_proj.weight"],
        }
    if dims.qk_norm:
        shapes |= {"attn.q_norm.weight": (size,), "attn.k_norm.weight": (size,)}
    return norms | shapes


def _mlp_shapes(dims: DecoderDims) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a dense MLP's matrices by name."""
    up = (dims.width, dims.mlp_width)
    shapes: dict[str, tuple[int, ...]] = {"mlp.up_proj.weight": up, "mlp.down_proj.weight": up[::-1]}
    if dims.gated:
        shapes["mlp.gate_proj.weight"] = up
    return shapes


class WeightDim(enum.Enum):
    """The meaning of a weight's dim."""

    KV = "heads of keys and values"
    HEADS = "heads"
    INNER = "ffn"
    EXPERT = "experts"
    EXPERT_INNER = "ffn of an expert"
    VOCABULARY = "vocabulary"
    OTHER = "something that serving does not split, such as the width of the model"


Kinds = tuple[WeightDim, ...]
"""The meaning of each dim of one weight."""


def decoder_weights(fields: Mapping[str, Any], dims: DecoderDims) -> dict[str, Kinds]:
    """Return, by Hugging Face's names, the kind of each dim of each weight of the decoder.

    `fields` is the configuration, and `dims` are its sizes. Layers have one entry, with `*` for their number. Dense
    layers and those with experts are merged.
    """
    if fields["model_type"] == "gpt2":
        return _gpt2_weights()
    weights: dict[str, Kinds] = {
        "model.embed_tokens.weight": (WeightDim.VOCABULARY, WeightDim.OTHER),
        "model.norm.weight": (WeightDim.OTHER,),
    }
    if not dims.tied:
        weights["lm_head.weight"] = (WeightDim.VOCABULARY, WeightDim.OTHER)
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
    return weights | {f"model.layers.*.{name}": kinds for name, kinds in layer.items()}


def _mlp(name: str, inner: WeightDim) -> dict[str, Kinds]:
    """Return the kinds of a gated MLP's matrices [out, in] below `name`; `inner` is that of its width."""
    weights: dict[str, Kinds] = {f"{name}.{part}_proj.weight": (inner, WeightDim.OTHER) for part in ("gate", "up")}
    return weights | {f"{name}.down_proj.weight": (WeightDim.OTHER, inner)}


def _attention(fields: Mapping[str, Any], dims: DecoderDims) -> dict[str, Kinds]:
    """Return the kinds of the dims of the attention weights of a layer."""
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
    """Return the kinds of GPT-2's weights: its matrices are transposed, and query, key and value are one."""
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
    weights: dict[str, Kinds] = {
        "transformer.wte.weight": (WeightDim.VOCABULARY, WeightDim.OTHER),
        "transformer.wpe.weight": (WeightDim.OTHER, WeightDim.OTHER),
    }
    weights |= {f"transformer.ln_f.{part}": (WeightDim.OTHER,) for part in ("weight", "bias")}
    return weights | {f"transformer.h.*.{name}": kinds for name, kinds in layer.items()}
