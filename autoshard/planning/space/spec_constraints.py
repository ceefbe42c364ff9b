"""Constraints on specs that the program or the user states, and regions that the program splits by hand."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives, Kind, Mesh
from autoshard.errors import UserError
from autoshard.graph import AxisUse, Constraint, Op, OpGraph, Structure
from autoshard.planning.record.hlo_shardings import tiled_axes
from autoshard.planning.record.spec import Spec, spec_text
from autoshard.planning.xla.axis_assignments import WHOLE, States, local_elements
from autoshard.planning.xla.partitioner_rules import Inner


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """What the spec of one tensor must be. Axes are numbers of mesh axes; one of size 1 asks for nothing."""

    tensor: int
    dims: tuple[tuple[int, ...], ...]
    """Axes that must split each dim."""
    open: tuple[bool, ...]
    """Dims that other axes may split too."""
    never: tuple[int, ...]
    """Axes that may split no dim."""
    why: str
    """Who asks, for a person."""


def allowed_states(structure: Structure, states: States, demand: Demand) -> NDArray[np.bool_]:
    """Which states of the tensor's cluster (mesh axes over the cluster's factors) keep a demand."""
    factors = structure.dims_of[demand.tensor]
    kept = np.ones(len(states), dtype=bool)
    for factor, axes, is_open in zip(factors, demand.dims, demand.open, strict=True):
        for axis in range(states.shape[1]):
            if axis in axes:
                kept &= states[:, axis] == (factor if factor >= 0 else WHOLE - 1)
            elif not is_open and factor >= 0:
                kept &= states[:, axis] != factor
    own = [f for f in factors if f >= 0]
    for axis in demand.never:
        kept &= ~np.isin(states[:, axis], own)
    return kept


def free_of(states: States, axes: Iterable[int]) -> NDArray[np.bool_]:
    """Which states use none of these axes."""
    return (states[:, list(axes)] == WHOLE).all(axis=1)


def program_demands(graph: OpGraph, structure: Structure, mesh: Mesh) -> list[Demand]:
    """What the program's own constraints ask for on a mesh.

    Raises `UserError` if one names an axis that the mesh lacks, a part of an axis, or splits a dim that does not
    divide.
    """
    return [
        _demand(graph, constraint, mesh)
        for constraint in graph.constraints
        if structure.cluster_of[constraint.tensor] >= 0
    ]


def _demand(graph: OpGraph, constraint: Constraint, mesh: Mesh) -> Demand:
    sharding, shape = constraint.sharding, graph.tensors[constraint.tensor].shape
    uses = [*sharding.dims, sharding.whole, sharding.unreduced]
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
    never = axis_numbers(mesh, (use.name for use in sharding.whole))
    return Demand(constraint.tensor, dims, sharding.open, never, constraint.where)


def broken_demands(graph: OpGraph, structure: Structure, mesh: Mesh, state: Callable[[int], States]) -> list[Demand]:
    """The program's demands that a choice does not keep; `state` gives the chosen row of a tensor's cluster."""
    demands = program_demands(graph, structure, mesh)
    return [d for d in demands if not allowed_states(structure, state(d.tensor), d)[0]]


def axis_numbers(mesh: Mesh, names: Iterable[str]) -> tuple[int, ...]:
    """Mesh axes by number."""
    return tuple(mesh.names.index(name) for name in names)


def _check_axis(use: AxisUse, where: str, mesh: Mesh) -> None:
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
    """The axes of each dim that split it: those larger than 1.

    Refuses axes that do not divide their dim, stand twice, or stand in another order than the mesh's.
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
            right = ",".join(f"{mesh.names[a]}={mesh.sizes[a]}" for a in _order(wide, len(mesh.names)))
            raise UserError(
                f"{why} splits dim {dim} over {', '.join(names)} in this order, but the mesh is {mesh_text(mesh)}: "
                f"axes that split one dim must stand in the mesh's order, so plan with --mesh {right}."
            )
    return wide


def _order(dims: Sequence[Sequence[int]], count: int) -> list[int]:
    """All axes, those of the first disordered dim in its order."""
    wrong = next(list(axes) for axes in dims if list(axes) != sorted(axes))
    places = iter(wrong)
    return [next(places) if a in wrong else a for a in range(count)]


def mesh_text(mesh: Mesh | Mapping[str, int]) -> str:
    """A mesh as `--mesh` takes it: `data=4,model=2`."""
    axes = mesh.axes if isinstance(mesh, Mesh) else mesh
    return ",".join(f"{name}={size}" for name, size in axes.items())


def program_mesh(graph: OpGraph, devices: int) -> dict[str, int] | None:
    """The mesh that the program itself names, if it names one that has as many devices."""
    named = [region.mesh for region in graph.regions] + [c.sharding.mesh for c in graph.constraints]
    fitting = [mesh for mesh in named if mesh and math.prod(size for _, size in mesh) == devices]
    return dict(max(fitting, key=len)) if fitting else None


def check_regions(graph: OpGraph, mesh: Mesh) -> None:
    """Refuse a mesh other than the one that the program's regions by hand are written for."""
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


def said_by_program(graph: OpGraph) -> list[str]:
    """One line for each spec that the program fixes, in order; equal ones once."""
    lines = [f"{c.where}: {_spec(graph, c)}" for c in graph.constraints]
    lines += [f"{r.where}: by hand over {', '.join(r.axes)}" for r in graph.regions]
    return list(dict.fromkeys(lines))


def _spec(graph: OpGraph, constraint: Constraint) -> str:
    dims = tuple(tuple(use.name for use in dim) for dim in constraint.sharding.dims)
    text = constraint.sharding.tiles or spec_text(Spec(dims), graph.tensors[constraint.tensor].shape)
    return f"{text}, more allowed on dims {_open(constraint)}" if any(constraint.sharding.open) else text


def _open(constraint: Constraint) -> str:
    return ", ".join(str(d) for d, is_open in enumerate(constraint.sharding.open) if is_open)


def group_axes(groups: Collection[Sequence[int]], sizes: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes along which the members of device groups, or the ends of (source, target) pairs, differ."""
    varies: set[int] = set()
    for group in groups:
        coords = np.array(np.unravel_index(np.array(group), tuple(sizes)))
        varies.update(np.flatnonzero((coords != coords[:, :1]).any(axis=1)).tolist())
    return tuple(sorted(varies))


_KINDS: dict[str, Kind] = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "collective_permute": "collective-permute",
    "collective_broadcast": "all-gather",
}


def by_hand(op: Op, states: States, axes: Mapping[str, int]) -> NDArray[np.bool_]:
    """Which strategies of an op leave the axes that the program has split it over where the program has them.

    `axes` are the mesh's, with their sizes; one of size 1 splits nothing.
    """
    kept = np.ones(len(states), dtype=bool)
    where = {axis: factor for factor, axes in op.fixed for axis in axes}
    taken = [factor for factor, _ in op.fixed]
    for number, (name, size) in enumerate(axes.items()):
        if size > 1 and (name in where or name in op.manual):
            kept &= states[:, number] == where.get(name, WHOLE)
        elif taken:
            kept &= ~np.isin(states[:, number], taken)
    return kept


def own_collectives(graph: OpGraph, op: Op, states: States, collectives: Collectives) -> tuple[Inner, ...]:
    """The collective that an op of a region by hand is, on the axes that its groups of devices span."""
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
        inside = [n if any(f in dim for dim in own) else 1 for f, n in enumerate(op.rule.sizes)]
        masked = np.where(np.isin(states, [f for dim in own for f in dim]), states, WHOLE)
        size = size + local_elements(masked, inside, mesh.sizes) * itemsize
    return (Inner(kind, axes, size),)
