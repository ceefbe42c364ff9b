"""Which module of a torch model is split in which style of tensor parallelism, read off a plan."""

import dataclasses
import math

from autoshard.errors import UserError
from autoshard.plan import ParameterUse, Plan, Spec, is_stacked, stack_names
from autoshard.report._export_torch import plan_inputs, plan_parameters


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


GATHERED = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
"""The style in which a module gives, or takes, values that are whole."""


def read_styles(plan: Plan, form: str) -> Styles:
    """The styles of a plan for an export to `form`.

    Raises `UserError` for a plan that splits no module in such a style, and for one that does not know how modules use
    their parameters: of a program that is no torch module, or saved by an older version.
    """
    if not plan.uses:
        raise UserError(
            f"the plan of {plan.program_name} does not say how modules use their parameters, which the {form} form is "
            "made of: plan a torch module or `hf:CONFIG` again."
        )
    data, tensor = batch_and_tensor_axes(plan)
    specs, _ = plan_parameters(plan)
    first: dict[str, ParameterUse] = {}
    for use in plan.uses:
        first.setdefault(use.parameter, use)
    styles, lacks = {}, []
    for name, spec in specs.items():
        style, lack = _style(plan, name, spec, first.get(name), tensor)
        if style:
            styles[name] = style
        if lack:
            lacks.append(f"{name}: {lack}.")
        if any(axis in spec.axes for axis in data):
            lacks.append(f"{name}: it is also split over the batch's devices, which FSDP does in its own way.")
    bare = {name for name in styles if name.endswith(".bias")}
    for name in sorted(bare):
        if styles[name] != styles.get(f"{name.removesuffix('.bias')}.weight"):
            lacks.append(f"{name}: it is held as its module's weight asks for.")
    modules = {name.removesuffix(".weight"): style for name, style in styles.items() if name not in bare}
    if not modules:
        raise UserError(f"in the {form} form nothing would be split: the plan splits no module by columns or rows.")
    named: dict[str, str] = {}
    for name, style in _fitting(modules, first).items():
        layers = (plan.shapes[f"{name}.weight"] or (0,))[0]
        named |= dict.fromkeys(stack_names(name, layers), style)
    sizes = [math.prod(plan.mesh[axis] for axis in axes) for axes in (data, tensor)]
    return Styles(sizes[0], sizes[1], named, tuple(lacks))


def batch_and_tensor_axes(plan: Plan) -> tuple[list[str], list[str]]:
    """Axes that split the first dim of an input, and other axes that split a parameter, in the order of the mesh."""
    first = {axis for spec in plan_inputs(plan).values() for axis in next(filter(None, spec.dims), ())}
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


def _style(plan: Plan, name: str, spec: Spec, use: ParameterUse | None, tensor: list[str]) -> tuple[str, str]:
    """The style of the module that owns a parameter, or why there is none; both are empty for a whole one."""
    dim = split_by(spec, tensor)
    if dim is None:
        return "", ""
    if not split_together(spec, dim, tensor):
        return "", "it is split over some of the axes only; it is whole here"
    if name.endswith(".bias"):
        return "colwise", ""
    shape = plan.shapes[name][is_stacked(name) :]
    if use is None or not name.endswith(".weight") or len(shape) != 2:
        return "", "it is of no linear layer or embedding; it is whole here"
    if use.input_shape[-1] == 1 and use.output_shape[-1] == shape[1] and use.output_shape[:-1] == use.input_shape[:-1]:
        return ("embedding_rowwise", "embedding_colwise")[dim], ""
    if (use.output_shape[-1], use.input_shape[-1]) != shape or _is_transposed(plan):
        return "", "it is of a layer with its columns in the last dim, which no style takes; it is whole here"
    return ("colwise", "rowwise")[dim], ""


def _is_transposed(plan: Plan) -> bool:
    """Whether the module's layers have weights `[in, out]`, as GPT-2's do: told from one that is not square."""
    seen: set[str] = set()
    for use in plan.uses:
        shape = plan.shapes[use.parameter][is_stacked(use.parameter) :]
        if use.parameter in seen or len(shape) != 2:
            continue
        seen.add(use.parameter)
        if shape[0] != shape[1] and (use.input_shape[-1], use.output_shape[-1]) == shape:
            return True
    return False


def _fitting(modules: dict[str, str], uses: dict[str, ParameterUse]) -> dict[str, str]:
    """With whole values where modules do not meet: only columns whose results rows beside them take stay split."""
    beside: dict[str, set[str]] = {}
    for name, style in modules.items():
        beside.setdefault(name.rpartition(".")[0], set()).add(style)
    linear: dict[str, set[str]] = {}
    for name in uses:
        path = name.removesuffix(".weight")
        linear.setdefault(path.rpartition(".")[0], set()).add(path)
    found = {}
    for name, style in modules.items():
        parent = name.rpartition(".")[0]
        meets = {"colwise", "rowwise"} <= beside[parent] and all(path in modules for path in linear[parent])
        found[name] = style if meets else GATHERED.get(style, style)
    return found
