"""Planning of a captured graph under the specs that are already decided."""

import dataclasses
import math
from collections.abc import Mapping

from autoshard.errors import PinError, UserError
from autoshard.exec.torch_xla_hook.capture.lazy_graph import Capture
from autoshard.exec.torch_xla_hook.planning.runtime_topology import memory_limit_here
from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh
from autoshard.graph import read_graph
from autoshard.planning import Options, Plan, Spec, make_plan, read_asked, spec_text
from autoshard.program import Argument, Role


@dataclasses.dataclass(frozen=True)
class Decision:
    """A plan, and the specs that it gives to the inputs of the captured graph."""

    plan: Plan
    specs: tuple[Spec | None, ...]
    """The spec of each argument; None for arguments that stay as they are: the user's own marks, and scalars."""
    notes: tuple[str, ...]
    """Sentences about decisions that differ from the planner's own; they are also among the plan's warnings."""

    @classmethod
    def of(cls, capture: Capture, plan: Plan, notes: tuple[str, ...]) -> "Decision":
        """Make a decision from a plan of a captured graph: scalars and arguments that the user marked get no spec."""
        specs = [
            None if not argument.shape or number in capture.users else plan.arguments[argument.name]
            for number, argument in enumerate(capture.program.arguments)
        ]
        return cls(plan, tuple(specs), notes)


def best_mesh(capture: Capture, topology: str) -> dict[str, int]:
    """Search all meshes that the devices can form; return the axes and sizes of the one with the fastest plan.

    `capture` is the graph to plan, and `topology` the name of the devices' topology. Raises `UserError` if no plan
    fits.
    """
    options = Options(topology=topology, mesh="auto", refine_axes=False, memory_limit=memory_limit_here())
    return make_plan(capture.program, options).plan.mesh


def decide(capture: Capture, topology: str, mesh: LiveMesh, fixed: Mapping[int, Spec], free: bool = False) -> Decision:
    """Plan a captured graph under the specs of earlier plans, as far as it has a plan under them.

    - `topology`: name of the devices' topology.
    - `mesh`: mesh to plan for.
    - `fixed`: specs by argument number that an earlier plan or an earlier step gave.
    - `free`: if True, arguments that are split for another reason may change their spec.

    An earlier step may have split a tensor in a dim that this step cuts. Such a tensor gets a new spec, and if no
    single tensor is in the way, all batch arrays do. Raises `UserError` if no plan satisfies the marks.
    """
    arguments = capture.program.arguments
    while True:
        try:
            return _decide(capture, topology, mesh, fixed, free)
        except UserError as error:
            names = error.names if isinstance(error, PinError) else ()
            odd = [number for name in names for number in fixed if arguments[number].name == name][:1]
            odd = odd or [number for number in fixed if arguments[number].role is Role.BATCH]
            if not odd:
                raise
            fixed = {number: spec for number, spec in fixed.items() if number not in odd}


def _decide(capture: Capture, topology: str, mesh: LiveMesh, fixed: Mapping[int, Spec], free: bool) -> Decision:
    """Plan a captured graph under all of these specs.

    Arguments that the user has split keep their marks. Other split arguments got their split from an earlier plan by
    propagation; they keep it where a plan with it exists. The plan that splits nothing can be the fastest, as for small
    steps on CPU devices. Then the fastest baseline that splits something is chosen, since the user asked for a split.
    Batch arrays of one shape and dtype get one spec, since nothing distinguishes such batches when they are moved
    later.

    If the plan needs manual regions of convolutions, only the batch is split. With grouped convolutions and several
    axes the batch is split over all axes or none. Notes tell of these decisions. Raises `UserError` if no plan
    satisfies the marks.
    """
    arguments = capture.program.arguments
    pins: dict[str, Spec] = {arguments[number].name: spec for number, spec in fixed.items()}
    notes: list[str] = []
    for number in sorted(capture.users):
        name, shape, text = arguments[number].name, arguments[number].shape, capture.split[number]
        spec = mesh.read(text, len(shape))
        if spec is None:
            notes.append(f"your own mark on {name}, {text}, stays, but the mesh {mesh.sizes} cannot express it.")
        elif not mesh.divides(spec, shape):
            written = spec_text(spec, shape)
            notes.append(f"your own mark on {name}, {written}, stays, but the axes do not divide it.")
        else:
            pins[name] = spec
            notes.append(f"your own mark on {name}, {spec_text(spec, shape)}, stays.")
    loose = {} if free else _followed(capture, mesh, fixed)
    axis_only: dict[str, tuple[str, ...]] = {}
    limit = memory_limit_here()

    def make() -> tuple[Plan, tuple[str, ...]]:
        """Return a plan without regions of ffts, and the sentences that describe how the plan was chosen (`choose`)."""
        plan, explanation = choose()
        return _without_ffts(capture, plan), explanation

    def choose() -> tuple[Plan, tuple[str, ...]]:
        """Return the plan under the current pins, or a baseline that splits something if that splits nothing.

        With it comes a sentence if the baseline is slower than the plan; else none. Splits that merely follow from
        earlier plans give way to an explicit restriction of the axes.
        """
        asked = read_asked((loose if not axis_only else {}) | pins, axis_only=axis_only)
        options = Options(topology=topology, mesh=mesh.sizes, asked=asked, refine_axes=False, memory_limit=limit)
        made = make_plan(capture.program, options)
        if splits(made.plan):
            return made.plan, ()
        if axis_only and not any(axis_only.values()):
            return made.plan, ()  # no axis may split anything
        allowed = (p for p in made.baseline_plans.values() if not (axis_only and p.regions))
        split = [p for p in allowed if splits(p) and _holds(capture, p, pins, bool(axis_only))]
        if not split:
            return made.plan, ()
        best = min(split, key=lambda plan: plan.prediction.step_time_s)
        whole, parted = (f"{1e3 * p.prediction.step_time_s:.3g} ms" for p in (made.plan, best))
        if made.plan.prediction.step_time_s > best.prediction.step_time_s:
            return best, ()
        explanation = f"with nothing split a step is predicted to take {whole}, not {parted}; a split was asked for."
        return best, (explanation,)

    try:
        plan, explanation = make()
    except UserError:
        if not loose:
            raise
        loose = {}
        plan, explanation = make()
    if plan.regions:
        whole = plan, explanation
        axis_only = dict.fromkeys(mesh.sizes, ("batch",))
        try:
            plan, explanation = make()
            notes.append("only the batch is split: PyTorch/XLA cannot be given the regions that convolutions run in.")
        except UserError:
            if not fixed:
                raise
            # Splits of an earlier plan stay, even if they are not of the batch.
            axis_only = {}
            plan, explanation = dataclasses.replace(whole[0], regions=()), whole[1]
            notes.append("the exchange of convolutions along the edges of images is left to XLA, not planned.")
    if _has_groups(capture) and len(_axes(mesh)) > 1:
        axis_only = dict.fromkeys(mesh.sizes, ("batch",))
        notes += idle_marks(capture, mesh, pins)
        data, why = _all_or_nothing(capture, mesh)
        pins |= {name: spec for name, spec in data.items() if name not in pins}
        if not any(axes for spec in pins.values() for axes in spec.dims):
            axis_only = dict.fromkeys(mesh.sizes, ())  # values inside of the step stay whole too
        notes.append(why)
        plan, explanation = make()
    agreed = _agreed(capture, plan, loose | pins)
    if agreed:
        pins |= agreed
        plan, explanation = make()
    notes = list(dict.fromkeys((*notes, *explanation)))
    if notes:
        plan = dataclasses.replace(plan, warnings=(*plan.warnings, *notes))
    return Decision.of(capture, plan, tuple(notes))


def _followed(capture: Capture, mesh: LiveMesh, fixed: Mapping[int, Spec]) -> dict[str, Spec]:
    """Return the specs, by name, of arguments that are split, but neither by the user nor by an earlier plan.

    Propagation split these arguments, since they are computed from split tensors. Splits that the mesh cannot express
    are left out.
    """
    arguments, specs = capture.program.arguments, {}
    for number, text in capture.split.items():
        spec = mesh.read(text, len(arguments[number].shape))
        shape = arguments[number].shape
        if spec is not None and mesh.divides(spec, shape) and number not in capture.users and number not in fixed:
            specs[arguments[number].name] = spec
    return specs


def splits(plan: Plan) -> bool:
    """Return True if the plan splits any argument; pins on values inside the step do not count."""
    return any(spec.shards(plan.mesh) > 1 for spec in plan.arguments.values())


def _holds(capture: Capture, plan: Plan, pins: Mapping[str, Spec], batch_only: bool) -> bool:
    """Return True if a baseline satisfies the pins, and with `batch_only` splits no argument but in the first dim of
    batch arrays.

    Baselines are built without regard to the pins (specs by argument name).
    """
    if any(plan.arguments[name] != spec for name, spec in pins.items()):
        return False
    inner = [plan.arguments[a.name].dims[a.role is Role.BATCH :] for a in capture.program.arguments]
    return not batch_only or not any(axes for dims in inner for axes in dims)


def _without_ffts(capture: Capture, plan: Plan) -> Plan:
    """Return the plan without manual regions of ffts: XLA's partitioner gathers their operands where it must."""
    if not plan.regions:
        return plan
    ffts = {op.number for op in read_graph(capture.program.module).ops if op.kind == "fft"}
    return dataclasses.replace(plan, regions=tuple(region for region in plan.regions if region.op not in ffts))


def _has_groups(capture: Capture) -> bool:
    """Return True if a captured graph has a grouped convolution."""
    return any(op.grouped for op in read_graph(capture.program.module).ops)


_WRONG = "PyTorch/XLA gives wrong gradients of convolutions of groups where an axis is idle"


def _all_or_nothing(capture: Capture, mesh: LiveMesh) -> tuple[dict[str, Spec], str]:
    """Return specs for all batch arrays, by name, and the sentence that explains them.

    Every array is split over all axes along its first dim. If one array does not divide, all arrays stay whole. A split
    over only the axes that divide would leave other axes idle, where PyTorch/XLA computes wrong gradients. Evidence:
    docs/compiler_behaviour.md, "Gradients of grouped convolutions in PyTorch/XLA".
    """
    data = _batch(capture)
    axes = _axes(mesh)
    parts = math.prod(mesh.sizes[axis] for axis in axes)
    odd = next((a for a in data if a.shape[0] % parts), None)
    why = f"the batch is split over all axes or none: {_WRONG}."
    if odd is not None:
        why = (
            f"the batch is not split, and every device computes the whole step: {odd.name} has {odd.shape[0]} rows, no "
            f"multiple of the {parts} devices, and {_WRONG}. Feed a multiple of {parts}."
        )
    return {a.name: Spec((() if odd is not None else axes, *[()] * (len(a.shape) - 1))) for a in data}, why


def idle_marks(capture: Capture, mesh: LiveMesh, pins: Mapping[str, Spec]) -> list[str]:
    """Return a warning for each batch array that these specs, by name, split over only some of the axes, in a step
    with grouped convolutions.
    """
    if not _has_groups(capture):
        return []
    axes, marks = _axes(mesh), []
    for argument in _batch(capture):
        spec = pins.get(argument.name)
        used = set() if spec is None else {axis for dim in spec.dims for axis in dim}
        idle = [axis for axis in axes if axis not in used]
        if spec is not None and used and idle:
            text = spec_text(spec, argument.shape)
            marks.append(f"{argument.name} is split {text}, with {', '.join(idle)} idle: {_WRONG}; split it over all.")
    return marks


def _batch(capture: Capture) -> list[Argument]:
    """Return the batch arguments that are no scalars."""
    return [a for a in capture.program.arguments if a.role is Role.BATCH and a.shape]


def _axes(mesh: LiveMesh) -> tuple[str, ...]:
    """Return the axes of more than one device, in the mesh's order."""
    return tuple(axis for axis, size in mesh.sizes.items() if size > 1)


def _agreed(capture: Capture, plan: Plan, pins: Mapping[str, Spec]) -> dict[str, Spec]:
    """Choose one spec for batch arrays of one shape and dtype that the plan splits in several ways.

    The spec is the one that the script marks some of these arrays with, else the one with the most shards. Returns it
    by name for the arrays without a spec in `pins`; empty if all agree.
    """
    alike: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for argument in capture.program.arguments:
        if argument.role is Role.BATCH and argument.shape:
            alike.setdefault((argument.shape, argument.dtype), []).append(argument.name)
    marked = {capture.program.arguments[number].name for number in capture.users}
    agreed = {}
    for names in alike.values():
        loose = [name for name in names if name not in pins]
        of_users = [pins[name] for name in names if name in pins and name in marked]
        specs = of_users or [plan.arguments[name] for name in loose]
        if loose and any(plan.arguments[name] != specs[0] for name in loose):
            agreed |= dict.fromkeys(loose, max(specs, key=lambda spec: spec.shards(plan.mesh)))
    return agreed
