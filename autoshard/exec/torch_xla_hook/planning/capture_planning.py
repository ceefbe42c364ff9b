"""Planning a captured graph, with what is already decided held fixed."""

import dataclasses
import math
from collections.abc import Mapping

from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.capture.lazy_graph import Capture
from autoshard.exec.torch_xla_hook.planning.runtime_topology import memory_limit_here
from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh
from autoshard.graph import read_graph
from autoshard.planning import Options, Plan, Spec, make_plan, read_asked, spec_text
from autoshard.program import Argument, Role


@dataclasses.dataclass(frozen=True)
class Decision:
    """A plan, and how it splits the inputs of the captured graph."""

    plan: Plan
    specs: tuple[Spec | None, ...]
    """The spec of each argument; None for what stays as it is: the user's own marks, and scalars."""
    notes: tuple[str, ...]
    """What was decided otherwise than the planner alone would have; also among the plan's warnings."""

    @classmethod
    def of(cls, taken: Capture, plan: Plan, notes: tuple[str, ...]) -> "Decision":
        """With the specs that a plan of a captured graph gives to its inputs."""
        specs = [
            None if not argument.shape or number in taken.users else plan.arguments[argument.name]
            for number, argument in enumerate(taken.program.arguments)
        ]
        return cls(plan, tuple(specs), notes)


def best_mesh(taken: Capture, topology: str) -> dict[str, int]:
    """The mesh on which a captured graph has the fastest plan, of all that the devices can form."""
    options = Options(topology=topology, mesh="auto", refine_axes=False, memory_limit=memory_limit_here())
    return make_plan(taken.program, options).plan.mesh


def decide(taken: Capture, topology: str, mesh: LiveMesh, fixed: Mapping[int, Spec], free: bool = False) -> Decision:
    """Plan a captured graph. `fixed` are specs by argument that an earlier plan gave, or an earlier step.

    Arguments that the user has split keep their marks. What else is split already followed from an earlier plan, and
    stays so where that can be (not if `free`). Where a plan that splits nothing is the fastest, as for small steps on
    CPU devices, the fastest baseline that splits something is taken: a split was asked for. Data of one shape and dtype
    gets one spec, since of a batch that is moved later nobody can tell which of them it will be.
    """
    arguments = taken.program.arguments
    pins: dict[str, Spec] = {arguments[number].name: spec for number, spec in fixed.items()}
    notes: list[str] = []
    for number in sorted(taken.users):
        name, shape, text = arguments[number].name, arguments[number].shape, taken.split[number]
        spec = mesh.read(text, len(shape))
        if spec is None:
            notes.append(f"your own mark on {name}, {text}, is kept, but the mesh {mesh.sizes} cannot express it.")
        else:
            pins[name] = spec
            notes.append(f"your own mark on {name}, {spec_text(spec, shape)}, is kept.")
    loose = {} if free else _followed(taken, mesh, fixed)
    axis_only: dict[str, tuple[str, ...]] = {}
    limit = memory_limit_here()

    def make() -> tuple[Plan, tuple[str, ...]]:
        """Return a plan, and what is to be said of it."""
        plan, said = choose()
        return _without_ffts(taken, plan), said

    def choose() -> tuple[Plan, tuple[str, ...]]:
        # What only followed gives way where something is asked for.
        asked = read_asked((loose if not axis_only else {}) | pins, axis_only=axis_only)
        options = Options(topology=topology, mesh=mesh.sizes, asked=asked, refine_axes=False, memory_limit=limit)
        made = make_plan(taken.program, options)
        if splits(made.plan):
            return made.plan, ()
        if axis_only and not any(axis_only.values()):
            return made.plan, ()  # no axis may split anything
        kept = (p for p in made.baseline_plans.values() if not (axis_only and p.regions))
        split = [p for p in kept if splits(p) and _holds(taken, p, pins, bool(axis_only))]
        if not split:
            return made.plan, ()
        best = min(split, key=lambda plan: plan.prediction.step_time_s)
        whole, parted = (f"{1e3 * p.prediction.step_time_s:.3g} ms" for p in (made.plan, best))
        if made.plan.prediction.step_time_s > best.prediction.step_time_s:
            return best, ()
        said = f"with nothing split a step is predicted to take {whole}, not {parted}; a split was asked for."
        return best, (said,)

    try:
        plan, said = make()
    except UserError:
        if not loose:
            raise
        loose = {}
        plan, said = make()
    if plan.regions:
        whole = plan, said
        axis_only = dict.fromkeys(mesh.sizes, ("batch",))
        try:
            plan, said = make()
            notes.append("only the batch is split: PyTorch/XLA cannot be given the regions that convolutions run in.")
        except UserError:
            if not fixed:
                raise
            # What an earlier plan has split stays so.
            axis_only = {}
            plan, said = dataclasses.replace(whole[0], regions=()), whole[1]
            notes.append("what convolutions exchange along the edges of images is left to XLA, not planned.")
    if _has_groups(taken) and len(_axes(mesh)) > 1:
        axis_only = dict.fromkeys(mesh.sizes, ("batch",))
        notes += _idle_marks(taken, mesh, pins)
        data, why = _all_or_nothing(taken, mesh)
        pins |= {name: spec for name, spec in data.items() if name not in pins}
        if not any(axes for spec in pins.values() for axes in spec.dims):
            axis_only = dict.fromkeys(mesh.sizes, ())  # not inside of the step either
        notes.append(why)
        plan, said = make()
    agreed = _agreed(taken, plan, loose | pins)
    if agreed:
        pins |= agreed
        plan, said = make()
    notes = list(dict.fromkeys((*notes, *said)))
    if notes:
        plan = dataclasses.replace(plan, warnings=(*plan.warnings, *notes))
    return Decision.of(taken, plan, tuple(notes))


def _followed(taken: Capture, mesh: LiveMesh, fixed: Mapping[int, Spec]) -> dict[str, Spec]:
    """Specs of what is split, but neither by the user nor as an earlier plan says: it is made from what is."""
    arguments, found = taken.program.arguments, {}
    for number, text in taken.split.items():
        spec = mesh.read(text, len(arguments[number].shape))
        if spec is not None and number not in taken.users and number not in fixed:
            found[arguments[number].name] = spec
    return found


def splits(plan: Plan) -> bool:
    """Whether any argument is split."""
    return any(spec.shards(plan.mesh) > 1 for spec in plan.arguments.values())


def _holds(taken: Capture, plan: Plan, pins: Mapping[str, Spec], batch_only: bool) -> bool:
    """Whether a baseline, which is made without regard to what is decided, keeps it all the same."""
    if any(plan.arguments[name] != spec for name, spec in pins.items()):
        return False
    inner = [plan.arguments[a.name].dims[a.role is Role.BATCH :] for a in taken.program.arguments]
    return not batch_only or not any(axes for dims in inner for axes in dims)


def _without_ffts(taken: Capture, plan: Plan) -> Plan:
    """Return a plan that leaves ffts to XLA's partitioner, which gathers them where it must."""
    if not plan.regions:
        return plan
    ffts = {op.number for op in read_graph(taken.program.module).ops if op.kind == "fft"}
    return dataclasses.replace(plan, regions=tuple(region for region in plan.regions if region.op not in ffts))


def _has_groups(taken: Capture) -> bool:
    """Whether a captured graph has a convolution of groups."""
    return any(op.grouped for op in read_graph(taken.program.module).ops)


_WRONG = "PyTorch/XLA gives wrong gradients of convolutions of groups where an axis is idle"


def _all_or_nothing(taken: Capture, mesh: LiveMesh) -> tuple[dict[str, Spec], str]:
    """Every array of the batch split over all axes along its first dim, whole if one of them does not divide; and why.

    The axes that do divide would not do: those beside them would be idle.
    """
    data = _batch(taken)
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


def _idle_marks(taken: Capture, mesh: LiveMesh, pins: Mapping[str, Spec]) -> list[str]:
    """A sentence for each array of the batch that the user or an earlier plan splits over some of the axes only."""
    axes, found = _axes(mesh), []
    for argument in _batch(taken):
        spec = pins.get(argument.name)
        used = set() if spec is None else {axis for dim in spec.dims for axis in dim}
        idle = [axis for axis in axes if axis not in used]
        if spec is not None and used and idle:
            text = spec_text(spec, argument.shape)
            found.append(f"{argument.name} is split {text}, with {', '.join(idle)} idle: {_WRONG}; split it over all.")
    return found


def _batch(taken: Capture) -> list[Argument]:
    return [a for a in taken.program.arguments if a.role is Role.BATCH and a.shape]


def _axes(mesh: LiveMesh) -> tuple[str, ...]:
    """Axes of more than one device."""
    return tuple(axis for axis, size in mesh.sizes.items() if size > 1)


def _agreed(taken: Capture, plan: Plan, pins: Mapping[str, Spec]) -> dict[str, Spec]:
    """One spec for data of one shape and dtype that the plan splits in several ways.

    It is the one that the script marks some of it with, else the most split one.
    """
    alike: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for argument in taken.program.arguments:
        if argument.role is Role.BATCH and argument.shape:
            alike.setdefault((argument.shape, argument.dtype), []).append(argument.name)
    marked = {taken.program.arguments[number].name for number in taken.users}
    agreed = {}
    for names in alike.values():
        loose = [name for name in names if name not in pins]
        of_users = [pins[name] for name in names if name in pins and name in marked]
        specs = of_users or [plan.arguments[name] for name in loose]
        if loose and any(plan.arguments[name] != specs[0] for name in loose):
            agreed |= dict.fromkeys(loose, max(specs, key=lambda spec: spec.shards(plan.mesh)))
    return agreed
