"""A way to serve as specs: axes of a mesh for every dim of weights, caches and inputs."""

import dataclasses
import math
from collections.abc import Mapping

from autoshard.program import WeightDim, config_dims, decoder_weights, read_config
from autoshard.serving.decoder_counts import Decoder
from autoshard.serving.serving_model import ServingEngine


ServingDims = tuple[tuple[str, ...], ...]
"""The axes that split each dim."""


_JOINED = {
    "experts.gate_up_proj": ("gate and up", 1),
    "attn.c_attn.weight": ("queries, keys and values", 1),
    "attn.c_attn.bias": ("queries, keys and values", 0),
}
"""Ends of names of weights that are several in one dim: what they are, and which dim."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServingSpecs:
    """What engines of one kind split, by the names of the checkpoint's weights, of the cache and of inputs."""

    sizes: Mapping[str, int]
    """Axes of the mesh, but for those of one device: `engine`, `group` (of attention), `kv` (heads of keys and values)
    and `query` (heads of queries that share one of those)."""
    weights: Mapping[str, ServingDims]
    cache: Mapping[str, ServingDims]
    """The keys and values of one layer: sequences, heads, places, and what a head has."""
    inputs: Mapping[str, ServingDims]
    joined: Mapping[str, str]
    """Weights that are several in a dim that is split, and what they are: each has to be split alike."""


def serving_specs(
    config: str, decoder: Decoder, engine: ServingEngine, engines: int, *, counted: bool = False
) -> ServingSpecs:
    """The specs of `engines` engines for `hf:CONFIG`; a dim that does not divide stays whole. `counted` engines have
    their axis even if there is one."""
    _, fields = read_config(config.removeprefix("hf:"))
    dims = config_dims(fields)
    assert dims is not None
    heads_kept = 1 if decoder.latent is not None else decoder.kv_heads
    kv = math.gcd(engine.tensor, heads_kept)
    every = {"engine": engines, "group": engine.attention, "kv": kv, "query": engine.tensor // kv}
    sizes = {name: size for name, size in every.items() if size > 1 or (counted and name == "engine")}

    def axes(*names: str) -> tuple[str, ...]:
        return tuple(name for name in names if name in sizes)

    whole = axes("group", "kv", "query")
    split = {
        WeightDim.HEADS: (axes("kv", "query"), decoder.heads),
        WeightDim.KV: (axes("kv"), heads_kept),
        WeightDim.INNER: (whole, math.gcd(decoder.mlp_width, decoder.expert_inner * max(1, decoder.shared_experts))),
        WeightDim.VOCABULARY: (whole, decoder.vocabulary),
        WeightDim.EXPERT: (whole if engine.experts > 1 else (), decoder.experts),
        WeightDim.EXPERT_INNER: (whole if engine.experts == 1 else (), decoder.expert_inner),
    }

    def dim(kind: WeightDim) -> tuple[str, ...]:
        found, size = split.get(kind, ((), 1))
        return () if size % math.prod(sizes[name] for name in found) else found

    sequences = axes("engine", "group")
    kinds = decoder_weights(fields, dims)
    weights = {name: tuple(map(dim, found)) for name, found in kinds.items()}
    return ServingSpecs(
        sizes,
        weights,
        dict.fromkeys(("keys", "values"), (sequences, axes("kv"), (), ())),
        {"input_ids": (sequences, ()), "position": ()},
        {
            name: said
            for name, found in weights.items()
            for end, (said, place) in _JOINED.items()
            if name.endswith(end) and found[place]
        },
    )
