"""Readers of the recomputation, dtypes, kernel blocks and compiler flags that a measured row states in words."""

import re
from collections.abc import Mapping
from typing import Any

from autoshard.cost import read_flags
from autoshard.program import SAVABLE, SAVED, KernelBlocks
from autoshard.validation.pair_dims import whole_number
from autoshard.validation.pair_keys import tensor_places
from autoshard.validation.published_runs import IncompleteError


_TORCHPRIME = {
    "flash": KernelBlocks((2048, 512), (2048, 512), (2048, 512)),
    "splash": KernelBlocks((2048, 2048), (2048, 2048), (2048, 2048), fused=True),
}
"""Blocks of torchprime's kernels, from its attention module and torch_xla.experimental.splash_attention."""
OPTIMIZER = "AdamW with moments of 32 bits"
"""Assumption about a row that states no optimizer."""
_INT8 = "int8 in all three matmuls of a layer's weights, rounded to nearest, with scales by row and by slice"
"""Assumption about a row with matmuls of int8, from MaxText's default configuration of AQT."""
_SHORT = {"q": ("query",), "k": ("key",), "v": ("value",), "out": ("out",), "ffn1": ("gate", "up"), "ffn2": ("down",)}
"""Short names of values in a list of what is saved -> our names."""
SAVES: dict[str, str] = {
    "decoder_layer_input": "input",
    "query_proj": "query",
    "key_proj": "key",
    "value_proj": "value",
    "out_proj": "out",
    "context": "context",
    "mlpwi_0": "gate",
    "mlpwi_1": "up",
    "mlpwo": "down",
}
"""MaxText's names of values -> our names; the input of a layer is saved under every policy."""


def stated_remat(
    said: Mapping[str, Any], plan: Mapping[str, Any]
) -> tuple[str, tuple[str, ...] | None, tuple[str, ...]]:
    """Return the remat policy by our name, the values that a layer saves, and those of them that are offloaded.

    The saved values are None if the policy implies them. A row's plan may also state the place of single values
    (`out_proj=device`), or the values that are sent to the host (`offload`).
    """
    text = str(said.get("remat", "full")).strip()
    named = dict(re.findall(r"(\w+)\s*=\s*(device|offload|remat)", text))
    word = "full" if named else re.split(r"[\s(,:]", text.lower())[0]
    # MaxText reads the arguments for single tensors only under its policy `custom`.
    single = tensor_places(said if word == "custom" else plan) | {key: str(plan[key]) for key in SAVES if key in plan}
    single |= dict.fromkeys(_offloaded(plan), "offload")
    if word == "custom" and single:
        word = "full"
    if word in ("checkpoint", "scan", "recompute_all"):
        word = "full"  # each layer is recomputed from its input
    listed = re.match(r"save ((?:\w+,)+\w+)", text)
    policies = [name for name in re.findall(r"\w+", text) if name in SAVED]
    if word == "save" and len(policies) == 1:
        word = policies[0]
    elif word == "save" and listed is not None and set(listed[1].split(",")) <= _SHORT.keys():
        return "full", tuple(value for name in listed[1].split(",") for value in _SHORT[name]), ()
    if word not in SAVED and word != "none":
        raise IncompleteError(f"remat {text!r} is not known")
    if not named and not single:
        return word, None, ()
    if word == "none":
        raise IncompleteError(f"remat {text!r} keeps everything where it is")
    places = {name: "device" for name in SAVED[word]} | {SAVES.get(k, k): v for k, v in (named | single).items()}
    unknown = sorted(name for name, where in places.items() if where != "remat" and name not in (*SAVABLE, "input"))
    if unknown or not set(places.values()) <= {"device", "offload", "remat"}:
        raise IncompleteError(f"remat {text!r} with {single or 'nothing'} saves a value that is not rebuilt")
    offloaded = tuple(name for name, where in places.items() if where == "offload")
    saved = tuple(name for name, where in places.items() if where != "remat" and name != "input")
    return "full", saved, offloaded


def _offloaded(plan: Mapping[str, Any]) -> list[str]:
    """List the values, by MaxText's names, that a row's plan sends to the host by `offload`; empty without it.

    Raises `IncompleteError` for an unknown name.
    """
    text = str(plan.get("offload") or "none")
    if text in ("none", "no"):
        return []
    if "layer input" in text:
        return ["decoder_layer_input"]
    matches = {name: [k for k in SAVES if k == name or k.startswith(f"{name}_")] for name in re.findall(r"\w+", text)}
    if not all(matches.values()):
        raise IncompleteError(f"offload={text} is not rebuilt")
    return [key for keys in matches.values() for key in keys]


def stated_dtypes(said: Mapping[str, Any], assumed: list[str]) -> dict[str, Any]:
    """Return the optimizer and the dtypes as arguments of `Run`, without those that are `Run`'s defaults.

    The default is AdamW, with bf16 compute and f32 parameters and moments. SGD replaces Adafactor, which is added to
    `assumed`, as are the matmuls of int8. Raises `IncompleteError` for other 8-bit and 4-bit dtypes and optimizers.
    """
    text, rule = (str(said.get(key, "")).lower() for key in ("dtype", "optimizer"))
    if re.search(r"fp8|float8|nvfp4|mxfp|int8 weights", text):
        raise IncompleteError(f"dtype {text!r} is not rebuilt")
    if not rule:
        assumed.append(OPTIMIZER)
    dtypes: dict[str, Any] = {}
    if "int8" in text:
        assumed.append(_INT8)
        dtypes["quantize"] = "int8"
    if re.match(r"(f32|fp32|float32) compute", text):
        dtypes["compute"] = "float32"
    if re.search(r"bf16 (parameters|weights|params)", text):
        dtypes["weights"] = "bfloat16"
    if re.search(r"(moments?|state)\b.*bf16|bf16 (moments?|state)", rule):
        dtypes["state"] = "bfloat16"
    elif re.search(r"\bmu\b.*bf16", rule):
        dtypes["state"] = ("bfloat16", "float32")  # MaxText's mu_dtype is the dtype of the first moments only
    if re.search(r"\bgrad(ient)?s?\b.*bf16", rule):
        dtypes["gradients"] = "bfloat16"
    name = re.split(r"[\s,(]", rule)[0] or "adamw"
    if name.startswith("muon"):
        assumed.append("AdamW for Muon, without the matmuls of its orthogonalisation")
        name = "adamw"
    if name not in ("adamw", "adam", "mu", "adafactor", "sgd"):
        raise IncompleteError(f"the optimizer {name!r} is not rebuilt")
    if name in ("adafactor", "sgd"):
        dtypes["optimizer"] = "sgd"
    if name == "adafactor":
        assumed.append("SGD for Adafactor, whose factored moments are small relative to the parameters")
    return dtypes


def stated_blocks(said: Mapping[str, Any], assumed: list[str]) -> KernelBlocks:
    """Return the blocks of the attention kernels: stated ones, else torchprime's for torch_xla, else the defaults.

    Torchprime's are added to `assumed`. A stated size may depend on the plan's `cp_method`.
    """
    sizes_of = {key.removeprefix("sa_block_"): whole_number(said, key) for key in said if key.startswith("sa_block_")}
    if sizes_of:
        fused = said.get("fused_attention_bwd") is True or "tokamax" in str(said.get("attention", ""))
        pairs = (("q", "kv"), ("q_dkv", "kv_dkv"), ("q_dq", "kv_dq"))
        # MaxText's default is 512.
        forward, dkv, dq = ((sizes_of.get(q, 512), sizes_of.get(kv, 512)) for q, kv in pairs)
        return KernelBlocks(forward, dkv, dq, fused)
    if "torch_xla" in str(said.get("framework", "")) and "blocks" not in str(said.get("attention", "")):
        assumed.append("the blocks that torchprime gives its kernels")
        return _TORCHPRIME["splash" if "splash" in str(said.get("attention", "")) else "flash"]
    text = str(said.get("attention", "")) + " " + str(said.get("attention_blocks", ""))
    own = (size for size, methods in re.findall(r"(\d+) \(([\w, -]+)\)", text) if str(said.get("cp_method")) in methods)
    sizes = re.search(r"blocks (\d+)", next((f"blocks {size}" for size in own), text))
    # Tokamax has one backward kernel, which computes all gradients.
    fused = bool(said.get("fused_attention_bwd")) or "tokamax" in text
    if sizes is None:
        return KernelBlocks(fused=fused)
    pair = (int(sizes[1]), int(sizes[1]))
    return KernelBlocks(pair, pair, pair, fused)


def stated_flags(group: Mapping[str, Any], said: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the compiler flags of a row; empty for the compiler's defaults and if none are stated.

    A text in `xla_flags` names one of the group's `flag_sets`. Raises `IncompleteError` if flags differ by row and are
    not stated.
    """
    given = said.get("xla_flags")
    base = next((group[key] for key in ("base_xla_flags", "base_flags") if key in group), None)
    sets = group.get("flag_sets") or {}
    if isinstance(given, str) and given in sets:
        given = sets[given]
    if isinstance(given, str) and not given.startswith("--"):
        if given.startswith("per row"):
            raise IncompleteError("the row's compiler flags are not stated")
        given = None  # the compiler's defaults, or no flags are stated
    for flags in (base, given):
        if not isinstance(flags, str | list | None):
            raise IncompleteError(f"xla_flags is {flags!r}, neither a text nor a list of flags")
    extra = said.get("xla")
    more = [f"--xla_tpu_{extra}"] if isinstance(extra, str) and "=" in extra else []
    return read_flags([*read_flags(base), *read_flags(given), *more])
