"""An axis that stands for the stages of a pipeline: what has stages splits them over it, and nothing else there.

A pipeline has many alternatives that no pipeline would take: a stage whose dim stays whole, so that all devices compute
all stages, or an axis of stages that splits heads. Where meshes of a pipeline are looked for, each of them has an axis
`stage` of as many devices as there are stages; every value and op with a dim of stages splits that over it. Outside of
the pipeline (embedding, head, layers that are left over) it splits the batch where there is one, and any dim of
parameters and of their state. What is left to choose is as if the mesh had an axis less.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Mesh, make_mesh
from autoshard.graph import Op, Structure
from autoshard.plan.model._axis_parts import AxisParts, axis_parts_of
from autoshard.plan.model._groups import Groups
from autoshard.plan.xla._states import WHOLE, States


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
