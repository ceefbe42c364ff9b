"""LoRA: low-rank adapters of a torch module, whose own weights are frozen and may be quantised."""

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.errors import UserError, reason_of


_KEYS = ("r", "alpha", "targets", "base")
"""Keys of the option `lora`."""

_BASES = ("int8", "int4", "nf4")
"""Forms in which the base may be stored."""

_MOST_NAMES = 12
"""Most names of layers in a sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lora:
    """Options of low-rank adapters."""

    rank: int
    """Inner size of the adapters."""
    alpha: float
    """Factor of the update, divided by the rank."""
    targets: tuple[str, ...] = ()
    """Names of linear layers, or ends of their paths; empty for all but output heads."""
    base: str = ""
    """Form in which the weights of linear layers are stored; empty for their own dtype."""


def parse_lora(text: str) -> Lora:
    """Return the options in a text such as `16` or `r=16,alpha=32,targets=q_proj/v_proj,base=nf4`.

    The rank may stand alone. `alpha` is twice the rank by default, and `targets` are all linear layers but output
    heads. Commas may separate targets too.

    Raises `UserError` for unknown keys and wrong values.
    """
    given: dict[str, str] = {}
    for place, part in enumerate(text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and place == 0:
            key, value = "r", key
        elif not equals and key and "targets" in given and list(given)[-1] == "targets":
            given["targets"] += f"/{key}"
            continue
        elif not equals:
            raise UserError(
                f"--lora `{text}`: `{key}` has no value; write KEY=VALUE, as in r=16,targets=q_proj/v_proj."
            )
        if key not in _KEYS:
            raise UserError(f"--lora has no `{key}`; its keys are {', '.join(_KEYS[:-1])} and {_KEYS[-1]}.")
        if key in given:
            raise UserError(f"--lora `{text}` has `{key}` twice; leave one of them out.")
        given[key] = value
    if "r" not in given:
        raise UserError(f"--lora `{text}` has no rank; add r=16.")
    rank, base = given["r"], given.get("base", "")
    if not rank.isdecimal() or int(rank) < 1:
        raise UserError(f"--lora r={rank}: the rank is a whole number above 0, such as r=16.")
    if "base" in given and base not in _BASES:
        raise UserError(f"--lora base={base} is not known; use {', '.join(_BASES[:-1])} or {_BASES[-1]}.")
    targets = tuple(dict.fromkeys(part.strip() for part in given["targets"].split("/"))) if "targets" in given else ()
    if not all(targets):
        raise UserError(f"--lora targets={given['targets']} has an empty name; write targets=q_proj/v_proj.")
    try:
        alpha = float(given.get("alpha", 2 * int(rank)))
    except ValueError:
        alpha = 0.0
    if not 0 < alpha < float("inf"):
        raise UserError(f"--lora alpha={given['alpha']}: alpha is a number above 0, such as alpha=32.")
    return Lora(int(rank), alpha, targets, base)


def check_lora(given: Mapping[str, Any]) -> Lora | None:
    """Return the option `lora` of given options; None without it.

    Raises `UserError` for a text that cannot be parsed, and for a step that does not train.
    """
    if given.get("lora") is None:
        return None
    if not given.get("train"):
        raise UserError("--lora is for training steps; add --train, or leave it out.")
    return parse_lora(given["lora"])


def is_cast(name: str) -> bool:
    """Return False for the name of the maxima that scale codes, which stay in float32 under a compute dtype."""
    return not name.endswith("weight_absmax")


def with_adapters(module: Any, lora: Lora, label: str) -> tuple[Any, list[str]]:
    """Return a copy of a torch module with adapters, whose other parameters are frozen, and notes.

    The copy shares the tensors of `module`, except for quantised weights. Adapters of real weights have values.

    - `label`: name of the module in errors.

    Raises `UserError` if targets match nothing, or if the module has adapters already or cannot be copied.
    """
    import torch

    from autoshard.program.torch_ops.low_rank_layers import AdaptedLinear, QuantisedLinear

    if any(hasattr(child, "lora_A") for child in module.modules()):
        raise UserError(f"`{label}` has adapters already, which are planned as they are; leave --lora out.")
    # The copy's parameters have the same storage, and flags of their own.
    memo: dict[int, Any] = {id(each): torch.nn.Parameter(each.detach(), False) for each in module.parameters()}
    memo |= {id(each): each for each in module.buffers()}
    try:
        adapted = copy.deepcopy(module, memo)
    except Exception as error:  # a deep copy runs the user's code
        raise UserError(
            f"--lora needs a copy of `{label}`, which cannot be made: {type(error).__name__}: {reason_of(error, 5)}."
        ) from error
    linears = {path: child for path, child in adapted.named_modules() if is_linear(child)}
    heads = _heads(adapted)
    inner = {path: child for path, child in linears.items() if id(child) not in heads}
    chosen = _chosen(linears if lora.targets else inner, lora.targets, label)
    total = sum(parameter.numel() for parameter in adapted.parameters())
    replaced: dict[int, Any] = {}
    stored = 0
    for layer in inner.values() if lora.base else ():
        weight = layer.weight if isinstance(layer, torch.nn.Linear) else layer.weight.T
        if lora.base == "int8" or weight.shape[0] % 2 == 0:
            replaced[id(layer)] = QuantisedLinear(weight, layer.bias, lora.base)
            stored += weight.numel()
    trained = 0
    for seed, path in enumerate(chosen):
        layer = linears[path]
        sizes = layer.weight.shape if not isinstance(layer, torch.nn.Linear) else layer.weight.shape[::-1]
        scaling = lora.alpha / lora.rank
        new = AdaptedLinear(replaced.get(id(layer), layer), (sizes[0], sizes[1]), lora.rank, scaling, seed)
        trained += sum(parameter.numel() for parameter in new.parameters() if parameter.requires_grad)
        replaced[id(layer)] = new
    for parent in list(adapted.modules()):
        for key, child in parent._modules.items() if not isinstance(parent, AdaptedLinear | QuantisedLinear) else ():
            if id(child) in replaced:
                parent._modules[key] = replaced[id(child)]
    kinds = _names(chosen)
    note = f"LoRA of rank {lora.rank} on {_listed(kinds)}: {trained:,} of {total + trained:,} parameters are trained."
    notes = [note]
    if lora.base:
        notes.append(
            f"{stored / total:.0%} of the base is stored as {lora.base}: the weights of linear layers but output heads."
        )
    return replaced.get(id(adapted), adapted), notes


def is_linear(module: Any) -> bool:
    """Return True for a linear layer, or transformers' `Conv1D`, that its own `forward` computes.

    The projection of torch's `MultiheadAttention` is computed by its owner.
    """
    import torch

    kind = type(module).__name__
    return kind == "Conv1D" or isinstance(module, torch.nn.Linear) and kind != "NonDynamicallyQuantizableLinear"


def _heads(module: Any) -> set[int]:
    """Return the output heads of a module by `id`: the one that transformers names, and layers with a shared weight."""
    owners = Counter(id(weight) for child in module.modules() for weight in child._parameters.values())
    heads = {id(child) for child in module.modules() if is_linear(child) and owners[id(child.weight)] > 1}
    named = getattr(module, "get_output_embeddings", None)
    return heads | ({id(named())} if named is not None else set())


def _chosen(linears: Mapping[str, Any], targets: Sequence[str], label: str) -> list[str]:
    """Return the paths of the layers that `targets` name, all without targets; raise `UserError` for one that matches
    none.
    """
    if not linears:
        raise UserError(f"--lora: `{label}` has no linear layers that could have adapters; leave it out.")
    for target in targets:
        if not any(_matches(path, target) for path in linears):
            raise UserError(
                f"--lora targets: no linear layer of `{label}` is called `{target}`; it has {_listed(_names(linears))}."
            )
    return [path for path in linears if not targets or any(_matches(path, target) for target in targets)]


def _matches(path: str, target: str) -> bool:
    """Return True if `target` is the whole path or its end, as in PEFT's `target_modules`."""
    return path == target or path.endswith(f".{target}")


def _names(paths: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Return the last name of each path, each once, with the name before it if it is a number."""
    names: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")
        first = next((k for k in range(len(parts) - 1, 0, -1) if not parts[k].isdecimal()), 0)
        names[".".join(parts[first:]) or "the module itself"] = None
    return list(names)


def _listed(names: Sequence[str]) -> str:
    """Return names in words, at most `_MOST_NAMES` of them."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
