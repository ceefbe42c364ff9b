"""Tensor-parallel styles of the modules of a torch model, derived from a plan."""

import dataclasses
import math
from collections.abc import Collection, Mapping

from autoshard.errors import FormError, UserError
from autoshard.exports.torch_forms.style_trial import unproven_parents
from autoshard.exports.torch_forms.torch_code import plan_inputs, plan_parameters
from autoshard.planning import ParameterUse, Plan, Spec, is_stacked, stack_names
from autoshard.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Styles:
    """Degrees of data and tensor parallelism of a plan, and the style of every module that is split."""

    data: int
    """Number of parts of the batch."""
    tensor: int
    """Number of devices that share each module."""
    styles: dict[str, str]
    """Style by name of a module, with one entry for each run of layers.

    It is `colwise`, `rowwise`, one of `GATHERED`, `embedding_rowwise` or `embedding_colwise`.
    """
    lacks: tuple[str, ...]
    """A sentence for each parameter whose split no style expresses."""
    tied: dict[str, str] = dataclasses.field(default_factory=dict)
    """Style of the linear layers that share an embedding's weight, by the embedding's name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layers:
    """The linear layers and embeddings of a plan's module; a stack of layers counts as one."""

    tensor: tuple[str, ...]
    """Mesh axes that split modules."""
    styles: dict[str, str]
    """Style by name of a split module (`colwise`, `rowwise`, `embedding_...`), with the prefix `conv1d_` for a layer
    with its columns last.
    """
    linear: dict[str, tuple[int, int]]
    """Numbers of input and output columns by name of each linear layer, split or whole."""
    tied: frozenset[str]
    """Embeddings whose weight a linear layer uses too."""
    others: tuple[str, ...]
    """Split parameters of other modules than linear layers and embeddings."""
    lacks: tuple[str, ...]
    """A sentence for each split that the styles do not express."""


GATHERED = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
"""Variant of each style whose outputs (columns) or inputs (rows) are whole."""
HEADS = {"embedding_rowwise": "colwise_gather_output", "embedding_colwise": "rowwise_split_input"}
"""Style of a linear layer that shares its weight with an embedding, by the embedding's style."""
COLUMNS_LAST = "conv1d_"
"""Prefix of the style of a layer with weights `[in, out]`, as transformers' Conv1D has them."""


def read_styles(plan: Plan, form: str, program: Program | None = None) -> Styles:
    """Return the styles of a plan for an export to `form`, which supports PyTorch's own layers.

    Values stay split only between layers whose module was tried on parts, with the module of `program`.

    Splits of modules that are neither linear nor embeddings, or have their columns last, become sentences in `lacks`.
    Raises: UserError for a plan that splits no module in such a style, or that has no uses of parameters. Plans of
    programs that are no torch modules have none, nor have plans saved by an older version.
    """
    layers = read_layers(plan, form, "split it as FSDP does")
    columns_last = [name for name, style in layers.styles.items() if style.startswith(COLUMNS_LAST)]
    lacks = [f"{name}: it is of no linear layer or embedding; it is whole here." for name in layers.others]
    lacks += [
        f"{name}.weight: it is of a layer with its columns in the last dim, which no style takes; it is whole here."
        for name in columns_last
    ]
    data, tensor = sizes(plan)
    own = {name: style for name, style in layers.styles.items() if name not in columns_last}
    for name in [name for name in own if _has_uneven_rows(plan, name, own[name])]:
        lacks.append(
            f"{name}.weight: {data} x {tensor} devices do not divide its rows, and torch gathers uneven parts of parts "
            "wrongly; it is whole over `tp` here."
        )
        del own[name]
    if not own:
        raise FormError(f"in the {form} form nothing would be split: the plan splits no module by columns or rows.")
    fitted, untried = proven_styles(plan, program, layers, own, frozenset())
    named: dict[str, str] = {}
    for name, style in fitted.items():
        count = (plan.shapes[f"{name}.weight"] or (0,))[0]
        named |= dict.fromkeys(stack_names(name, count), style)
    tied = {name: HEADS[named[name]] for name in sorted(layers.tied) if named.get(name, "") in HEADS}
    return Styles(data, tensor, named, (*layers.lacks, *lacks, *untried), tied)


def _has_uneven_rows(plan: Plan, name: str, style: str) -> bool:
    """Return True if FSDP would split parts of a layer's rows unevenly, and cannot split another dim instead."""
    rows, columns = layer_shape(plan, f"{name}.weight")
    data, tensor = sizes(plan)
    uneven = data > 1 and style in ("colwise", "embedding_rowwise") and bool(rows % (data * tensor))
    return uneven and (f"{name}.bias" in plan.shapes or bool(columns % data))


def read_layers(plan: Plan, form: str, over_batch: str) -> Layers:
    """Return the layers of a plan for an export to `form`. Raises: UserError for a plan without uses of parameters.

    A parameter has a style only if all tensor axes split one dim of it together. `over_batch` completes the sentence on
    a parameter that is also split over the batch's devices, `... which {over_batch}`.
    """
    if not plan.uses:
        raise UserError(
            f"the plan of {plan.program_name} does not say how modules use their parameters, which the {form} form is "
            "made of: plan a torch module or `hf:CONFIG` again."
        )
    data, tensor = batch_and_tensor_axes(plan)
    specs, _ = plan_parameters(plan)
    uses: dict[str, list[ParameterUse]] = {}
    for use in plan.uses:
        uses.setdefault(use.parameter, []).append(use)
    linear: dict[str, tuple[int, int]] = {}
    tied: set[str] = set()
    kinds: dict[str, str] = {}
    transposed = _is_transposed(plan)
    for name in specs:
        kinds[name], sides = _kind(plan, name, uses.get(name, []), transposed)
        path = name.removesuffix(".weight")
        if kinds[name] == "embedding":
            if any(use.output_shape[-1] == layer_shape(plan, name)[0] for use in uses[name][1:]):
                tied.add(path)
        elif kinds[name]:
            linear[path] = sides
    styles, lacks, others, biases = {}, [], [], {}
    for name, spec in specs.items():
        dim = split_by(spec, tensor)
        if dim is not None and not split_together(spec, dim, tensor):
            lacks.append(f"{name}: it is split over some of the axes only; it is whole here.")
        elif dim is not None and name.endswith(".bias"):
            biases[name.removesuffix(".bias")] = name
        elif dim is not None and kinds[name]:
            split_styles = ("colwise", "rowwise")
            styles[name.removesuffix(".weight")] = {
                "embedding": f"embedding_{split_styles[1 - dim]}",
                "linear": split_styles[dim],
                "columns last": COLUMNS_LAST + split_styles[1 - dim],
            }[kinds[name]]
        elif dim is not None:
            others.append(name)
        if any(axis in spec.axes for axis in data):
            lacks.append(f"{name}: it is also split over the batch's devices, which {over_batch}.")
    for path, name in sorted(biases.items()):
        if styles.get(path, "").removeprefix(COLUMNS_LAST) != "colwise":
            lacks.append(f"{name}: its placement follows its module's weight.")
    return Layers(tuple(tensor), styles, linear, frozenset(tied), tuple(others), tuple(lacks))


def proven_styles(
    plan: Plan, program: Program | None, found: Layers, styles: Mapping[str, str], apart: frozenset[str]
) -> tuple[dict[str, str], list[str]]:
    """Return `styles` as `fitting` does, gathered too where the module's code fails on parts, and sentences on that.

    Without a program, or where its module does not run without values, nothing is tried, which a sentence reports.
    """
    fitted = fitting(plan, found, styles, apart)
    unproven = unproven_parents(plan, program, fitted, sizes(plan)[1])
    if unproven is None:
        return fitted, ["a check of the module's views of split values, which needs the plan's program."]
    sentences = [
        f"values that stay split in {parent or 'the module'}: its code takes a part of the heads for something else, "
        "or fails on it; they are gathered there."
        for parent in sorted(unproven)
    ]
    return fitting(plan, found, styles, apart, unproven), sentences


def fitting(
    plan: Plan, found: Layers, styles: Mapping[str, str], apart: frozenset[str], unproven: Collection[str] = ()
) -> dict[str, str]:
    """Return `styles`, each replaced by its `GATHERED` variant where its module does not match its siblings, or where
    the module's parent is in `unproven`.

    Values stay split only between layers split by columns and sibling layers (of one parent module) split by rows that
    consume their results. A parent needs linear layers of both kinds. Modules do not match in three more cases:

    - one of their linear layers is whole;
    - one layer outputs more columns than a row-split layer accepts (several layers in one, out of which shards cannot
      be cut);
    - the parent has another parameter, unless its name is in `apart`.
    """
    siblings: dict[str, set[str]] = {}
    for name in styles:
        siblings.setdefault(name.rpartition(".")[0], set()).add(name)
    fitted = {}
    for parent, names in siblings.items():
        linear = {name for name in found.linear if name.rpartition(".")[0] == parent}
        kinds = {styles[name].removeprefix(COLUMNS_LAST) for name in names}
        rows = [found.linear[name][0] for name in names if styles[name].endswith("rowwise") and name in linear]
        columns = [found.linear[name][1] for name in names if styles[name].endswith("colwise") and name in linear]
        matches = (
            parent not in unproven
            and {"colwise", "rowwise"} <= kinds
            and linear <= names
            and bool(rows and columns)
            and max(columns) <= min(rows)
            and not others_beside(plan, parent, linear) - apart
        )
        for name in names:
            before = COLUMNS_LAST if styles[name].startswith(COLUMNS_LAST) else ""
            own = styles[name].removeprefix(before)
            fitted[name] = before + (own if matches else GATHERED.get(own, own))
    return {name: fitted[name] for name in styles}


def others_beside(plan: Plan, parent: str, linear: set[str]) -> set[str]:
    """Return the parameters below the module `parent` that belong to none of the layers `linear`; empty for the
    root.
    """
    inside = (n for n in plan.arguments if plan.is_weight(n) and parent and n.startswith(f"{parent}."))
    return {name for name in inside if name.rpartition(".")[0] not in linear}


def sizes(plan: Plan) -> tuple[int, int]:
    """Return the number of parts of the batch, and the number of devices that split modules; 1 for no axes."""
    data, tensor = (math.prod(plan.mesh[axis] for axis in axes) for axes in batch_and_tensor_axes(plan))
    return data, tensor


def batch_and_tensor_axes(plan: Plan) -> tuple[list[str], list[str]]:
    """Return the axes that split the batch, and the other axes that split a parameter, both in mesh order.

    The first axes are the plan's `batch_axes`, and those of the first dim of any batch argument. Inputs of other roles
    count if there is no batch argument. An axis that splits sequences alone is in neither list.
    """
    first = set(plan.batch_axes) | {axis for spec in plan_inputs(plan).values() for axis in (spec.dims or ((),))[0]}
    specs, _ = plan_parameters(plan)
    used = {axis for spec in specs.values() for axis in spec.axes}
    data = [axis for axis in plan.mesh if axis in first]
    return data, [axis for axis in plan.mesh if axis in used and axis not in first]


def gathering_axes(plan: Plan) -> list[str]:
    """Return the axes over which FSDP gathers, in mesh order: those of the batch that split a parameter, else all."""
    data, _ = batch_and_tensor_axes(plan)
    used = {axis for spec in plan_parameters(plan)[0].values() for axis in spec.axes}
    return [axis for axis in data if axis in used] or data


def check_axes(plan: Plan, form: str) -> None:
    """Raise `FormError` if a mesh axis splits neither the batch nor a parameter: its devices would all do the same."""
    data, tensor = batch_and_tensor_axes(plan)
    unused = [axis for axis in plan.mesh if axis not in (*data, *tensor) and plan.mesh[axis] > 1]
    if unused:
        raise FormError(
            f"in the {form} form the devices along {' and '.join(unused)} would all do the same: the plan splits "
            "neither the batch nor parameters over them."
        )


def split_by(spec: Spec, axes: list[str]) -> int | None:
    """Return the first dim that one of the axes splits; None if there is none."""
    return next((dim for dim, names in enumerate(spec.dims) if any(axis in names for axis in axes)), None)


def split_together(spec: Spec, dim: int, axes: list[str]) -> bool:
    """Return True if all of `axes` split the dim `dim`, in this order; other axes may stand between them."""
    return [axis for axis in spec.dims[dim] if axis in axes] == axes


def layer_shape(plan: Plan, name: str) -> tuple[int, ...]:
    """Return the shape of a parameter in one layer: without the leading dim of a stack."""
    return plan.shapes[name][is_stacked(name) :]


def _kind(plan: Plan, name: str, uses: list[ParameterUse], turned: bool) -> tuple[str, tuple[int, int]]:
    """Return the kind of the module with the parameter `name`, and the numbers of its input and output columns.

    The kind is `linear`, `columns last`, `embedding`, or empty for modules that no style splits. An embedding and an
    empty kind have (0, 0). The first use decides. Without uses the shape of the bias decides; without a bias, or for
    square weights, the kind is empty. `turned` is True if the module's layers have weights `[in, out]`, which decides
    for square ones.
    """
    shape = layer_shape(plan, name)
    if not name.endswith(".weight") or len(shape) != 2:
        return "", (0, 0)
    if not uses:
        # The result of several layers in one is split up at once, so no op in the plan uses the weight as it is.
        bias = f"{name.removesuffix('.weight')}.bias"
        output_shape = layer_shape(plan, bias) if bias in plan.shapes else ()
        if shape[0] == shape[1] or output_shape not in ((shape[0],), (shape[1],)):
            return "", (0, 0)
        return ("linear", (shape[1], shape[0])) if output_shape == (shape[0],) else ("columns last", shape)
    input_shape, output_shape = uses[0].input_shape, uses[0].output_shape
    if input_shape[-1] == 1 and output_shape[-1] == shape[1] and output_shape[:-1] == input_shape[:-1]:
        return "embedding", (0, 0)
    if (output_shape[-1], input_shape[-1]) == shape and not (shape[0] == shape[1] and turned):
        return "linear", (shape[1], shape[0])
    if (input_shape[-1], output_shape[-1]) == shape:
        return "columns last", shape
    return "", (0, 0)


def _is_transposed(plan: Plan) -> bool:
    """Return True if the module's layers have weights `[in, out]`, as GPT-2's do: some weight that is not square is
    used so.
    """
    seen: set[str] = set()
    for use in plan.uses:
        shape = layer_shape(plan, use.parameter)
        if use.parameter in seen or len(shape) != 2:
            continue
        seen.add(use.parameter)
        if shape[0] != shape[1] and (use.input_shape[-1], use.output_shape[-1]) == shape:
            return True
    return False
