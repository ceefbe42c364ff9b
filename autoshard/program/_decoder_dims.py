"""What a decoder is: its dims, and the shapes of its parameters."""

import dataclasses
from typing import Any

from autoshard.program._latent import LatentDims, latent_shapes
from autoshard.program._routed import expert_shapes


@dataclasses.dataclass(frozen=True, slots=True)
class DecoderDims:
    """What the model is: layers, width, MLP width, query heads, key/value heads, head size, vocabulary.

    `gated` MLPs have three matrices, others two; `tied` models use one matrix for embedding and head. One layer in
    `global_every` attends to everything, the others to the last `window` tokens (None: all to everything).
    `autoshard.cost.Decoder` counts what such a model computes and holds.
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
    """Where it is more than one, a layer has that many MLPs and a router, of which `active_experts` see a token."""
    active_experts: int = 1
    expert_width: int | None = None
    """Width of an expert's MLP; None: `mlp_width`."""
    shared_experts: int = 0
    """Experts that see every token: one more MLP of that many times an expert's width."""
    dense_layers: int = 0
    """First layers, of `layers`, whose MLP is one of `mlp_width`, without experts."""
    qk_norm: bool = False
    """Queries and keys are normed by head."""
    ahead: int = 0
    """Further layers, each of which predicts the token after those before it from their hidden states and the next
    token's embedding (multi-token prediction): a projection of both, a layer as the last ones are, the head again."""
    latent: LatentDims | None = None
    """Sizes of latent attention, which has as many key-value heads as query heads; None: plain attention."""

    @property
    def expert_inner(self) -> int:
        """Width of one expert's MLP."""
        return self.mlp_width if self.expert_width is None else self.expert_width


def layer_groups(dims: DecoderDims, prefix: str) -> int:
    """How many groups of layers have parameters whose names start with `prefix`."""
    return dims.dense_layers if prefix == "dense_layers" else (dims.layers - dims.dense_layers) // dims.global_every


def stacks_of(prefix: str, count: int, outside: int = 0) -> dict[str, int]:
    """What names of stacked parameters start with, and how many groups of layers are in such a stack; the first
    `outside` are a stack by themselves."""
    if not outside:
        return {f"{prefix}.*.": count}
    return {f"{prefix}.[0:{outside}].": outside, f"{prefix}.[{outside}:].": count - outside}


def parameters_of(dims: DecoderDims, dtype: str, axis: int, scanned: bool = True, outside: int = 0) -> dict[str, Any]:
    """Parameters by name; those of a layer are stacked along `axis`, one entry for each group of layers.

    Of layers that are not `scanned` each has its own, under its number. The first `outside` groups (after those that
    are dense) have stacks of their own.
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
    if dims.qk_norm:
        shapes |= {"attn.q_norm.weight": (size,), "attn.k_norm.weight": (size,)}
    return norms | shapes


def _mlp_shapes(dims: DecoderDims) -> dict[str, tuple[int, ...]]:
    shapes = {"mlp.up_proj.weight": (dims.width, dims.mlp_width), "mlp.down_proj.weight": (dims.mlp_width, dims.width)}
    if dims.gated:
        shapes["mlp.gate_proj.weight"] = shapes["mlp.up_proj.weight"]
    return shapes
