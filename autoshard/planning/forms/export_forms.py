"""Forms to which plans are exported: the specs that each form can express, and the system that decides the rest."""

import dataclasses
import enum
from collections.abc import Collection, Mapping

from autoshard.errors import UserError
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.planned_stages import FORM_BY_STAGE
from autoshard.planning.record.spec import Spec, is_stacked, layer_pattern
from autoshard.program import WEIGHTS, Program


class Rest(enum.StrEnum):
    """The system that decides the specs that a form does not express."""

    PLAN = "plan"
    """None: the form expresses the whole plan."""
    XLA = "xla"
    """XLA's propagation, from the given specs."""
    DTENSOR = "dtensor"
    """DTensor, which splits one op after the other like its operands."""
    MAXTEXT = "maxtext"
    """MaxText, which splits by kind of dim."""
    NAMES = "names"
    """Haliax, which splits by the names of dims."""
    STAGES = "stages"
    """The runtime of a program for each stage; the form has no specs within a stage."""


class HeldRemat(enum.StrEnum):
    """The recomputation of layers that a form can hold."""

    ALL = "all"
    """Every policy: the form's step is the user's own, which recomputes as it does."""
    BASES = "bases"
    """Policies without named values, each for a run of layers."""
    FIRST = "first"
    """One policy, that of the first layer, for all layers; layers cannot do without recomputation."""
    WHOLE = "whole"
    """Recomputation of everything in all layers, or of nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """Facts about one form of an export. Planning, pricing, the command and errors read them here.

    A file of `autoshard/exports` declares the writer of the form with `writes`.
    """

    name: str
    help: str
    """Code or frameworks that the form is for, as users read it."""
    rest: Rest
    text: bool = True
    """True for a text; False for a file of bytes, which `autoshard.exec.jax_export` writes."""
    reads_program: bool = False
    """True if the writer reads the plan's program too; else the program is needed for the price only."""
    hints: bool = False
    """True if the form has specs of values inside of the step."""
    state: bool = True
    """True if the form has specs of the optimizer state; else state is split like its parameter."""
    layers: bool = True
    """True if a stack of layers is one tensor in the form."""
    ordered: bool = False
    """True if axes that split one dim must be in the order of the mesh."""
    single: bool = False
    """True if at most one axis splits a dim, and the same axis splits the first dim of all inputs."""
    gathers: bool = False
    """True if split parameters are gathered before use, while each process computes its part of the batch."""
    hybrid: bool = False
    """True if a form that gathers may split parameters over some of the batch's axes, and copy them over the others."""
    replicates: bool = False
    """True if a form that gathers leaves parameters whole where a plan splits none over the batch's axes."""
    tensor: bool = True
    """False if the form splits the batch and gathered parameters alone, so every axis splits both."""
    remat: HeldRemat = HeldRemat.ALL
    shares_batch: bool = False
    """True if the form needs an axis that splits the batch."""
    splits_parameters: bool = False
    """True if the form needs an axis that splits a parameter."""

    @property
    def splits_inside(self) -> bool:
        """True if the form's own framework splits values inside of the step, by rules that are priced; False if the
        form leaves them to XLA.
        """
        return self.rest in (Rest.DTENSOR, Rest.MAXTEXT)

    @property
    def eager(self) -> bool:
        """True if the form's framework runs the step op by op."""
        return self.rest in (Rest.DTENSOR, Rest.STAGES)

    @property
    def of_torch(self) -> bool:
        """True if the form's code is for a torch module."""
        return self.eager or self.name == "torch-xla"


FORMS = {
    form.name: form
    for form in (
        Form("jax", "jax.jit in your own code", Rest.XLA),
        Form("jax-export", "a file that runs without autoshard", Rest.PLAN, text=False),
        Form("explicit", "JAX's explicit sharding mode", Rest.XLA, reads_program=True, hints=True),
        Form("flax", "Flax Linen and NNX", Rest.XLA, state=False),
        Form("maxtext", "MaxText", Rest.MAXTEXT, remat=HeldRemat.FIRST),
        Form("keras", "Keras 3 on JAX", Rest.XLA, state=False, single=True),
        Form("rules", "code that matches paths with patterns (big_vision, EasyDeL)", Rest.XLA, state=False),
        Form("haliax", "Haliax and Levanter", Rest.NAMES, reads_program=True, state=False),
        Form("torch-xla", "PyTorch/XLA", Rest.XLA, state=False, layers=False),
        Form("dtensor", "torch.distributed.tensor", Rest.DTENSOR, state=False, layers=False, ordered=True),
        Form(
            "fsdp2",
            "PyTorch's FSDP2",
            Rest.DTENSOR,
            state=False,
            layers=False,
            gathers=True,
            hybrid=True,
            replicates=True,
            remat=HeldRemat.BASES,
            shares_batch=True,
        ),
        Form(
            "transformers",
            "tensor and expert parallelism of transformers",
            Rest.DTENSOR,
            reads_program=True,
            state=False,
            layers=False,
            gathers=True,
            replicates=True,
            splits_parameters=True,
        ),
        Form(
            "torchtitan",
            "torchtitan's parallelize functions",
            Rest.DTENSOR,
            reads_program=True,
            state=False,
            layers=False,
            gathers=True,
            hybrid=True,
            remat=HeldRemat.BASES,
        ),
        Form(
            "accelerate",
            "Hugging Face Accelerate's FSDP2",
            Rest.DTENSOR,
            reads_program=True,
            state=False,
            layers=False,
            gathers=True,
            tensor=False,
            remat=HeldRemat.WHOLE,
            shares_batch=True,
        ),
        Form("hlo", "tools that read HLO shardings", Rest.XLA),
        Form(FORM_BY_STAGE, "torch.distributed.pipelining", Rest.STAGES, state=False, layers=False),
    )
}
"""All forms by name, in the order in which users see them."""


def form_named(name: str) -> Form:
    """Return the form with a name; raise `UserError` for an unknown name."""
    if name not in FORMS:
        raise UserError(f"there is no export to {name!r}; choose from {', '.join(FORMS)}.")
    return FORMS[name]


def check_names(form: Form, program_name: str, program: Program | None, problem: str = "") -> None:
    """Raise `UserError` if a form needs names of dims (`Rest.NAMES`) and the program gives none.

    Without a program the error quotes `problem`, the reason for its absence. Other forms always pass.
    """
    if form.rest is Rest.NAMES and program is None:
        raise UserError(f"the {form.name} form goes by the names that dims have in {program_name}: {problem}")
    if form.rest is Rest.NAMES and program is not None and not program.dims:
        raise UserError(
            f"the {form.name} form goes by names of dims, and no argument of {program_name} is an array with named "
            "axes (Haliax's NamedArray); --to jax and --to flax need none."
        )


def in_mesh_order(spec: Spec, mesh: Mapping[str, int]) -> bool:
    """Return True if the axes that split one dim are in the order of the mesh, for every dim. Raises `ValueError` for
    an axis that the mesh lacks.
    """
    axes = list(mesh)
    return all([axes.index(axis) for axis in dim] == sorted(axes.index(axis) for axis in dim) for dim in spec.dims)


def dims_by_axis(spec: Spec, mesh: Mapping[str, int]) -> list[int | None] | None:
    """Return for each mesh axis the dim that it splits, or None for an axis that splits nothing.

    DTensor splits a dim by several axes in the order of the mesh, major first. None in place of the list if it cannot
    express the spec.
    """
    if not in_mesh_order(spec, mesh):
        return None
    dim_of = {axis: dim for dim, names in enumerate(spec.dims) for axis in names}
    return [dim_of.get(axis) for axis in mesh]


def layer_spec(plan: Plan, name: str) -> Spec:
    """Return the spec of a plan's argument in a torch module: without the first dim if the plan stacks layers under
    this name.
    """
    spec = plan.arguments[name]
    return Spec(spec.dims[1:]) if is_stacked(name) else spec


def module_pattern(plan: Plan, name: str) -> str:
    """Return a regular expression for a torch module's names of a plan's parameter: one name for each layer of a stack,
    else the name alone.
    """
    return layer_pattern(name, (plan.shapes[name] or (0,))[0])


def parameter_of(state: str, shapes: Mapping[str, tuple[int, ...]], roles: Mapping[str, str]) -> str | None:
    """Return the parameter of an optimizer state; None if there is none, or if several match equally.

    First, the longest proper suffix of the state's dotted name that is a parameter of the same shape. Else, the
    parameter of the same shape whose name shares the most last parts with the state's, at least one. Among several, the
    one with the fewest parts counts: averages of parameters (`ema.params.up`) have more. A last part `value`, which
    containers of Flax add, does not count.

    - `state`: name of the state.
    - `shapes`, `roles`: shapes and roles of all arguments by name.
    """
    parts = state.removesuffix(".value").split(".")
    for start in range(1, len(parts)):
        name = ".".join(parts[start:])
        if roles.get(name) == "parameter" and shapes[name] == shapes[state]:
            return name
    # JAX steps name both by their paths: `params.up` and `opt_state.0.mu.up`.
    candidates = [
        ((len(_common_end(parts, own := name.removesuffix(".value").split("."))), -len(own)), name)
        for name, role in roles.items()
        if role == "parameter" and shapes[name] == shapes[state]
    ]
    best, name = max(candidates, key=lambda pair: pair[0], default=((0, 0), None))
    return name if best[0] and sum(each == best for each, _ in candidates) == 1 else None


def _common_end(a: list[str], b: list[str]) -> list[str]:
    """Return the longest common suffix of two lists."""
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return a[len(a) - count :]


def inputs_axis(specs: Mapping[str, Spec], roles: Mapping[str, str]) -> tuple[str, ...]:
    """Return the major axis of the first input whose first dim is split, as a tuple of one; empty if none is split."""
    firsts = (spec.dims[0][:1] for name, spec in specs.items() if roles[name] == "batch" and spec.dims)
    return next((axes for axes in firsts if axes), ())


def expressible_specs(
    form: Form,
    specs: Mapping[str, Spec],
    shapes: Mapping[str, tuple[int, ...]],
    roles: Mapping[str, str],
    mesh: Mapping[str, int],
) -> dict[str, Spec | None]:
    """Return the specs of a plan's arguments as a form expresses them; None for specs that the form leaves open.

    - `form`: its flags `layers`, `ordered`, `single` and `state` decide.
    - `specs`, `shapes`, `roles`: those of the arguments by name.
    - `mesh`: sizes of the axes by name.

    Without `layers`, the first dim of a stack is whole. With `ordered`, a spec in another order of axes becomes
    replicated. With `single`, each dim has its major axis only, and the first dim of all inputs has the axis of
    `inputs_axis`. Without `state`, optimizer state has the spec of its parameter, or None without one. `specs` may lack
    parameters that cannot be split, those of one element.
    """
    expressed: dict[str, Spec | None] = {}
    for name, spec in specs.items():
        if not form.layers and is_stacked(name) and roles[name] != "batch":
            spec = Spec(((), *spec.dims[1:]))
        if form.ordered and not in_mesh_order(spec, mesh):
            spec = Spec.replicated(len(spec.dims))
        if form.single:
            spec = Spec(tuple(axes[:1] for axes in spec.dims))
        expressed[name] = spec
    if form.single:
        axis = inputs_axis(specs, roles)
        for name in specs:
            if roles[name] == "batch" and shapes[name]:
                expressed[name] = Spec((axis, *((),) * (len(shapes[name]) - 1)))
    if not form.state:
        for name, role in roles.items():
            if role == "optimizer_state":
                parameter = parameter_of(name, shapes, roles)
                expressed[name] = None if parameter is None else expressed.get(parameter)
    return expressed


def gathered_specs(
    form: Form,
    specs: Mapping[str, Spec | None],
    shapes: Mapping[str, tuple[int, ...]],
    roles: Mapping[str, str],
    mesh: Mapping[str, int],
    axes: Collection[str],
) -> dict[str, Spec | None]:
    """Return the specs with every parameter split over all `axes`, as FSDP splits what each device of a batch gathers.

    The dim is the first one that some of the axes split already, else the first one that all divide. A parameter
    without such a dim keeps its spec. A hybrid form splits over those axes alone that split some parameter. State
    without a spec of its own follows its parameter. `form` is one that gathers; see `expressible_specs` for the other
    arguments.
    """
    own = {name: spec for name, spec in specs.items() if roles[name] in WEIGHTS and spec is not None}
    used = {axis for spec in own.values() for axis in spec.axes}
    if form.replicates and used.isdisjoint(axes):
        return dict(specs)
    if form.hybrid and not used.isdisjoint(axes):
        axes = tuple(axis for axis in axes if axis in used)
    found = dict(specs)
    for name, spec in own.items():
        first = 1 if is_stacked(name) else 0
        rest = [tuple(axis for axis in names if axis not in axes) for names in spec.dims]
        dims = range(first, len(rest))
        split_already = [dim for dim in dims if len(rest[dim]) < len(spec.dims[dim])]
        for dim in (*split_already, *dims):
            split = Spec((*rest[:dim], (*rest[dim], *axes), *rest[dim + 1 :]))
            if shapes[name][dim] % Spec((split.dims[dim],)).shards(mesh) == 0:
                found[name] = split
                break
    for name, role in roles.items():
        if role == "optimizer_state" and not form.state and found.get(name) is not None:
            parameter = parameter_of(name, shapes, roles)
            found[name] = found[name] if parameter is None else found.get(parameter)
    return found


def copied_specs(
    form: Form,
    specs: Mapping[str, Spec | None],
    shapes: Mapping[str, tuple[int, ...]],
    roles: Mapping[str, str],
    mesh: Mapping[str, int],
    axes: Collection[str],
    copied: str,
) -> dict[str, Spec | None]:
    """Return the specs with every parameter whole over the axis `copied`, and split over the others of `axes`.

    The other arguments are those of `gathered_specs`.
    """
    free = {
        name: Spec(tuple(tuple(axis for axis in names if axis != copied) for names in spec.dims))
        if spec is not None and roles[name] != "batch"
        else spec
        for name, spec in specs.items()
    }
    plain = dataclasses.replace(form, hybrid=False, replicates=False)
    return gathered_specs(plain, free, shapes, roles, mesh, [axis for axis in axes if axis != copied])


def divides_work(
    form: Form, specs: Mapping[str, Spec | None], roles: Mapping[str, str], mesh: Mapping[str, int]
) -> bool:
    """Return True unless devices would repeat work in a form that gathers: every axis splits a batch's first dim or a
    parameter.

    Some axis must split the batch, or a parameter, if the form needs that (`shares_batch`, `splits_parameters`).
    """
    known = {name: spec for name, spec in specs.items() if spec is not None}
    state = ("parameter", "optimizer_state")
    inputs = [name for name in known if roles[name] == "batch"] or [name for name in known if roles[name] not in state]
    batch = {axis for name in inputs for axis in (known[name].dims or ((),))[0]}
    parameters = {axis for name, spec in known.items() if roles[name] == "parameter" for axis in spec.axes}
    several = {axis for axis, size in mesh.items() if size > 1}
    if not form.gathers or not several:
        return True
    lacks = (form.shares_batch and not batch) or (form.splits_parameters and not parameters & several)
    return several <= batch | parameters and not lacks


def splits_nothing(specs: Mapping[str, Spec | None], mesh: Mapping[str, int]) -> bool:
    """Return True if every device would store all tensors of these specs whole; None counts as whole."""
    return all(spec is None or spec.shards(mesh) == 1 for spec in specs.values())


def splits_in_plan(plan: Plan) -> int:
    """Return the number of specs in a plan that split their value: arguments, results, pins, results of regions,
    operands and results of calls.
    """
    named = [*plan.arguments.values(), *plan.results.values()]
    inner = [pin.spec for pin in plan.pins] + [s for region in plan.regions for s in region.results]
    inner += [spec for call in plan.calls for spec in (*call.operands, *call.results)]
    return sum(spec.shards(plan.mesh) > 1 for spec in (*named, *inner))
