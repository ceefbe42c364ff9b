"""Axes derived from others: parts of an axis, and axes for the stages of a pipeline."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Mesh, make_mesh
from autoshard.graph import FactorKind, Op, Opaque, OpGraph, Rule, Structure
from autoshard.planning.record.spec import original_mesh, part_names
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups
from autoshard.planning.xla.axis_assignments import WHOLE, States


LEAST_SHARE = 0.01
"""Share of the program's FLOPs that must be in ops whose dim divides by a part of an axis only."""
LEAST_GAIN = 0.005
"""Share of the step time that a mesh with a cut axis must save to be preferred."""


@dataclasses.dataclass(frozen=True, slots=True)
class AxisParts:
    """Mesh with one axis cut into two parts."""

    original: Mesh
    mesh: Mesh
    axis: int
    """Number of the axis in `original`, and of its outer part in `mesh`; the inner part is the next axis."""
    part: int
    """Size of the outer part, which divides the dim that motivates the cut."""
    group_sizes: dict[int, int]
    """Size that an axis must divide to split a dim group evenly, by group."""
    of_factor: dict[tuple[int, int], int]
    """Dim group by (cluster, factor)."""

    def allowed_states(self, states: States, sizes: list[int]) -> NDArray[np.bool_]:
        """Return a mask of the allowed states; `sizes` has for each dim the size that axes must divide.

        Both parts split the same dim, as the axis would, unless one of them splits a dim that the whole axis cannot.
        Such a dim's size divides by a part but not by the whole axis. `states` are over those dims, [states, axes].
        """
        whole = self.original.sizes[self.axis]
        parts = self.mesh.sizes[self.axis : self.axis + 2]
        needs = np.array([size % whole != 0 and any(size % part == 0 for part in parts) for size in sizes] + [False])
        outer, inner = states[:, self.axis], states[:, self.axis + 1]
        return (outer == inner) | needs[outer] | needs[inner]

    def expand(self, states: States) -> States:
        """Convert states over the original axes to states over the axes of `mesh`, in which both parts split alike."""
        return np.insert(states, self.axis + 1, states[:, self.axis], axis=1)

    def allowed(
        self, before: Model, after: Model, allowed: Mapping[int, NDArray[np.bool_]]
    ) -> dict[int, NDArray[np.bool_]]:
        """Convert masks of allowed alternatives from the original mesh to the mesh with the cut axis.

        `before` and `after` are the models on these meshes. A mask may be all False, if no state remains.
        """
        masks = {}
        for node, mask in allowed.items():
            wanted = {tuple(state) for state in self.expand(before.nodes[node].states[mask]).tolist()}
            masks[node] = np.array([tuple(state) in wanted for state in after.nodes[node].states.tolist()])
        return masks

    def choices(self, before: Model, after: Model, choices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Convert choices from the original mesh to the mesh with the cut axis; None if a state is missing there.

        `before` and `after` are the models on these meshes.
        """
        converted = []
        for old, new, choice in zip(before.nodes, after.nodes, choices.tolist(), strict=True):
            state = self.expand(old.states[choice : choice + 1])
            rows = np.flatnonzero((new.states == state).all(axis=1) & (new.has_memory == old.has_memory[choice]))
            if not len(rows):
                return None
            converted.append(int(rows[0]))
        return np.array(converted, dtype=np.int64)


def find_axis_parts(graph: OpGraph, structure: Structure, groups: Groups, mesh: Mesh) -> AxisParts | None:
    """Return the cut of an axis that affects the most FLOPs; None if no dim needs one, or too few FLOPs do.

    A mesh has at most one cut axis: None for a mesh with one.

    A dim needs a cut if only a part of an axis divides it; the part is the greatest common divisor. Less than the share
    `LEAST_SHARE` of the program's FLOPs is too few.

    The batch may need a part of the first axis. A dim that splits an op into many equal ones (heads, experts) may need
    a part of another axis. It needs none if such an axis divides it; of equal axes the last is cut. Ops have further
    dims that an axis can split in place of any other dim.
    """
    if original_mesh(mesh.axes) != mesh.axes:
        return None
    flops_of: dict[tuple[int, int], float] = defaultdict(float)
    for op_id in structure.heavy:
        op = graph.ops[op_id]
        if op.rule is None or not op.flops:
            continue
        batching = _shared(op.rule) if op.opaque is None or not op.opaque.on_shards else _of_call(op.rule, op.opaque)
        for factor, size in enumerate(op.rule.sizes):
            of_batch = groups.batch is not None and _group(structure, groups, op_id, graph, factor) == groups.batch
            axes = [axis for axis, n in enumerate(mesh.sizes) if n > 1]
            axes = axes[:1] if of_batch else axes[1:] or axes
            if not of_batch and (factor not in batching or any(size % mesh.sizes[axis] == 0 for axis in axes)):
                continue
            for axis in axes:
                part = math.gcd(size, mesh.sizes[axis])
                if part not in (1, mesh.sizes[axis]):
                    flops_of[axis, part] += op.flops * graph.trips(op.loop)
    if not flops_of:
        return None
    axis, part = max(flops_of, key=lambda key: (flops_of[key], *key))
    if flops_of[axis, part] < LEAST_SHARE * graph.flops:
        return None
    return refine(mesh, groups, axis, part)


def _shared(rule: Rule) -> set[int]:
    """Return the factors that every operand and result of an op has, as batch dims of a dot."""
    return set.intersection(*({f for dim in dims for f in dim} for dims in (*rule.operands, *rule.results)))


def _of_call(rule: Rule, call: Opaque) -> set[int]:
    """Return the factors that split a call into many equal ones; tables of a mask may lack them.

    They are parallel, nowhere a minor factor of a merged dim, and work does not rise along them.
    """
    minor = {f for dims in (*rule.operands, *rule.results) for dim in dims for f in dim[1:]}
    even = {f for f, kind in enumerate(rule.kinds) if kind is FactorKind.PARALLEL}
    return even - minor - {factor for factor, _ in call.triangular}


def refine(mesh: Mesh, groups: Groups, axis: int, part: int) -> AxisParts:
    """Cut one axis of a mesh into an outer part of size `part` and an inner part.

    - `groups`: dim groups of the program.
    - `axis`: number of the axis.
    - `part`: divisor of the axis's size.
    """
    name, size = mesh.names[axis], mesh.sizes[axis]
    sizes: dict[str, int] = {}
    for own, n in mesh.axes.items():
        if own == name:
            sizes.update(zip(part_names(name, (part, size // part)), (part, size // part), strict=True))
        else:
            sizes[own] = n
    return AxisParts(mesh, make_mesh(mesh.topology, sizes), axis, part, groups.sizes, groups.of_factor)


def axis_parts_of(groups: Groups, mesh: Mesh) -> AxisParts | None:
    """Return the cut axis of a mesh, the first recognised by the names of its parts; None if no axis is cut."""
    whole = original_mesh(mesh.axes)
    if whole == mesh.axes:
        return None
    original = make_mesh(mesh.topology, whole)
    axis = next(a for a, (name, own) in enumerate(zip(whole, mesh.names, strict=False)) if name != own)
    return AxisParts(original, mesh, axis, mesh.sizes[axis], groups.sizes, groups.of_factor)


def _group(structure: Structure, groups: Groups, op_id: int, graph: OpGraph, factor: int) -> int | None:
    """Return the dim group of an op's factor by the first operand or result in which the factor alone makes up a dim.

    None if there is none, or if the op has no rule.
    """
    op = graph.ops[op_id]
    if op.rule is None:
        return None
    for tensor, dims in [
        *zip(op.operands, op.rule.operands, strict=True),
        *zip(op.results, op.rule.results, strict=True),
    ]:
        cluster = structure.cluster_of[tensor]
        for dim, factors in enumerate(dims if cluster >= 0 else ()):
            own = structure.dims_of[tensor][dim]
            if own >= 0 and factors == (factor,):
                return groups.of_factor.get((cluster, own))
    return None


STAGE = "stage"
"""Name of the stage axis and of the stage dim group."""


class Grouped(Protocol):
    """Structure and dim groups of a program."""

    @property
    def structure(self) -> Structure: ...
    @property
    def groups(self) -> Groups: ...


@dataclasses.dataclass(frozen=True, slots=True)
class StageAxis:
    """Mesh with a stage axis, and the dims that this axis may split."""

    mesh: Mesh
    parts: AxisParts | None
    """Another axis of the mesh that is cut in two, None without one."""
    axis: int
    """Number of the stage axis."""
    structure: Structure
    """Clusters of the program's tensors."""
    of_factor: dict[tuple[int, int], int]
    """Dim group by (cluster, factor)."""
    stages: frozenset[int]
    """Dim groups that count stages."""
    batch: int | None
    """Dim group of the batch; None without one."""

    def of_cluster(self, cluster: int, states: States) -> NDArray[np.bool_]:
        """Return a mask of the allowed ones among states over a cluster's factors, [states]; see `_kept`."""
        count = len(self.structure.clusters[cluster].sizes)
        return self._kept(states, [self.of_factor[(cluster, f)] for f in range(count)])

    def of_tensor(self, tensor: int, states: States) -> NDArray[np.bool_]:
        """Return a mask of the allowed ones among states over a tensor's dims, [states]; see `_kept`."""
        cluster = self.structure.cluster_of[tensor]
        return self._kept(
            states,
            [self.of_factor.get((cluster, f), WHOLE) if f >= 0 else WHOLE for f in self.structure.dims_of[tensor]],
        )

    def of_op(self, op: Op, states: States) -> NDArray[np.bool_]:
        """Return a mask of an op's allowed strategies, [states]; all are allowed for an op without a rule."""
        if op.rule is None:
            return np.ones(len(states), dtype=bool)
        groups = [WHOLE] * len(op.rule.sizes)
        for tensor, dims in op.sides:
            cluster = self.structure.cluster_of[tensor]
            for own, factors in zip(self.structure.dims_of[tensor], dims, strict=True) if cluster >= 0 else ():
                real = [f for f in factors if op.rule.sizes[f] > 1]
                if own >= 0 and real:
                    groups[real[0]] = self.of_factor[(cluster, own)]
        return self._kept(states, groups)

    def _kept(self, states: States, groups: Sequence[int]) -> NDArray[np.bool_]:
        """Return a mask of the states in which the stage axis splits a stage dim, else the batch or nothing.

        `groups` has the group of each dim or factor that states refer to, `WHOLE` for none. Without a stage dim, and
        without a state that splits one, the second rule applies; if that fails too, every state is allowed.
        """
        for wanted, or_whole in ((self.stages, ()), ({self.batch} - {None}, (WHOLE,))):
            dims = [d for d, group in enumerate(groups) if group in wanted]
            allowed = np.isin(states[:, self.axis], [*dims, *or_whole])
            if dims and allowed.any():
                return allowed
        return np.ones(len(states), dtype=bool)


def stage_axis(grouped: Grouped, mesh: Mesh) -> StageAxis | None:
    """Return the axis `stage` of a mesh; None if the mesh has no such axis or the program has no stage dims."""
    groups = grouped.groups
    stages = frozenset(group for group, name in groups.names.items() if name == STAGE)
    if STAGE not in mesh.names or not stages:
        return None
    parts = axis_parts_of(groups, mesh)
    return StageAxis(mesh, parts, mesh.names.index(STAGE), grouped.structure, groups.of_factor, stages, groups.batch)


def with_stages(meshes: Iterable[Mesh], stages: int) -> tuple[Mesh, ...]:
    """Return the meshes that have an axis of `stages` devices, with this axis renamed to `stage`.

    If several axes of a mesh have this size, they use different links, and each is offered. Meshes whose stages are
    slices are first: stages exchange little, and all other communication then uses the fast links of a slice. Axes of
    one device are dropped, and the other axes have the names of all but the last, in order.
    """
    staged: dict[tuple[object, ...], Mesh] = {}
    for mesh in meshes:
        others = [name for name, size in mesh.axes.items() if size > 1]
        for name in others:
            if mesh.axes[name] != stages:
                continue
            other_names = iter(each for each in others if each != others[-1])
            sizes = {STAGE if own == name else next(other_names): size for own, size in mesh.axes.items() if size > 1}
            named = make_mesh(mesh.topology, sizes)
            staged.setdefault((named.sizes, named.layout, named.names.index(STAGE)), named)
    return tuple(sorted(staged.values(), key=lambda mesh: mesh.kinds([STAGE]) != {"network"}))
