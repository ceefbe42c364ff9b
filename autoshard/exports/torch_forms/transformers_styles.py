"""Styles of transformers' `tp_plan` and `ep_plan` for the modules and parameters of a plan's model."""

import dataclasses
import re
from collections.abc import Iterable, Mapping

from autoshard.errors import FormError
from autoshard.exports.torch_forms.parallel_styles import (  # fmt: skip
    COLUMNS_LAST,
    HEADS,
    Layers,
    batch_and_tensor_axes,
    layer_shape,
    others_beside,
    proven_styles,
    read_layers,
    sizes,
    split_by,
    split_together,
)
from autoshard.planning import Plan, layer_spec
from autoshard.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class TransformersStyles:
    """All rules of a plan for transformers; names have `*` for numbers, as transformers writes them."""

    data: int
    """Number of parts of the batch."""
    tensor: int
    """Number of devices that share each module."""
    gathers: bool
    """True if the batch's devices split parameters as well, by FSDP."""
    rules: dict[str, str]
    """Style by name of a split module or parameter, and of replicated norms and heads that need a rule."""
    experts: dict[str, str]
    """Style by name of a module whose experts are distributed over devices, and of its parameters: rules of an
    `ep_plan`.
    """
    whole: tuple[str, ...]
    """All other modules with parameters, and parameters that are no module's `weight` or `bias`. They override the
    rules of a model class.
    """
    lacks: tuple[str, ...]
    """A sentence for each split that no style expresses."""


_PACKED = {
    ("linear", "gate_up_proj"): "packed_colwise",
    ("linear", "down_proj"): "rowwise",
    ("turned", "gate_up_proj"): "packed_rowwise",
    ("turned", "down_proj"): "colwise",
}
"""Style that splits the width of every expert, by layout and name of the experts' weights.

`linear` is `[experts, out, in]`, `turned` is `[experts, in, out]`.
"""
_BIASES = {"gate_up_proj_bias", "down_proj_bias"}
"""Names of experts' biases."""
_GRADIENTS = "replicated_with_grad_allreduce"
"""Style of a replicated module whose gradients devices compute in part and sum."""


def read_transformers(plan: Plan, program: Program | None = None) -> TransformersStyles:
    """Return the rules of a plan; its module is tried on parts if the plan's `program` is given.

    Routers of experts stay whole, and so do tied embeddings whose linear layer is not found. Layers of one name,
    numbers aside, share one style; if they differ, their parent's modules stay whole. Raises: UserError for a plan
    without a split that a style expresses, and as `read_layers` does.
    """
    data, tensor = sizes(plan)
    gathers = bool(data > 1 and _split_over_batch(plan))
    if gathers and tensor == 1:
        return TransformersStyles(data, tensor, gathers, {}, {}, (), ())
    layers = read_layers(plan, "transformers", "split it as FSDP does")
    experts, of_experts, lacks = _experts(plan, layers)
    routers = {
        name for name, (_, count) in layers.linear.items() if name in layers.styles and _is_router(plan, name, count)
    }
    lacks += [f"{name}.weight: it is the router of experts, which no style splits; it is whole here."
              for name in sorted(routers)]  # fmt: skip
    styles = {name: style for name, style in layers.styles.items() if name not in routers}
    for name in sorted(name for name in styles if name in layers.tied and not _has_head(plan, name)):
        lacks.append(f"{name}.weight: a layer that is not found shares it with the embedding; it is whole here.")
        del styles[name]
    norms = _norms(plan, layers)
    rules, untried = proven_styles(plan, program, layers, styles, frozenset(norms))
    lacks += untried
    for name in sorted(layers.tied):
        if _has_head(plan, name):
            rules["lm_head"] = HEADS.get(rules.get(name, ""), "replicate")
    for name in norms:
        path = name.rpartition(".")[0]
        if any(
            rules.get(each) in _STAY for each in layers.linear if each.rpartition(".")[0] == path.rpartition(".")[0]
        ):
            rules[path] = _GRADIENTS
    ruled = {name.rpartition(".")[0] for name in (*experts, *of_experts)}
    rest = [name for name in layers.others if name.rpartition(".")[0] not in ruled and not _named(name, lacks)]
    lacks += [f"{name}: it is of no linear layer or embedding; it is whole here." for name in rest]
    if not any(style != "replicate" for style in (*rules.values(), *of_experts.values(), *experts.values())):
        whole = "".join(f" {each}" for each in lacks if each not in untried)
        raise FormError(
            "in the transformers form nothing would be split: the plan splits no module by columns or rows, and no "
            f"experts, as --pin '*q_proj.weight=model,None' would.{whole}"
        )
    rules, unlike = _by_wildcard(plan, rules | of_experts)
    experts, _ = _by_wildcard(plan, experts)
    lacks += [
        f"{name}: layers of it differ, of which transformers takes one style; it is whole here." for name in unlike
    ]
    return TransformersStyles(
        data, tensor, gathers, rules, experts, _whole(plan, rules, experts), (*layers.lacks, *lacks)
    )


_STAY = {"colwise", f"{COLUMNS_LAST}colwise"}
"""Styles of layers whose results stay split."""


def _split_over_batch(plan: Plan) -> bool:
    """Return True if the axes that split the batch split a weight too."""
    data, _ = batch_and_tensor_axes(plan)
    return any(axis in spec.axes for name, spec in plan.arguments.items() if plan.is_weight(name) for axis in data)


def _named(name: str, lacks: Iterable[str]) -> bool:
    """Return True if one of the sentences begins with that name and a colon."""
    return any(lack.startswith(f"{name}:") for lack in lacks)


def _has_head(plan: Plan, embedding: str) -> bool:
    """Return True if the linear layer that shares an embedding's weight is `lm_head`: no weight lies outside of the
    base model. The first part of the embedding's name is the base model's.
    """
    base = embedding.partition(".")[0]
    names = [name for name in plan.arguments if plan.is_weight(name)]
    return base != embedding and all(name.startswith(f"{base}.") for name in names)


def _norms(plan: Plan, found: Layers) -> list[str]:
    """Return the unsplit weights of norms over single heads, which stand between layers split by columns.

    A weight of one dim counts if no sibling linear layer has its size. Each device computes a part of its gradient.
    """
    parents = {name.rpartition(".")[0] for name in found.styles if found.styles[name] in _STAY}
    norms = []
    for parent in parents:
        linear = {name for name in found.linear if name.rpartition(".")[0] == parent}
        widths = {found.linear[name][1] for name in linear} | {found.linear[name][0] for name in linear}
        for name in others_beside(plan, parent, linear):
            shape, owner = layer_shape(plan, name), name.rpartition(".")[0]
            if len(shape) == 1 and shape[0] not in widths and owner.rpartition(".")[0] == parent:
                if not layer_spec(plan, name).axes:
                    norms.append(name)
    return sorted(norms)


def _experts(plan: Plan, found: Layers) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return the rules of modules split by experts, those of modules split by width, and sentences on other splits.

    A module of experts owns a parameter of three dims that is not called `weight`.
    """
    modules: dict[str, list[str]] = {}
    for name in plan.arguments:
        if plan.is_weight(name) and len(layer_shape(plan, name)) == 3 and not name.endswith(".weight"):
            modules.setdefault(name.rpartition(".")[0], []).append(name)
    by_expert: dict[str, str] = {}
    by_width: dict[str, str] = {}
    lacks: list[str] = []
    for path in modules:
        names = [name for name in plan.arguments if name.rpartition(".")[0] == path and plan.is_weight(name)]
        split = [name for name in names if split_by(layer_spec(plan, name), list(found.tensor)) is not None]
        if split:
            way, rules = _expert_rules(plan, path, names, split, found.tensor)
            into = by_expert if way == "experts" else by_width
            into.update(rules)
            if not rules:
                lacks += [f"{name}: {way}; it is whole here." for name in split]
            else:
                lacks += [f"{name}: it is split with the other weights of its experts, as their style asks for."
                          for name in sorted(set(names) - set(split))]  # fmt: skip
    return by_expert, by_width, lacks


def _expert_rules(
    plan: Plan, path: str, names: list[str], split: list[str], axes: tuple[str, ...]
) -> tuple[str, dict[str, str]]:
    """Return the split of a module's experts, `experts` or `width`, and its rules: style by name of module and
    parameters.

    If no style expresses the split, return the reason and no rules.

    - `path`: name of the module.
    - `names`: its parameters.
    - `split`: those of its parameters that the axes split.
    - `axes`: mesh axes that split modules.
    """
    keys = {name.rpartition(".")[2]: name for name in names}
    layout = _layout(plan, keys)
    if not layout:
        return "its module is none of experts that transformers has styles for (`gate_up_proj` and `down_proj`)", {}
    specs = {name: layer_spec(plan, name) for name in split}
    dims = {name: split_by(spec, list(axes)) or 0 for name, spec in specs.items()}
    if not all(split_together(spec, dims[name], list(axes)) for name, spec in specs.items()):
        return "it is split over some of the axes only", {}
    tensor = sizes(plan)[1]
    count, biased = layer_shape(plan, keys["down_proj"])[0], bool(keys.keys() & _BIASES)
    if set(dims.values()) == {0}:
        if count % tensor:
            return f"{count} experts do not divide by {tensor} devices", {}
        if layout == "turned" and not biased:
            return "experts with weights [experts, in, out] and no biases have no style that splits them by experts", {}
        return "experts", dict.fromkeys(names, "grouped_gemm") | {path: "ep_dispatch_experts"}
    wide = {"linear": {"gate_up_proj": 1, "down_proj": 2}, "turned": {"gate_up_proj": 2, "down_proj": 1}}[layout]
    if any(wide.get(name.rpartition(".")[2]) != dim for name, dim in dims.items()):
        return "it is split neither by experts nor by their width, nor all weights of its module alike", {}
    if biased:
        return "experts with biases have no style that splits them by their width", {}
    if layer_shape(plan, keys["down_proj"])[wide["down_proj"]] % tensor:
        return f"the width of an expert does not divide by {tensor} devices", {}
    return "width", {keys[key]: _PACKED[layout, key] for key in ("gate_up_proj", "down_proj")} | {
        path: "moe_tp_experts"
    }


def _layout(plan: Plan, keys: Mapping[str, str]) -> str:
    """Return `linear` for experts' weights `[experts, out, in]`, `turned` for `[experts, in, out]`.

    Return an empty text for other modules: other parameters, or a first weight not twice as wide as the second. `keys`
    maps the last part of a parameter's name to the name. If both layouts fit, it is `linear`.
    """
    if not {"gate_up_proj", "down_proj"} <= keys.keys() <= {"gate_up_proj", "down_proj"} | _BIASES:
        return ""
    up, down = (layer_shape(plan, keys[key]) for key in ("gate_up_proj", "down_proj"))
    if len(up) != 3 or len(down) != 3 or up[0] != down[0]:
        return ""
    if up[1:] == (2 * down[2], down[1]):
        return "linear"
    return "turned" if up[1:] == (down[2], 2 * down[1]) else ""


def _is_router(plan: Plan, name: str, count: int) -> bool:
    """Return True if the layer `name` outputs one number for each expert of a module of experts next to it or to a
    parent.

    `count` is the layer's number of output columns.
    """
    while name := name.rpartition(".")[0]:
        siblings = [n for n in plan.arguments if n.startswith(f"{name}.") and plan.is_weight(n)]
        if any(len(layer_shape(plan, n)) == 3 and layer_shape(plan, n)[0] == count for n in siblings
               if n.removeprefix(f"{name}.").count(".") == 1 and not n.endswith(".weight")):  # fmt: skip
            return True
    return False


def _by_wildcard(plan: Plan, rules: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the rules by names with `*` for every number, and the parents whose layers differ, sorted.

    Layers differ if they have two styles, or a style in some layers and none in others. All modules of such parents
    lose their rules.
    """
    styles: dict[str, set[str]] = {}
    for name, style in rules.items():
        styles.setdefault(_wildcard(name), set()).add(style)
    # A module that is split in some layers and whole in others has two styles as well.
    for name in _owners(plan):
        if _wildcard(name) in styles and name not in rules:
            styles[_wildcard(name)].add("")
    unlike = {name.rpartition(".")[0] for name, found in styles.items() if len(found) > 1}
    uniform = {name: min(found) for name, found in styles.items() if name.rpartition(".")[0] not in unlike}
    return uniform, sorted(unlike)


def _owners(plan: Plan) -> list[str]:
    """Return the modules that own weights, and parameters that are no module's `weight` or `bias`, in the
    plan's order.
    """
    names = [name for name in plan.arguments if plan.is_weight(name)]
    return [re.sub(r"\.(weight|bias)$", "", name) for name in names]


def _whole(plan: Plan, rules: Mapping[str, str], experts: Mapping[str, str]) -> tuple[str, ...]:
    """Return each module with parameters, and each such module within a layer, that has no rule; names have `*` for
    numbers.

    Modules that contain only layers are left out.
    """
    names: dict[str, None] = {}
    for owner in map(_wildcard, _owners(plan)):
        parts = owner.split(".")
        start = parts.index("*") + 2 if "*" in parts else len(parts)
        names |= dict.fromkeys(".".join(parts[:end]) for end in range(min(start, len(parts)), len(parts) + 1))
    return tuple(name for name in names if name not in rules and name not in experts)


def _wildcard(name: str) -> str:
    """Return a name as transformers writes it: `*` for every number, and for a stack of some layers such as `[2:4]`."""
    return re.sub(r"(?<=\.)(\d+|\[[\d:]*\])(?=\.|$)", "*", name)
