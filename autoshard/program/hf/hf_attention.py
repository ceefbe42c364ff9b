"""Attention and masks for modules of transformers, in a form that can be sharded.

Modules that look up `ALL_ATTENTION_FUNCTIONS` get this attention. Causal masks, windows and empty masks become
comparisons inside of it; any other mask is computed as transformers does. Modules with their own attention use that,
with additive masks as they expect.
"""

import functools
import re
import sys
from typing import Any

from autoshard.program.kernels.cached_keys import query_position, stacks_of
from autoshard.program.kernels.dot_attention import attend
from autoshard.program.torch_ops.torchax_environment import environment


NAME = "autoshard"
"""Name of the implementation in a configuration."""

_PLAIN = {"is_causal", "scaling", "sliding_window", "softcap", "position_bias", "s_aux", "sinks"}
"""Options of attention that `hf_attention` computes."""

# Names of lengths and longest lengths of packed queries and keys: `cu_seq_lens_q` and such.
_IDLE = {"dropout", "attention_mask", "query", "key", "value", "output_attentions", "position_ids", "deterministic"} | {
    f"{part}_{of}" for part in ("cu_seq_lens", "max_length") for of in "qk"
}
"""Options without an effect here, since modules run without dropout and on whole sequences."""

_OTHERWISE_IDLE = {"indices"}
"""Options for kernels only, which a mask expresses as well."""


def hf_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
) -> tuple[Any, None]:
    """Compute attention for HF modules: torch tensors `query`, `key` and `value` [B, H, S, D] in, `([B, S, H, E],
    None)` out.

    A mask [B, T] is padding. Any other mask alone decides which keys a query attends to; `is_causal` and the window are
    then ignored. If the module passes an option that this attention lacks, the module's `eager_attention_forward`
    computes the result. Without such a function the option is ignored.
    """
    causal = options.get("is_causal")
    if causal is None:
        causal = bool(getattr(module, "is_causal", True))
    env = environment()
    position = query_position()
    own_options = _attention_options(type(module).__module__) - _PLAIN - _IDLE - _OTHERWISE_IDLE
    other = any(options.get(key) is not None for key in own_options)
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if other and own is not None:
        if attention_mask is None and causal and query.shape[2] > 1:
            attention_mask = _added_mask(query, key)
        return own(module, query, key, value, attention_mask, **options)
    cached_keys = stacks_of(key)
    q, k, v, mask, bias = env.t2j_iso((query, key, value, attention_mask, options.get("position_bias")))
    sinks = options.get("s_aux") if options.get("s_aux") is not None else options.get("sinks")
    padding, window = None, options.get("sliding_window")
    if mask is not None and mask.ndim == 2:
        padding, mask = mask, None
    if mask is not None:  # the mask alone decides which keys a query sees
        causal, window = False, None
    if mask is not None and bias is not None:
        bias = _added(mask, bias) + bias
    result = attend(
        q,
        k,
        v,
        causal=causal and (q.shape[2] > 1 or position is not None),
        position=position if causal else None,
        scale=options.get("scaling"),
        window=window,
        softcap=options.get("softcap"),
        padding=padding,
        bias=mask if bias is None else bias,
        held=cached_keys if causal else None,
        sinks=None if sinks is None else env.t2j_iso(sinks),
    )
    return env.j2t_iso(result), None


def _added(mask: Any, like: Any) -> Any:
    """Return a mask as an additive term for scores: a boolean mask (True attends) as 0 or the least float32.

    It has the dtype of `like`. Any other mask is returned unchanged.
    """
    import jax.numpy as jnp

    return jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min).astype(like.dtype) if mask.dtype == jnp.bool_ else mask


def _added_mask(query: Any, key: Any) -> Any:
    """Return an additive mask [1, 1, S, T] that hides later keys from queries; the last query is at the last key."""
    import torch

    rows = torch.arange(query.shape[2])[:, None] + (key.shape[2] - query.shape[2])
    seen = torch.arange(key.shape[2])[None] <= rows
    return torch.where(seen, 0.0, torch.finfo(query.dtype).min).to(query.dtype)[None, None]


def hf_mask(*, attention_mask: Any = None, mask_function: Any = None, config: Any = None, **options: Any) -> Any:
    """Return the mask that HF modules build before their layers; `options` are those of transformers' `sdpa_mask`.

    For causal masks, windows and empty masks this is the padding [B, T], or None without padding, since attention
    computes such masks from iotas. Any other mask is a boolean [B or 1, 1, S, T].

    A window is reduced only if modules pass it to attention, or if it covers all keys of a step without a cache.
    Nothing is reduced if an option such as `allow_is_causal_skip` is False, or if modules slice a padded mask.
    """
    from transformers import masking_utils

    if _all_there(attention_mask):
        attention_mask = None
    if mask_function is None:
        return attention_mask
    causal = "bidirectional" not in _names(mask_function)
    materialised = options.get("allow_is_causal_skip" if causal else "allow_is_bidirectional_skip") is False
    materialised = materialised or attention_mask is not None and _cuts_masks(config)
    plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if mask_function in plain and not materialised:
        return attention_mask
    window = _window(mask_function)
    if (
        window
        and not materialised
        and (window >= options["kv_length"] and query_position() is None or _passes_window(config))
    ):
        return attention_mask
    rest = {"use_vmap": False, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    batch = options.pop("batch_size")
    alone = attention_mask is None and not options.get("use_vmap") and "block" not in _names(mask_function)
    options = options | rest
    return masking_utils.sdpa_mask(
        1 if alone else batch, mask_function=mask_function, attention_mask=attention_mask, **options
    )


def _all_there(mask: Any) -> bool:
    """Return True if a padding mask [B, T] is known to hide nothing, as one that a module creates by default.

    No mask, a traced mask and a mask of another rank give False.
    """
    import jax
    from jax import core

    value = None if mask is None else environment().t2j_iso(mask)
    if not isinstance(value, jax.Array) or isinstance(value, core.Tracer) or value.ndim != 2:
        return False
    with jax.ensure_compile_time_eval():
        return bool(value.all())


def _window(function: Any) -> int | None:
    """Return the window, in tokens, of a function of a causal or two-sided sliding mask; None for any other mask."""
    parts = _parts(function)
    names = {each.__qualname__.partition(".")[0] for each in parts}
    if len(parts) != 2 or not names <= {
        "sliding_window_overlay",
        "sliding_window_bidirectional_overlay",
        "causal_mask_function",
        "bidirectional_mask_function",
    }:
        return None
    cells = [cell.cell_contents for each in parts for cell in each.__closure__ or ()]
    sizes = [size for size in cells if isinstance(size, int)]
    return sizes[0] if len(sizes) == 1 else None


def _parts(function: Any) -> tuple[Any, ...]:
    """Return the functions that transformers' `and_masks` combines; the function alone if it is no such mask."""
    if not function.__qualname__.startswith("and_masks."):
        return (function,)
    return tuple(function.__closure__[0].cell_contents)


def _names(function: Any) -> str:
    """Return the qualified names of a mask's function and of the functions in its closure, joined by blanks."""
    names = [function.__qualname__]
    for cell in function.__closure__ or ():
        content = cell.cell_contents
        names += [_names(each) for each in (content if isinstance(content, tuple) else (content,)) if callable(each)]
    return " ".join(names)


def _passes_window(config: Any) -> bool:
    """Return True if modules of this configuration pass the window to their attention function."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    return "sliding_window" in _attention_options(name)


def _cuts_masks(config: Any) -> bool:
    """Return True if modules of this configuration slice a mask [B, 1, S, T] to the existing keys."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    return re.search(r"mask\[:, :, :, ?: ?key_states", source_of(name)) is not None


@functools.cache
def _attention_options(module: str) -> frozenset[str]:
    """Return the names of the options that a module of transformers passes to attention functions, from its source.

    Empty for a module that is not imported or passes none.
    """
    text = source_of(module)
    calls = re.findall(r"= attention_interface\((.*?)\n\s*\)\n", text, re.S)
    return frozenset(name for call in calls for name in re.findall(r"^\s+(\w+)=", call, re.M))


@functools.cache
def source_of(module: str) -> str:
    """Return the source text of an imported module; empty if the module is not imported or has no file."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read()


def register_attention() -> None:
    """Register `autoshard` globally in transformers, as an implementation of attention and of its masks."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, hf_attention)
    AttentionMaskInterface.register(NAME, hf_mask)


def choose_attention(model: Any) -> None:
    """Select this attention in the configurations of modules that look up their implementation, in place.

    `model` was built for eager attention.

    Modules of one kind share a configuration. If some of their code has its own attention, none of them is changed.
    """
    files: dict[int, tuple[Any, set[str]]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            files.setdefault(id(config), (config, set()))[1].add(type(module).__module__)
    for config, names in files.values():
        texts = [source_of(name) for name in names]
        asks = [text for text in texts if "ALL_ATTENTION_FUNCTIONS" in text]
        others = [
            text for text in texts if text not in asks and re.search(r"create_\w*mask|_attn_implementation", text)
        ]
        if asks and not others:
            config._attn_implementation_internal = NAME
