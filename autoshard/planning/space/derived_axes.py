"""Axes derived from others: parts of an axis, and axes that stand for the stages of a pipeline."""

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
"""Share of the program's FLOPs that must be in ops with such a dim."""
LEAST_GAIN = 0.005
"""Share of the step time that a refined mesh must save to be taken."""


@dataclasses.dataclass(frozen=True, slots=True)
class AxisParts:
    """One axis of a mesh cut in two."""

    original: Mesh
    mesh: Mesh
    axis: int
    """Number of the axis in `original`, and of its outer part in `mesh`; the inner part comes next."""
    dim: int
    """Size of the dim that asks for it."""
    group_sizes: dict[int, int]
    """Group -> what an axis must divide to split all of it evenly."""
    of_factor: dict[tuple[int, int], int]
    """(cluster, factor) -> group."""

    def apart(self, states: States, sizes: list[int]) -> NDArray[np.bool_]:
        """States that may be used, given for each dim the size that must be divided.

        The parts go together, as the axis would, unless one of them splits a dim that the axis cannot split.
        """
        whole = self.original.sizes[self.axis]
        parts = self.mesh.sizes[self.axis : self.axis + 2]
        needs = np.array([size % whole != 0 and any(size % part == 0 for part in parts) for size in sizes] + [False])
        outer, inner = states[:, self.axis], states[:, self.axis + 1]
        return (outer == inner) | needs[outer] | needs[inner]

    def expand(self, states: States) -> States:
        """States over the original axes as states over the refined ones."""
        return np.insert(states, self.axis + 1, states[:, self.axis], axis=1)

    def allowed(
        self, before: Model, after: Model, allowed: Mapping[int, NDArray[np.bool_]]
    ) -> dict[int, NDArray[np.bool_]]:
        """Alternatives on the refined mesh that are allowed ones of the original mesh."""
        found = {}
        for node, mask in allowed.items():
            wanted = {tuple(state) for state in self.expand(before.nodes[node].states[mask]).tolist()}
            found[node] = np.array([tuple(state) in wanted for state in after.nodes[node].states.tolist()])
        return found

    def choices(self, before: Model, after: Model, choices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Choices on the original mesh as choices on the refined one; None if some state is not there."""
        found = []
        for old, new, choice in zip(before.nodes, after.nodes, choices.tolist(), strict=True):
            state = self.expand(old.states[choice : choice + 1])
            rows = np.flatnonzero((new.states == state).all(axis=1) & (new.held == old.held[choice]))
            if not len(rows):
                return None
            found.append(int(rows[0]))
        return np.array(found, dtype=np.int64)


def find_axis_parts(graph: OpGraph, structure: Structure, groups: Groups, mesh: Mesh) -> AxisParts | None:
    """The cut that the most FLOPs ask for; None if no dim does, or so few FLOPs that nothing is gained.

    The batch asks for a part of the first axis. Dims over which an op is many small ones (heads, experts) ask for one
    of another axis, the last of equal ones, unless such an axis divides them; other dims have others beside them in
    their op that an axis can split as well.
    """
    asked: dict[tuple[int, int], float] = defaultdict(float)
    for op_id in structure.heavy:
        op = graph.ops[op_id]
        if op.rule is None or not op.flops:
            continue
        shared = _shared(op.rule) if op.opaque is None or not op.opaque.on_shards else _of_call(op.rule, op.opaque)
        for factor, size in enumerate(op.rule.sizes):
            of_batch = groups.batch is not None and _group(structure, groups, op_id, graph, factor) == groups.batch
            axes = [axis for axis, n in enumerate(mesh.sizes) if n > 1]
            axes = axes[:1] if of_batch else axes[1:] or axes
            if not of_batch and (factor not in shared or any(size % mesh.sizes[axis] == 0 for axis in axes)):
                continue
            for axis in axes:
                part = math.gcd(size, mesh.sizes[axis])
                if part not in (1, mesh.sizes[axis]):
                    asked[axis, part] += op.flops * graph.trips(op.loop)
    if not asked:
        return None
    axis, part = max(asked, key=lambda key: (asked[key], *key))
    if asked[axis, part] < LEAST_SHARE * graph.flops:
        return None
    return refine(mesh, groups, axis, part)


def _shared(rule: Rule) -> set[int]:
    """Factors of every operand and result."""
    return set.intersection(*({f for dim in dims for f in dim} for dims in (*rule.operands, *rule.results)))


def _of_call(rule: Rule, call: Opaque) -> set[int]:
    """Factors that split a call into many like it; its tables of a mask may not have them."""
    minor = {f for dims in (*rule.operands, *rule.results) for dim in dims for f in dim[1:]}
    even = {f for f, kind in enumerate(rule.kinds) if kind is FactorKind.PARALLEL}
    return even - minor - {factor for factor, _ in call.sloping}


def refine(mesh: Mesh, groups: Groups, axis: int, part: int) -> AxisParts:
    """`mesh` with one axis cut into an outer part of size `part` and the rest."""
    name, size = mesh.names[axis], mesh.sizes[axis]
    sizes: dict[str, int] = {}
    for own, n in mesh.axes.items():
        if own == name:
            sizes.update(zip(part_names(name, (part, size // part)), (part, size // part), strict=True))
        else:
            sizes[own] = n
    return AxisParts(mesh, make_mesh(mesh.topology, sizes), axis, part, groups.sizes, groups.of_factor)


def axis_parts_of(groups: Groups, mesh: Mesh) -> AxisParts | None:
    """The cut axis of a mesh, by the names of its parts; None if none is cut."""
    whole = original_mesh(mesh.axes)
    if whole == mesh.axes:
        return None
    original = make_mesh(mesh.topology, whole)
    axis = next(a for a, (name, own) in enumerate(zip(whole, mesh.names, strict=False)) if name != own)
    return AxisParts(original, mesh, axis, mesh.sizes[axis], groups.sizes, groups.of_factor)


def _group(structure: Structure, groups: Groups, op_id: int, graph: OpGraph, factor: int) -> int | None:
    """Dim group of an op's factor, if it stands alone on a dim of some operand or result."""
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
"""The axis's name, and that of the dim group."""


class Grouped(Protocol):
    """What dims of a program belong together."""

    @property
    def structure(self) -> Structure: ...
    @property
    def groups(self) -> Groups: ...


@dataclasses.dataclass(frozen=True, slots=True)
class StageAxis:
    """A mesh with an axis of stages, and which dims that may split."""

    mesh: Mesh
    parts: AxisParts | None
    """Another axis that is cut in two, if one is."""
    axis: int
    structure: Structure
    of_factor: dict[tuple[int, int], int]
    """(cluster, factor) -> group."""
    stages: frozenset[int]
    """Groups of dims of stages."""
    batch: int | None

    def of_cluster(self, cluster: int, states: States) -> NDArray[np.bool_]:
        """Which states over the factors of a cluster may be used."""
        count = len(self.structure.clusters[cluster].sizes)
        return self._kept(states, [self.of_factor[(cluster, f)] for f in range(count)])

    def of_tensor(self, tensor: int, states: States) -> NDArray[np.bool_]:
        """Which states over the dims of a tensor may be used."""
        cluster = self.structure.cluster_of[tensor]
        return self._kept(
            states,
            [self.of_factor.get((cluster, f), WHOLE) if f >= 0 else WHOLE for f in self.structure.dims_of[tensor]],
        )

    def of_op(self, op: Op, states: States) -> NDArray[np.bool_]:
        """Which strategies of an op may be used."""
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
        """By the group of each dim. Where no state keeps to the rule there is none."""
        for wanted, also in ((self.stages, ()), ({self.batch} - {None}, (WHOLE,))):
            dims = [d for d, group in enumerate(groups) if group in wanted]
            kept = np.isin(states[:, self.axis], [*dims, *also])
            if dims and kept.any():
                return kept
        return np.ones(len(states), dtype=bool)


def stage_axis(grouped: Grouped, mesh: Mesh) -> StageAxis | None:
    """The axis `stage` of a mesh; None if it has none, or the program has no dims of stages."""
    groups = grouped.groups
    stages = frozenset(group for group, name in groups.names.items() if name == STAGE)
    if STAGE not in mesh.names or not stages:
        return None
    parts = axis_parts_of(groups, mesh)
    return StageAxis(mesh, parts, mesh.names.index(STAGE), grouped.structure, groups.of_factor, stages, groups.batch)


def with_stages(meshes: Iterable[Mesh], stages: int) -> tuple[Mesh, ...]:
    """The meshes with an axis of as many devices as there are stages, which is then called `stage`.

    Of a mesh with several such axes, which lie on different links, each may be it. Those left out have none. First come
    those whose stages are slices: little is handed from one to the next, and all else stays within fast links.
    """
    found: dict[tuple[object, ...], Mesh] = {}
    for mesh in meshes:
        others = [name for name, size in mesh.axes.items() if size > 1]
        for name in others:
            if mesh.axes[name] != stages:
                continue
            rest = iter(each for each in others if each != others[-1])
            sizes = {STAGE if own == name else next(rest): size for own, size in mesh.axes.items() if size > 1}
            named = make_mesh(mesh.topology, sizes)
            found.setdefault((named.sizes, named.layout, named.names.index(STAGE)), named)
    return tuple(sorted(found.values(), key=lambda mesh: mesh.kinds([STAGE]) != {"network"}))
