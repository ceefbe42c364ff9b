"""Constraints on specs that the program or the user states, and regions that the program shards manually."""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives, Kind, Mesh
from autoshard.errors import UserError
from autoshard.graph import Constraint, Op, OpGraph, Structure, argument_origin
from autoshard.mlir import AxisUse
from autoshard.planning.record.hlo_shardings import tiled_axes
from autoshard.planning.record.spec import Spec, spec_text
from autoshard.planning.xla.axis_assignments import WHOLE, States, local_elements
from autoshard.planning.xla.partitioner_rules import Inner
from autoshard.program import Argument


_SEARCHED = re.compile(r"data|model|axis\d+|slice|stage")
"""Names of axes in the meshes of a search."""


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """Required spec of one tensor; axes are numbers of mesh axes, and axes of size 1 demand nothing."""

    tensor: int
    """Number of the tensor in the graph."""
    dims: tuple[tuple[int, ...], ...]
    """Axes that must split each dim."""
    open: tuple[bool, ...]
    """True for each dim that further axes may split."""
    never: tuple[int, ...]
    """Axes that may split no dim."""
    why: str
    """Origin of the demand, in words for the user."""


def allowed_states(structure: Structure, states: States, demand: Demand) -> NDArray[np.bool_]:
    """Return a mask of the states of the tensor's cluster that satisfy a demand, [states].

    Other dims of the cluster, which the tensor lacks, are free.
    """
    factors = structure.dims_of[demand.tensor]
    allowed = np.ones(len(states), dtype=bool)
    for factor, axes, is_open in zip(factors, demand.dims, demand.open, strict=True):
        for axis in range(states.shape[1]):
            if axis in axes:
                # No state has the value `WHOLE - 1`: a dim without a factor cannot be split.
                allowed &= states[:, axis] == (factor if factor >= 0 else WHOLE - 1)
            elif not is_open and factor >= 0:
                allowed &= states[:, axis] != factor
    own = [f for f in factors if f >= 0]
    for axis in demand.never:
        allowed &= ~np.isin(states[:, axis], own)
    return allowed


def free_of(states: States, axes: Iterable[int]) -> NDArray[np.bool_]:
    """Return a mask of the states that use none of these axes, [states]."""
    return (states[:, list(axes)] == WHOLE).all(axis=1)


def program_demands(graph: OpGraph, structure: Structure, mesh: Mesh) -> list[Demand]:
    """Return the demands of the program's own constraints on a mesh.

    Constraints on tensors without a cluster are skipped. Raises `UserError` if a constraint names an axis that the mesh
    lacks, or a part of an axis. Raises it also if axes do not divide their dim, occur twice or are not in the mesh's
    order, and for an unreduced value.
    """
    return [
        _demand(graph, constraint, mesh)
        for constraint in graph.constraints
        if structure.cluster_of[constraint.tensor] >= 0
    ]


def _demand(graph: OpGraph, constraint: Constraint, mesh: Mesh) -> Demand:
    """Return the demand of one constraint; raise `UserError` as `program_demands` does."""
    sharding, shape = constraint.sharding, graph.tensors[constraint.tensor].shape
    uses = [*sharding.dims, sharding.replicated, sharding.unreduced]
    for use in (use for dim in uses for use in dim):
        _check_axis(use, constraint.where, mesh)
    if sharding.unreduced:
        raise UserError(
            f"{constraint.where} leaves a value unreduced over {sharding.unreduced[0].name}, which no plan can hold: "
            "sum it there."
        )
    dims = tuple(axis_numbers(mesh, (use.name for use in dim)) for dim in sharding.dims)
    if sharding.tiles:
        dims = tiled_axes(sharding.tiles, len(shape), mesh, constraint.where)
    dims = checked_dims(constraint.where, shape, dims, mesh)
    never = axis_numbers(mesh, (use.name for use in sharding.replicated))
    return Demand(constraint.tensor, dims, sharding.open, never, constraint.where)


def broken_demands(graph: OpGraph, structure: Structure, mesh: Mesh, state: Callable[[int], States]) -> list[Demand]:
    """Return the program's demands that a choice violates; raise `UserError` as `program_demands` does.

    `state` returns the chosen state of a tensor's cluster, [1, axes].
    """
    demands = program_demands(graph, structure, mesh)
    return [d for d in demands if not allowed_states(structure, state(d.tensor), d)[0]]


def axis_numbers(mesh: Mesh, names: Iterable[str]) -> tuple[int, ...]:
    """Convert names of mesh axes to numbers; raise `ValueError` for a name that the mesh lacks."""
    return tuple(mesh.names.index(name) for name in names)


def _check_axis(use: AxisUse, where: str, mesh: Mesh) -> None:
    """Raise `UserError` for an axis that the mesh lacks, and for a part of an axis; `where` names the constraint."""
    if use.name not in mesh.names:
        raise UserError(
            f"{where} names the axis `{use.name}`, but the mesh has {mesh_text(mesh)}: "
            f"plan with a --mesh that has `{use.name}`, or change the program."
        )
    if use.part is not None:
        raise UserError(
            f"{where} splits a dim over a part of the axis `{use.name}` ({use.part[1]} of "
            f"{mesh.axes[use.name]}): give that part a name of its own in the mesh."
        )


def checked_dims(
    why: str, shape: Sequence[int], dims: Sequence[Sequence[int]], mesh: Mesh
) -> tuple[tuple[int, ...], ...]:
    """Return for each dim those of its axes that have a size above 1.

    Raises `UserError` for axes that do not divide their dim, occur twice, or are not in the order of the mesh.

    - `why`: origin of the demand, in words.
    - `shape`: dims of the tensor.
    - `dims`: axes, by number, that split each dim.
    """
    seen: set[int] = set()
    for dim, axes in enumerate(dims):
        names = [mesh.names[a] for a in axes]
        twice = next((mesh.names[a] for a in axes if a in seen or list(axes).count(a) > 1), None)
        if twice is not None:
            raise UserError(f"{why} uses the axis `{twice}` twice; an axis can split one dim of a tensor.")
        seen.update(axes)
        parts = math.prod(mesh.sizes[a] for a in axes)
        if shape[dim] % parts:
            raise UserError(
                f"{why} splits dim {dim} of {list(shape)} over {' x '.join(names)} = {parts}, which does not divide "
                f"{shape[dim]}: take axes whose sizes do, or leave the dim whole."
            )
    wide = tuple(tuple(a for a in axes if mesh.sizes[a] > 1) for axes in dims)
    for dim, axes in enumerate(wide):
        if list(axes) != sorted(axes):
            names = [mesh.names[a] for a in axes]
            reordered = ",".join(f"{mesh.names[a]}={mesh.sizes[a]}" for a in _order(wide, len(mesh.names)))
            raise UserError(
                f"{why} splits dim {dim} over {', '.join(names)} in this order, but the mesh is {mesh_text(mesh)}: "
                f"axes that split one dim must stand in the mesh's order, so plan with --mesh {reordered}."
            )
    return wide


def _order(dims: Sequence[Sequence[int]], count: int) -> list[int]:
    """Return the numbers of all `count` axes in the mesh's order, those of the first disordered dim in its order."""
    wrong = next(list(axes) for axes in dims if list(axes) != sorted(axes))
    places = iter(wrong)
    return [next(places) if a in wrong else a for a in range(count)]


def mesh_text(mesh: Mesh | Mapping[str, int]) -> str:
    """Format a mesh as `--mesh` accepts it, such as `data=4,model=2`."""
    axes = mesh.axes if isinstance(mesh, Mesh) else mesh
    return ",".join(f"{name}={size}" for name, size in axes.items())


def program_mesh(graph: OpGraph, devices: int) -> dict[str, int] | None:
    """Return the mesh that the program itself names for this number of devices, None if there is none. If there are
    several, the first of those with most axes is returned.
    """
    named = [region.mesh for region in graph.regions] + [c.sharding.mesh for c in graph.constraints]
    fitting = [mesh for mesh in named if mesh and math.prod(size for _, size in mesh) == devices]
    return dict(max(fitting, key=len)) if fitting else None


def check_searched_axes(graph: OpGraph, devices: int) -> None:
    """Raise `UserError` if the program's constraints name axes that meshes of a search do not have.

    The message has a mesh of these axes for the number of devices, with sizes as equal as its prime factors allow.
    """
    uses = [use.name for each in graph.constraints for dim in each.sharding.dims for use in dim]
    uses += [axis for region in graph.regions for axis in region.axes]
    missing = [axis for axis in dict.fromkeys(uses) if not _SEARCHED.fullmatch(axis)]
    if not missing:
        return
    meshes = [region.mesh for region in graph.regions] + [each.sharding.mesh for each in graph.constraints]
    own = [axis for axis, _ in max((mesh for mesh in meshes if mesh), key=len, default=())]
    sizes = dict.fromkeys(own if set(missing) <= set(own) else uses, 1)
    left, factor = devices, 2
    while left > 1:
        while left % factor:
            factor += 1
        sizes[min(sizes, key=lambda axis: sizes[axis])] *= factor
        left //= factor
    raise UserError(
        f"the program's constraints name the mesh {'axis' if len(missing) == 1 else 'axes'} {', '.join(missing)}, "
        f"of unknown sizes: say --mesh {','.join(f'{axis}={size}' for axis, size in sizes.items())}, for "
        "example, or --ignore-constraints."
    )


def check_regions(graph: OpGraph, mesh: Mesh) -> None:
    """Raise `UserError` for a mesh that differs from the one that the program's manual regions are written for.

    Names, sizes and order of the axes count.
    """
    for region in graph.regions:
        missing = next((axis for axis in region.axes if axis not in mesh.names), None)
        wanted = ",".join(f"{name}={size}" for name, size in region.mesh)
        if missing is not None:
            raise UserError(
                f"{region.where} names the axis `{missing}`, but the mesh has {mesh_text(mesh)}: plan with "
                f"--mesh {wanted}, or change the program."
            )
        if region.mesh and dict(region.mesh) != mesh.axes or list(dict(region.mesh)) != list(mesh.axes):
            raise UserError(
                f"{region.where} is written for the mesh {wanted}, but the mesh of the plan is {mesh_text(mesh)}: "
                f"plan with --mesh {wanted}."
            )


def program_constraint_lines(graph: OpGraph, arguments: Sequence[Argument]) -> list[str]:
    """Return one line for each constraint and then each manual region of the program, without duplicates.

    - `arguments`: records with the names of arguments, of which the module knows the positions only.
    """
    named = {argument_origin(k): f"the sharding of {argument.name}" for k, argument in enumerate(arguments)}
    lines = [f"{named.get(c.where, c.where)}: {_spec(graph, c)}" for c in graph.constraints]
    lines += [f"{r.where}: by hand over {', '.join(r.axes)}" for r in graph.regions]
    return list(dict.fromkeys(lines))


def _spec(graph: OpGraph, constraint: Constraint) -> str:
    """Format the spec of a constraint, or its tiles, and the dims that further axes may split if there are any."""
    dims = tuple(tuple(use.name for use in dim) for dim in constraint.sharding.dims)
    text = constraint.sharding.tiles or spec_text(Spec(dims), graph.tensors[constraint.tensor].shape)
    return f"{text}, more allowed on dims {_open(constraint)}" if any(constraint.sharding.open) else text


def _open(constraint: Constraint) -> str:
    """List the dims of a constraint that further axes may split."""
    return ", ".join(str(d) for d, is_open in enumerate(constraint.sharding.open) if is_open)


def group_axes(groups: Collection[Sequence[int]], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the mesh axes, by number, along which members of one of the groups differ; empty without groups.

    - `groups`: device groups, or (source, target) pairs, of places in the mesh in row-major order.
    - `sizes`: sizes of the mesh axes.
    """
    varies: set[int] = set()
    for group in groups:
        coords = np.array(np.unravel_index(np.array(group), tuple(sizes)))
        varies.update(np.flatnonzero((coords != coords[:, :1]).any(axis=1)).tolist())
    return tuple(sorted(varies))


# Kind of collective by kind of op; a broadcast is priced as a gather.
_KINDS: dict[str, Kind] = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "collective_permute": "collective-permute",
    "collective_broadcast": "all-gather",
}


def by_hand(op: Op, states: States, axes: Mapping[str, int]) -> NDArray[np.bool_]:
    """Return a mask of an op's strategies that respect the manual sharding of the program, [states].

    A manual axis splits exactly the factor that the program splits over it, and no other axis splits that factor.
    `axes` has the sizes of the mesh axes; an axis of size 1 splits nothing.
    """
    allowed = np.ones(len(states), dtype=bool)
    factor_of = {axis: factor for factor, axes in op.fixed for axis in axes}
    fixed_factors = [factor for factor, _ in op.fixed]
    for number, (name, size) in enumerate(axes.items()):
        if size > 1 and (name in factor_of or name in op.manual):
            allowed &= states[:, number] == factor_of.get(name, WHOLE)
        elif fixed_factors:
            allowed &= ~np.isin(states[:, number], fixed_factors)
    return allowed


def own_collectives(graph: OpGraph, op: Op, states: States, collectives: Collectives) -> tuple[Inner, ...]:
    """Return the collective that an op in a manual region is, over the axes that its device groups span.

    The result is empty for other ops, and if every group has one device. Sizes are [states], as `Collectives.time`
    counts them: of the results for a gather, else of the operands. Sums of narrow dtypes that the backend widens count
    four bytes an element.
    """
    kind = _KINDS.get(op.kind)
    if kind is None or op.rule is None:
        return ()
    mesh = collectives.mesh
    axes = group_axes(op.groups, mesh.sizes)
    if not axes:
        return ()
    tensors, dims = (op.results, op.rule.results) if kind == "all-gather" else (op.operands, op.rule.operands)
    size = np.zeros(len(states))
    for tensor, own in zip(tensors, dims, strict=True):
        record = graph.tensors[tensor]
        itemsize = record.itemsize
        if kind in ("all-reduce", "reduce-scatter") and collectives.widen_dtype(record.dtype) != record.dtype:
            itemsize = 4
        sizes = [n if any(f in dim for dim in own) else 1 for f, n in enumerate(op.rule.sizes)]
        masked = np.where(np.isin(states, [f for dim in own for f in dim]), states, WHOLE)
        size = size + local_elements(masked, sizes, mesh.sizes) * itemsize
    return (Inner(kind, axes, size),)
