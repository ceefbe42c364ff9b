"""Serving steps of decoders: prefill fills a key-value cache, decode adds one token to every sequence."""

import dataclasses
import inspect
from typing import Any

from autoshard.errors import UserError
from autoshard.program import example_values
from autoshard.program import model_flops as flop_counter
from autoshard.program.jax.token_sampling import Sampling
from autoshard.program.jax.trace import trace
from autoshard.program.program_record import Program, Role
from autoshard.program.torch.kv_cache import ServingCache
from autoshard.program.torch.module_patches import lowered_environment
from autoshard.program.torch.torch_function import TorchFunction


_CACHES = ("past_key_values", "cache")
"""Names of the cache argument: that of transformers up to 5.23, and that from 5.24 on."""


_DISTANCES = ("mpt",)
"""Model types that use the number of cached tokens only to slice a table of distances.

The slice is added to the scores of all keys. A slice at any offset is equivalent, since it differs by a term that the
softmax cancels.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class ServingStep:
    """The step of serving that a program is: its kind and sizes."""

    kind: str
    """`prefill` writes `batch.input_ids` [B, S] to the first S positions of the cache, and its logits [B, V] are those
    of the last token. `decode` writes `batch.input_ids` [B, 1] at `batch.position`, and they attend to all tokens up to
    there.
    """
    batch: int
    """Number of sequences."""
    seq: int
    """Number of tokens of each sequence."""
    cache_length: int
    """Number of positions in the cache."""
    sampling: Sampling | None = None
    """Selection of the next tokens from the logits, by `batch.seed` unless it is greedy; None returns the logits."""


def serving_program(function: TorchFunction, name: str, asked: ServingStep, *, dtype: str, vocabulary: int) -> Program:
    """Return `step(params, cache, batch) -> (cache, logits)` with the cache donated; with `sampling` (cache, tokens).

    The cache is stacked like the layers: `cache.model.layers.*.key` [layers, B, heads, length, head size].

    - `function`: the decoder as a function; it is settled here.
    - `name`: name of the model in errors and in the program's name.
    - `dtype`: dtype of keys and values.
    - `vocabulary`: bound of the ids.

    Raises `UserError` for another kind, a cache shorter than `seq`, and a model that is no decoder with a cache.
    """
    import jax
    import numpy as np

    kind, batch, seq = asked.kind, asked.batch, asked.seq
    cache_length, sampling = asked.cache_length, asked.sampling
    if kind not in ("prefill", "decode"):
        raise UserError(f"--serve `{kind}` does not exist; use `prefill` or `decode`.")
    flops = [0.0]
    masked = [bool(getattr(function.module.config, "alibi", False))]  # ALiBi counts all keys
    parameters = inspect.signature(function.module.forward).parameters
    placed = "position_ids" in parameters
    counted = not placed and function.module.config.model_type not in _DISTANCES
    cache_argument = next((each for each in _CACHES if each in parameters), None)
    if function.module.config.is_encoder_decoder or "input_ids" not in parameters or cache_argument is None:
        raise UserError(
            f"--serve is for decoders; `{name}` is none that takes a cache. Leave it out to plan inference."
        )
    if cache_length < seq:
        raise UserError(f"a cache of {cache_length} tokens cannot hold {seq}; give --cache at least {seq}.")
    length = seq if kind == "prefill" else 1
    data = {"input_ids": jax.ShapeDtypeStruct((batch, length), np.int32)}
    if kind == "decode":
        data["position"] = jax.ShapeDtypeStruct((), np.int32)
    if sampling is not None and sampling.temperature:
        data["seed"] = jax.ShapeDtypeStruct((), np.int32)

    def call(weights: Any, entries: Any, given: Any, buffers: Any) -> tuple[ServingCache, Any]:
        """Run the module with a cache of these entries; return the cache afterwards and the last token's logits."""
        import jax.numpy as jnp

        cache = ServingCache(lowered_environment(), entries, given.get("position"), seq, counted=counted)
        first = given.get("position", 0)
        places = (jax.lax.broadcasted_iota(jnp.int32, (1, length), 1) + first).astype(jnp.int32)
        function.cache = cache
        inputs = {"input_ids": given["input_ids"]} | ({"position_ids": places} if placed else {})
        if masked[0] and "attention_mask" in parameters:
            inputs["attention_mask"] = jnp.ones((batch, cache.get_mask_sizes(length)[0]), jnp.int32)
        options = {cache_argument: cache, "use_cache": True, "logits_to_keep": 1}
        options = {key: value for key, value in options.items() if key in parameters}
        with cache.active():
            out = function(weights, (), inputs | options, buffers[0] if buffers else None)
        return cache, out["logits"][:, -1]

    def step(params: Any, cache: Any, batch: Any, *buffers: Any) -> Any:
        """Return the entries of the updated cache and the logits or tokens; record the model FLOPs in `flops`."""
        with flop_counter.counting() as scope:
            after, logits = call(params, cache, batch, buffers)
        flops[0] = scope[0]
        after.settle()
        return after.entries, logits if sampling is None else sampling.tokens(logits, batch.get("seed"))

    seen: dict[int, Any] = {}

    def shapes(weights: Any, given: Any, *buffers: Any) -> Any:
        """Run the module on an empty cache and record the shapes of each layer's entries in `seen`."""
        cache, logits = call(weights, {}, given, buffers)
        shape = jax.ShapeDtypeStruct
        seen.update({i: jax.tree.map(lambda x: shape(x.shape, x.dtype), parts) for i, parts in cache.seen.items()})
        return logits

    try:
        function.settle(shapes, data, name)
    except UserError:
        if masked[0] or placed or kind != "decode" or "attention_mask" not in parameters:
            raise
        masked[0] = True  # the module builds a mask of all keys, whose number is unknown
        function.settle(shapes, data, name)
    params = function.params
    entries = _entries(function, seen, cache_length, dtype)
    if not entries:
        raise UserError(f"--serve: `{name}` keeps nothing of its tokens, so there is nothing to cache.")
    extra = (function.buffers,) if function.buffers else ()
    args = (params, entries, data, *extra)

    def role(text: str) -> Role:
        """Return the role of an argument by its name: a parameter, the batch, or the cache and buffers as `OTHER`."""
        if text in params:
            return Role.PARAMETER
        return Role.BATCH if text.startswith("batch.") else Role.OTHER

    program = trace(
        step,
        args,
        name=f"{name} {kind}",
        donate_argnums=(1,),
        roles=role,
        training=False,
        arg_names=("", "cache", "batch", "")[: len(args)],
        tokens=batch * length,
        notes=function.notes,
    )
    names = [a.name for a in program.arguments]
    roles = [a.role for a in program.arguments]
    limits = {"batch.position": cache_length}
    fill = example_values.fill(args, names, roles, lambda text: limits.get(text, vocabulary))
    return dataclasses.replace(program, model_flops=flops[0] or None, make_args=fill)


def _entries(function: TorchFunction, seen: dict[int, Any], length: int, dtype: str) -> dict[str, Any]:
    """Return the shapes of the cache: one stack for each offset of a scanned block, one entry for each other layer.

    Keys, values and indexers have `length` positions; recurrent states have a constant size and their own dtype. The
    result is by name of the layer, then by part.

    - `seen`: shapes of the parts of each layer's cache, for the traced tokens.
    - `length`: number of positions in the cache.
    - `dtype`: dtype of keys and values.
    """
    import jax

    def full(part: str, value: Any, repeats: int | None) -> Any:
        """Return the shape of one part of an entry, stacked over `repeats` layers unless that is None."""
        lead = () if repeats is None else (repeats,)
        if part == "indexer":
            return jax.ShapeDtypeStruct((*lead, value.shape[0], length, *value.shape[2:]), jax.numpy.dtype(dtype))
        if part not in ("keys", "values"):  # a recurrent state, of constant size
            return jax.ShapeDtypeStruct((*lead, *value.shape), value.dtype)
        return jax.ShapeDtypeStruct((*lead, *value.shape[:2], length, *value.shape[3:]), jax.numpy.dtype(dtype))

    places = {block.start + offset: (block, offset) for block in function.blocks for offset in range(block.period)}
    # Layers of later groups are traced only to compare them with the first group.
    later = {k for block in function.blocks for k in range(block.start + block.period, block.stop)}
    entries: dict[str, Any] = {}
    for index, parts in sorted(seen.items()):
        if index in later:
            continue
        block, offset = places.get(index, (None, 0))
        label = f"layer.{index}" if block is None else block.label(offset)
        entries[label] = {
            part: full(part, value, None if block is None else block.repeats) for part, value in parts.items()
        }
    return entries
