"""Specs of a serving point: mesh axes for every dim of weights, caches and inputs."""

import dataclasses
import math
from collections.abc import Mapping

from autoshard.program import WeightDim, decoder_weights, read_config
from autoshard.serving.decoder_counts import Decoder
from autoshard.serving.serving_model import ServingEngine


ServingDims = tuple[tuple[str, ...], ...]
"""The axes that split each dim."""


_JOINED = {
    "experts.gate_up_proj": ("gate and up", 1),
    "attn.c_attn.weight": ("queries, keys and values", 1),
    "attn.c_attn.bias": ("queries, keys and values", 0),
}
"""Name suffixes of weights that concatenate several along one dim -> their description and that dim."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServingSpecs:
    """The splits of one kind of engine, by the names of the checkpoint's weights, of the cache and of inputs."""

    sizes: Mapping[str, int]
    """Axes of the mesh with more than one device -> their sizes; `engine` also with one device, if counted.

    They are `engine`, `group` (of attention), `kv` (heads of keys and values) and `query` (query heads of one such
    head).
    """
    weights: Mapping[str, ServingDims]
    """Specs by names of weights, in which `*` stands for the number of a layer."""
    cache: Mapping[str, ServingDims]
    """Keys and values of one layer: sequences, heads, positions, and the elements of a head."""
    inputs: Mapping[str, ServingDims]
    """Specs of `input_ids` [sequences, tokens] and of the scalar `position`."""
    joined: Mapping[str, str]
    """Weights that are concatenated along a split dim, with a description; each part must be split alike."""


def serving_specs(
    config: str, decoder: Decoder, engine: ServingEngine, engines: int, *, counted: bool = False
) -> ServingSpecs:
    """Return the specs of `engines` engines for `CONFIG` or `hf:CONFIG`; a dim that does not divide stays whole.

    Sequences are always split over engines and groups, and the cache's heads over `kv`.

    - `decoder`: the decoder of the configuration.
    - `engine`: the kind of engine.
    - `counted`: True for an axis `engine` even if there is one engine.
    """
    _, fields = read_config(config.removeprefix("hf:"))
    heads_kept = 1 if decoder.latent is not None else decoder.kv_heads
    kv = math.gcd(engine.tensor, heads_kept)
    all_sizes = {"engine": engines, "group": engine.attention, "kv": kv, "query": engine.tensor // kv}
    sizes = {name: size for name, size in all_sizes.items() if size > 1 or (counted and name == "engine")}

    def axes(*names: str) -> tuple[str, ...]:
        """Return those of the axes that the mesh has, in the given order."""
        return tuple(name for name in names if name in sizes)

    all_axes = axes("group", "kv", "query")
    split = {
        WeightDim.HEADS: (axes("kv", "query"), decoder.heads),
        WeightDim.KV: (axes("kv"), heads_kept),
        WeightDim.INNER: (all_axes, math.gcd(decoder.mlp_width, decoder.expert_inner * max(1, decoder.shared_experts))),
        WeightDim.VOCABULARY: (all_axes, decoder.vocabulary),
        WeightDim.EXPERT: (all_axes if engine.experts > 1 else (), decoder.experts),
        WeightDim.EXPERT_INNER: (all_axes if engine.experts == 1 else (), decoder.expert_inner),
    }

    def dim(kind: WeightDim) -> tuple[str, ...]:
        """Return the axes that split a dim of this kind; none if they do not divide its size, or for other kinds."""
        split_axes, size = split.get(kind, ((), 1))
        return () if size % math.prod(sizes[name] for name in split_axes) else split_axes

    sequences = axes("engine", "group")
    kinds = decoder_weights(fields, decoder)
    weights = {name: tuple(map(dim, split_dims)) for name, split_dims in kinds.items()}
    return ServingSpecs(
        sizes,
        weights,
        dict.fromkeys(("keys", "values"), (sequences, axes("kv"), (), ())),
        {"input_ids": (sequences, ()), "position": ()},
        {
            name: description
            for name, split_dims in weights.items()
            for end, (description, place) in _JOINED.items()
            if name.endswith(end) and split_dims[place]
        },
    )
