"""The attention and the masks that modules of transformers call, as attention that can be split.

Modules that ask `ALL_ATTENTION_FUNCTIONS` how to attend get ours; masks that are causal, windows or none at all become
comparisons inside of it, and any other mask is made as transformers makes it. Modules with attention of their own keep
it, with masks to add as they expect them.
"""

import functools
import re
import sys
from typing import Any

from autoshard.program.kernels.cached_keys import held_by, query_position
from autoshard.program.kernels.dot_attention import attend
from autoshard.program.torch_ops.torchax_environment import environment


NAME = "autoshard"
"""What the implementation is called in a configuration."""

_PLAIN = {"is_causal", "scaling", "sliding_window", "softcap", "position_bias", "s_aux", "sinks"}
"""Options of attention that `hf_attention` computes."""

_IDLE = {"dropout", "attention_mask", "query", "key", "value", "output_attentions", "position_ids", "deterministic"} | {
    f"{part}_{of}" for part in ("cu_seq_lens", "max_length") for of in "qk"
}
"""Options that change nothing of what is computed here: modules run without dropout, and give whole sequences."""

_OTHERWISE_IDLE = {"indices"}
"""Options for kernels alone, which a mask says as well."""


def hf_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
) -> tuple[Any, None]:
    """The attention function that HF modules call; torch tensors in, `([B, S, H, E], None)` out."""
    causal = options.get("is_causal")
    if causal is None:
        causal = bool(getattr(module, "is_causal", True))
    env = environment()
    position = query_position()
    said = _attention_options(type(module).__module__) - _PLAIN - _IDLE - _OTHERWISE_IDLE
    other = any(options.get(key) is not None for key in said)
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if other and own is not None:
        if attention_mask is None and causal and query.shape[2] > 1:
            attention_mask = _added_mask(query, key)
        return own(module, query, key, value, attention_mask, **options)
    held = held_by(key)
    q, k, v, mask, bias = env.t2j_iso((query, key, value, attention_mask, options.get("position_bias")))
    sinks = options.get("s_aux") if options.get("s_aux") is not None else options.get("sinks")
    padding, window = None, options.get("sliding_window")
    if mask is not None and mask.ndim == 2:
        padding, mask = mask, None
    if mask is not None:  # it says all there is to say of who sees whom
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
        held=held if causal else None,
        sinks=None if sinks is None else env.t2j_iso(sinks),
    )
    return env.j2t_iso(result), None


def _added(mask: Any, like: Any) -> Any:
    """A mask as what is added to scores."""
    import jax.numpy as jnp

    return jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min).astype(like.dtype) if mask.dtype == jnp.bool_ else mask


def _added_mask(query: Any, key: Any) -> Any:
    """What hides later keys [1, 1, S, T] from queries, to be added to scores."""
    import torch

    rows = torch.arange(query.shape[2])[:, None] + (key.shape[2] - query.shape[2])
    seen = torch.arange(key.shape[2])[None] <= rows
    return torch.where(seen, 0.0, torch.finfo(query.dtype).min).to(query.dtype)[None, None]


def hf_mask(*, attention_mask: Any = None, mask_function: Any = None, config: Any = None, **options: Any) -> Any:
    """The mask that HF modules build before their layers.

    Nothing but padding [B, T] is left of a causal mask, of windows and of none at all, where attention makes them from
    iotas; else a boolean mask [B or 1, 1, S, T].
    """
    from transformers import masking_utils

    if _all_there(attention_mask):
        attention_mask = None
    if mask_function is None:
        return attention_mask
    causal = "bidirectional" not in _names(mask_function)
    kept = options.get("allow_is_causal_skip" if causal else "allow_is_bidirectional_skip") is False
    kept = kept or attention_mask is not None and _cuts_masks(config)
    plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if mask_function in plain and not kept:
        return attention_mask
    window = _window(mask_function)
    if window and not kept and (window >= options["kv_length"] and query_position() is None or _passes_window(config)):
        return attention_mask
    rest = {"use_vmap": False, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    batch = options.pop("batch_size")
    alone = attention_mask is None and not options.get("use_vmap") and "block" not in _names(mask_function)
    options = options | rest
    return masking_utils.sdpa_mask(
        1 if alone else batch, mask_function=mask_function, attention_mask=attention_mask, **options
    )


def _all_there(mask: Any) -> bool:
    """Whether a mask of padding is known to hide nothing, as one that code makes itself where it is given none."""
    import jax
    from jax import core

    value = None if mask is None else environment().t2j_iso(mask)
    if not isinstance(value, jax.Array) or isinstance(value, core.Tracer) or value.ndim != 2:
        return False
    with jax.ensure_compile_time_eval():
        return bool(value.all())


def _window(function: Any) -> int | None:
    """The window of a causal or two-sided sliding mask; None of any other mask."""
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
    """What `and_masks` was given."""
    if not function.__qualname__.startswith("and_masks."):
        return (function,)
    return tuple(function.__closure__[0].cell_contents)


def _names(function: Any) -> str:
    """Names of a mask's function and of those that it holds."""
    found = [function.__qualname__]
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        found += [_names(each) for each in (held if isinstance(held, tuple) else (held,)) if callable(each)]
    return " ".join(found)


def _passes_window(config: Any) -> bool:
    """Whether modules of this configuration tell their attention what window it has."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    return "sliding_window" in _attention_options(name)


def _cuts_masks(config: Any) -> bool:
    """Whether modules of this configuration cut a mask [B, 1, S, T] to the keys that there are."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    return re.search(r"mask\[:, :, :, ?: ?key_states", source_of(name)) is not None


@functools.cache
def _attention_options(module: str) -> frozenset[str]:
    """Names of the options that code of transformers gives to attention functions."""
    text = source_of(module)
    calls = re.findall(r"= attention_interface\((.*?)\n\s*\)\n", text, re.S)
    return frozenset(name for call in calls for name in re.findall(r"^\s+(\w+)=", call, re.M))


@functools.cache
def source_of(module: str) -> str:
    """The text of a module of transformers; nothing if there is none."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read()


def register_attention() -> None:
    """Make `autoshard` an attention implementation of transformers."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, hf_attention)
    AttentionMaskInterface.register(NAME, hf_mask)


def choose_attention(model: Any) -> None:
    """Let those modules attend by ours that ask how to; `model` was built for eager attention.

    A configuration is shared by modules of one kind, and some code has both kinds of attention: then none is ours.
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
