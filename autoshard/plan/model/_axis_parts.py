"""An axis cut in two parts: half of a 16-wide axis for a dim of 8.

A spec splits a dim over whole axes only. Where a dim (key-value heads, experts, a small batch) is divided by a proper
factor of an axis but not by the axis, the axis is cut in two parts that can split different dims. The parts are named
after it, `model(8 of 16)` and `model(2 of 16)`, outer first, and lie one inside the other: the places of both together
are those of the axis, in its order.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Mesh, make_mesh
from autoshard.graph import FactorKind, Opaque, OpGraph, Rule, Structure
from autoshard.plan.model._groups import Groups
from autoshard.plan.model._model import Model
from autoshard.plan.record._spec import original_mesh, part_names
from autoshard.plan.xla._states import States


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
