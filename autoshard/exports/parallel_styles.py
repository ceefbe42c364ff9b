"""Which module of a torch model is split in which style of tensor parallelism, read off a plan."""

import dataclasses
import math
from collections.abc import Mapping

from autoshard.errors import UserError
from autoshard.exports.torch_code import plan_inputs, plan_parameters
from autoshard.planning import ParameterUse, Plan, Spec, is_stacked, stack_names


@dataclasses.dataclass(frozen=True, slots=True)
class Styles:
    """What of a plan is data parallel, and the style of every module that is split over the devices beside."""

    data: int
    """Devices that each take their own part of the batch."""
    tensor: int
    """Devices that split modules between them."""
    styles: dict[str, str]
    """Name of a module, `*` for any layer -> `colwise`, `rowwise`, or one of `GATHERED`; embeddings also
    `embedding_rowwise` and `embedding_colwise`."""
    lacks: tuple[str, ...]
    """A sentence for each parameter that is split in a way that no style says."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layers:
    """The linear layers and embeddings of a plan's module, a stack of layers as one."""

    tensor: tuple[str, ...]
    """Axes that split modules."""
    styles: dict[str, str]
    """Name of a module that is split -> its style; `conv1d_` before that of a layer with its columns last."""
    linear: dict[str, tuple[int, int]]
    """Name of every linear layer -> how many columns it takes and gives."""
    tied: frozenset[str]
    """Embeddings that are linear layers as well."""
    others: tuple[str, ...]
    """Parameters that are split and of none of these."""
    lacks: tuple[str, ...]


GATHERED = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
"""The style in which a module gives, or takes, values that are whole."""
COLUMNS_LAST = "conv1d_"
"""Before the style of a layer with weights `[in, out]`, as transformers' Conv1D has them."""


def read_styles(plan: Plan, form: str) -> Styles:
    """The styles of a plan for an export to `form`, which knows PyTorch's own layers.

    Raises `UserError` for a plan that splits no module in such a style, and for one that does not know how modules use
    their parameters: of a program that is no torch module, or saved by an older version.
    """
    found = read_layers(plan, form)
    columns_last = [name for name, style in found.styles.items() if style.startswith(COLUMNS_LAST)]
    lacks = [f"{name}: it is of no linear layer or embedding; it is whole here." for name in found.others]
    lacks += [
        f"{name}.weight: it is of a layer with its columns in the last dim, which no style takes; it is whole here."
        for name in columns_last
    ]
    own = {name: style for name, style in found.styles.items() if name not in columns_last}
    if not own:
        raise UserError(f"in the {form} form nothing would be split: the plan splits no module by columns or rows.")
    named: dict[str, str] = {}
    for name, style in fitting(plan, found, own, frozenset()).items():
        layers = (plan.shapes[f"{name}.weight"] or (0,))[0]
        named |= dict.fromkeys(stack_names(name, layers), style)
    data, tensor = sizes(plan)
    return Styles(data, tensor, named, (*found.lacks, *lacks))


def read_layers(plan: Plan, form: str) -> Layers:
    """The layers of a plan. Raises `UserError` for one that does not know how modules use their parameters."""
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
    turned = _is_transposed(plan)
    for name in specs:
        kinds[name], sides = _kind(plan, name, uses.get(name, []), turned)
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
            ways = ("colwise", "rowwise")
            styles[name.removesuffix(".weight")] = {
                "embedding": f"embedding_{ways[1 - dim]}",
                "linear": ways[dim],
                "columns last": COLUMNS_LAST + ways[1 - dim],
            }[kinds[name]]
        elif dim is not None:
            others.append(name)
        if any(axis in spec.axes for axis in data):
            instead = "hold it whole here" if form == "transformers" else "split it as FSDP does"
            lacks.append(f"{name}: it is also split over the batch's devices, which {instead}.")
    for path, name in sorted(biases.items()):
        if styles.get(path, "").removeprefix(COLUMNS_LAST) != "colwise":
            lacks.append(f"{name}: it is held as its module's weight asks for.")
    return Layers(tuple(tensor), styles, linear, frozenset(tied), tuple(others), tuple(lacks))


def fitting(plan: Plan, found: Layers, styles: Mapping[str, str], apart: frozenset[str]) -> dict[str, str]:
    """With whole values where modules do not meet: only columns whose results rows beside them take stay split.

    They do not meet where a layer of theirs is whole, where one gives more columns than the rows take (several layers
    in one, which shards cannot be cut out of), and where anything else that has parameters is beside them, unless its
    name is in `apart`.
    """
    beside: dict[str, set[str]] = {}
    for name in styles:
        beside.setdefault(name.rpartition(".")[0], set()).add(name)
    made = {}
    for parent, names in beside.items():
        linear = {name for name in found.linear if name.rpartition(".")[0] == parent}
        ways = {styles[name].removeprefix(COLUMNS_LAST) for name in names}
        rows = [found.linear[name][0] for name in names if styles[name].endswith("rowwise") and name in linear]
        columns = [found.linear[name][1] for name in names if styles[name].endswith("colwise") and name in linear]
        meets = (
            {"colwise", "rowwise"} <= ways
            and linear <= names
            and bool(rows and columns)
            and max(columns) <= min(rows)
            and not others_beside(plan, parent, linear) - apart
        )
        for name in names:
            before = COLUMNS_LAST if styles[name].startswith(COLUMNS_LAST) else ""
            own = styles[name].removeprefix(before)
            made[name] = before + (own if meets else GATHERED.get(own, own))
    return {name: made[name] for name in styles}


def others_beside(plan: Plan, parent: str, linear: set[str]) -> set[str]:
    """Parameters below a module that are of none of its own linear layers."""
    inside = (n for n in plan.arguments if plan.is_weight(n) and parent and n.startswith(f"{parent}."))
    return {name for name in inside if name.rpartition(".")[0] not in linear}


def sizes(plan: Plan) -> tuple[int, int]:
    """How many devices share the batch, and how many split modules."""
    data, tensor = (math.prod(plan.mesh[axis] for axis in axes) for axes in batch_and_tensor_axes(plan))
    return data, tensor


def batch_and_tensor_axes(plan: Plan) -> tuple[list[str], list[str]]:
    """Axes that split the first dim of an input, and other axes that split a parameter, in the order of the mesh."""
    inputs = plan_inputs(plan)
    # Of a module on the meta device buffers are inputs too.
    batch = {name: spec for name, spec in inputs.items() if plan.roles.get(f"batch.{name}") == "batch"} or inputs
    first = {axis for spec in batch.values() for axis in next(filter(None, spec.dims), ())}
    specs, _ = plan_parameters(plan)
    used = {axis for spec in specs.values() for axis in spec.axes}
    data = [axis for axis in plan.mesh if axis in first]
    return data, [axis for axis in plan.mesh if axis in used and axis not in first]


def split_by(spec: Spec, axes: list[str]) -> int | None:
    """The first dim that one of the axes splits."""
    return next((dim for dim, names in enumerate(spec.dims) if any(axis in names for axis in axes)), None)


def split_together(spec: Spec, dim: int, axes: list[str]) -> bool:
    """Whether all of the axes split that dim, in the order of the mesh."""
    return [axis for axis in spec.dims[dim] if axis in axes] == axes


def layer_shape(plan: Plan, name: str) -> tuple[int, ...]:
    """The shape of a parameter as one layer has it."""
    return plan.shapes[name][is_stacked(name) :]


def _kind(plan: Plan, name: str, uses: list[ParameterUse], turned: bool) -> tuple[str, tuple[int, int]]:
    """What a parameter is of: `linear`, `columns last`, `embedding`, or nothing that a style takes.

    With it how many columns the layer takes and gives.
    """
    shape = layer_shape(plan, name)
    if not name.endswith(".weight") or len(shape) != 2:
        return "", (0, 0)
    if not uses:
        # What several layers in one give is taken apart at once, so that no op is seen to take the weight as it is.
        bias = f"{name.removesuffix('.weight')}.bias"
        given = layer_shape(plan, bias) if bias in plan.shapes else ()
        if shape[0] == shape[1] or given not in ((shape[0],), (shape[1],)):
            return "", (0, 0)
        return ("linear", (shape[1], shape[0])) if given == (shape[0],) else ("columns last", shape)
    taken, given = uses[0].input_shape, uses[0].output_shape
    if taken[-1] == 1 and given[-1] == shape[1] and given[:-1] == taken[:-1]:
        return "embedding", (0, 0)
    if (given[-1], taken[-1]) == shape and not (shape[0] == shape[1] and turned):
        return "linear", (shape[1], shape[0])
    if (taken[-1], given[-1]) == shape:
        return "columns last", shape
    return "", (0, 0)


def _is_transposed(plan: Plan) -> bool:
    """Whether the module's layers have weights `[in, out]`, as GPT-2's do: told from one that is not square."""
    seen: set[str] = set()
    for use in plan.uses:
        shape = layer_shape(plan, use.parameter)
        if use.parameter in seen or len(shape) != 2:
            continue
        seen.add(use.parameter)
        if shape[0] != shape[1] and (use.input_shape[-1], use.output_shape[-1]) == shape:
            return True
    return False
