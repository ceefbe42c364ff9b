"""What the forms that plans are exported to can hold: the specs of which arguments, and who decides the rest."""

import dataclasses
import enum
from collections.abc import Mapping

from autoshard.errors import UserError
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec, is_stacked, layer_pattern
from autoshard.program import Program


class Rest(enum.StrEnum):
    """Who decides what a form does not say."""

    PLAN = "plan"
    """Nobody: the form holds the plan whole."""
    XLA = "xla"
    """XLA's propagation, from the specs that are given."""
    DTENSOR = "dtensor"
    """DTensor, which splits one op after the other as its operands are."""
    MAXTEXT = "maxtext"
    """MaxText, which splits by kind of dim."""
    NAMES = "names"
    """Haliax, which splits by the names of dims."""
    STAGES = "stages"
    """The runtime, which runs a program for each stage; what a stage does on its own devices is not in the form."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """One form of an export."""

    name: str
    rest: Rest
    state: bool = True
    """Whether it has specs of the optimizer state; else state is split like its parameter."""
    layers: bool = True
    """Whether a stack of layers is one tensor there."""
    ordered: bool = False
    """Whether axes that split one dim must stand in the order of the mesh."""
    single: bool = False
    """Whether one axis at most splits a dim, and inputs are split by one axis for all, in their first dim."""


FORMS = {
    form.name: form
    for form in (
        Form("jax", Rest.XLA),
        Form("jax-export", Rest.PLAN),
        Form("explicit", Rest.XLA),
        Form("flax", Rest.XLA, state=False),
        Form("maxtext", Rest.MAXTEXT),
        Form("keras", Rest.XLA, state=False, single=True),
        Form("rules", Rest.XLA, state=False),
        Form("haliax", Rest.NAMES, state=False),
        Form("torch-xla", Rest.XLA, state=False, layers=False),
        Form("dtensor", Rest.DTENSOR, state=False, layers=False, ordered=True),
        Form("fsdp2", Rest.DTENSOR, state=False, layers=False),
        Form("transformers", Rest.DTENSOR, state=False, layers=False),
        Form("torchtitan", Rest.DTENSOR, state=False, layers=False),
        Form("hlo", Rest.XLA),
        Form("torch-pipelining", Rest.STAGES, state=False, layers=False),
    )
}


def form_named(name: str) -> Form:
    """The form of that name; `UserError` for another."""
    if name not in FORMS:
        raise UserError(f"there is no export to {name!r}; choose from {', '.join(FORMS)}.")
    return FORMS[name]


def check_names(form: Form, program_name: str, program: Program | None, problem: str = "") -> None:
    """Raise `UserError` where a form goes by names of dims and the program gives none, or is not there (`problem`)."""
    if form.rest is Rest.NAMES and program is None:
        raise UserError(f"the {form.name} form goes by the names that dims have in {program_name}: {problem}")
    if form.rest is Rest.NAMES and program is not None and not program.dims:
        raise UserError(
            f"the {form.name} form goes by names of dims, and no argument of {program_name} is an array with named "
            "axes (Haliax's NamedArray); --to jax and --to flax need none."
        )


def in_mesh_order(spec: Spec, mesh: Mapping[str, int]) -> bool:
    """Whether the axes that split one dim stand in the order of the mesh, in every dim."""
    axes = list(mesh)
    return all([axes.index(axis) for axis in dim] == sorted(axes.index(axis) for axis in dim) for dim in spec.dims)


def dims_by_axis(spec: Spec, mesh: Mapping[str, int]) -> list[int | None] | None:
    """For each mesh axis the dim that it splits, or None; None at all if DTensor cannot express the spec.

    DTensor splits a dim by several axes in the order of the mesh, major first.
    """
    if not in_mesh_order(spec, mesh):
        return None
    where = {axis: dim for dim, names in enumerate(spec.dims) for axis in names}
    return [where.get(axis) for axis in mesh]


def layer_spec(plan: Plan, name: str) -> Spec:
    """The spec of a parameter as a torch module has it: of one layer's where the plan stacks layers."""
    spec = plan.arguments[name]
    return Spec(spec.dims[1:]) if is_stacked(name) else spec


def module_pattern(plan: Plan, name: str) -> str:
    """A regular expression for the names that a torch module gives to a parameter of the plan, one for each layer."""
    return layer_pattern(name, (plan.shapes[name] or (0,))[0])


def parameter_of(state: str, shapes: Mapping[str, tuple[int, ...]], roles: Mapping[str, str]) -> str | None:
    """The parameter that an optimizer state belongs to: the longest name that the state's ends with, of its shape."""
    parts = state.split(".")
    for start in range(1, len(parts)):
        name = ".".join(parts[start:])
        if roles.get(name) == "parameter" and shapes[name] == shapes[state]:
            return name
    # JAX steps name both by where they stand: `params.up` and `opt_state.0.mu.up`.
    fitting = [
        (len(_common_end(parts, name.split("."))), name)
        for name, role in roles.items()
        if role == "parameter" and shapes[name] == shapes[state]
    ]
    length, name = max(fitting, key=lambda pair: pair[0], default=(0, None))
    return name if length and sum(each == length for each, _ in fitting) == 1 else None


def _common_end(a: list[str], b: list[str]) -> list[str]:
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return a[len(a) - count :]


def inputs_axis(specs: Mapping[str, Spec], roles: Mapping[str, str]) -> tuple[str, ...]:
    """The axis, if any, that splits the first dim of the first input that is split there."""
    firsts = (spec.dims[0][:1] for name, spec in specs.items() if roles[name] == "batch" and spec.dims)
    return next((axes for axes in firsts if axes), ())


def held_specs(
    form: Form,
    specs: Mapping[str, Spec],
    shapes: Mapping[str, tuple[int, ...]],
    roles: Mapping[str, str],
    mesh: Mapping[str, int],
) -> dict[str, Spec | None]:
    """What becomes of the specs of a plan's arguments in a form; None for what it leaves to others."""
    held: dict[str, Spec | None] = {}
    for name, spec in specs.items():
        if not form.layers and is_stacked(name) and roles[name] != "batch":
            spec = Spec(((), *spec.dims[1:]))
        if form.ordered and not in_mesh_order(spec, mesh):
            spec = Spec.replicated(len(spec.dims))
        if form.single:
            spec = Spec(tuple(axes[:1] for axes in spec.dims))
        held[name] = spec
    if form.single:
        axis = inputs_axis(specs, roles)
        for name in specs:
            if roles[name] == "batch" and shapes[name]:
                held[name] = Spec((axis, *((),) * (len(shapes[name]) - 1)))
    if not form.state:
        for name, role in roles.items():
            if role == "optimizer_state":
                parameter = parameter_of(name, shapes, roles)
                held[name] = None if parameter is None else held[parameter]
    return held


def splits_nothing(specs: Mapping[str, Spec | None], mesh: Mapping[str, int]) -> bool:
    """Whether every device would hold all of these whole."""
    return all(spec is None or spec.shards(mesh) == 1 for spec in specs.values())


def splits_in_plan(plan: Plan) -> int:
    """How many arguments, results and values inside a plan splits."""
    named = [*plan.arguments.values(), *plan.results.values()]
    inner = [pin.spec for pin in plan.pins] + [s for region in plan.regions for s in region.results]
    inner += [spec for call in plan.calls for spec in (*call.operands, *call.results)]
    return sum(spec.shards(plan.mesh) > 1 for spec in (*named, *inner))


# MaxText


USES = ("expert", "data", "fsdp", "tensor", "context")
"""What MaxText can use an axis for."""


def maxtext_uses(plan: Plan) -> dict[str, str]:
    """What each axis does, in MaxText's words: pipeline, expert, data, fsdp, tensor or context; read off a plan."""
    return {axis: _use(plan, axis) for axis in plan.mesh}


def _use(plan: Plan, axis: str) -> str:
    said = plan.origin.form_axes.get(axis)
    if said in USES:
        return said
    batch = [spec for name, spec in plan.arguments.items() if plan.roles[name] == "batch" and spec.dims]
    stored = [
        name for name in plan.arguments
        if (plan.is_weight(name) or plan.roles[name] == "optimizer_state") and axis in plan.arguments[name].axes
    ]  # fmt: skip
    groups = set(plan.axis_roles.get(axis, ()))
    if plan.pipeline is not None and "stage" in groups:
        return "pipeline"
    if "experts" in groups:
        return "expert"
    if "batch" in groups or any(axis in spec.dims[0] for spec in batch):
        return "fsdp" if stored else "data"
    if groups & {"heads", "kv heads", "ffn"}:
        return "tensor"
    if "sequence" in groups or any(axis in dim for spec in batch for dim in spec.dims[1:]):
        return "context"
    return "tensor"
