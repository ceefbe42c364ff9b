"""Every decision of a program on a mesh with its prices, before any weighting: nodes, links between them, memory.

A node is a cluster (its alternatives are specs), a heavy op (strategies: mesh axes assigned to its factors) or a
copy (one tensor held in one more spec). Time is kept apart by what it competes with: compute of a block,
communication of a block that can hide behind that compute, by physical link, and exposed communication.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives, Compute, Mesh, links
from autoshard.graph import Liveness, OpGraph, Structure
from autoshard.plan.model._residency import Residency
from autoshard.plan.xla._halos import Inner
from autoshard.plan.xla._padding import Padding
from autoshard.plan.xla._states import Seconds, States
from autoshard.program import Program


Channel = tuple[int, str]
"""(block, what): `what` is `compute` or the name of a link; the block is a loop, -1 for the top level."""

EXPOSED: Channel = (-2, "exposed")

HOST = "host memory"
"""What traffic to and from the host's memory competes with: beside compute, as a link of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryTerm:
    """Bytes that a node's choice holds on every device during [start, stop)."""

    kind: str
    start: int
    stop: int
    usage: NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One decision."""

    kind: str
    """`cluster`, `op` or `copy`."""
    ref: int
    """Id of the cluster, op or tensor."""
    states: States
    """Alternatives: the cluster factor, op factor or tensor dim that each mesh axis splits."""
    held: NDArray[np.bool_]
    """For a copy, whether the alternative holds memory of its own; True elsewhere."""
    time: dict[Channel, Seconds]
    memory: tuple[MemoryTerm, ...]
    name: str
    inner: tuple[Inner, ...] = ()
    """Collectives of one execution inside an op; their time is in `time`, exposed."""
    launches: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """How many fusions write a cluster's tensors in one step, by block; what starting them costs is in `time`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reshard:
    """A value between two nodes: which collectives each pair of their alternatives needs."""

    source: int
    target: int
    tensor: int
    op: int
    """The op that the value enters or leaves; -1 for a tie."""
    block: int
    trips: float
    overlap: str
    """An `Overlap`: what the move may hide behind; `reshard_overlap` tells it of chosen alternatives."""
    rows: NDArray[np.int64]
    """Row of `costs` for each alternative of `source`."""
    columns: NDArray[np.int64]
    """Column of `costs` for each alternative of `target`."""
    costs: dict[Channel, Seconds]
    """Per channel a matrix [distinct source states, distinct target states]: seconds of one execution, of `trips`."""
    forbidden: NDArray[np.bool_] | None
    """Pairs of rows and columns that may not be."""
    path: "Path"
    narrow: NDArray[np.bool_] | None = None
    """For each alternative of the matmul that the value enters or leaves, whether it computes too little to have the
    move pipelined into it; None if no alternative does."""


@dataclasses.dataclass(frozen=True, slots=True)
class Path:
    """How a value gets from its source's states to its target's, one row or column for each distinct state."""

    shape: tuple[int, ...]
    """Dims of the value at the source."""
    held: States
    """States over these dims in which the source has it."""
    kept: States
    """States of the source without the axes that the op between cannot pass on; gathering them comes first."""
    factors: tuple[int, ...]
    """Sizes of what the op passes on."""
    source: States
    target: States
    """States over `factors`: those at the source, and those at the target."""
    itemsize: int
    reduce_itemsize: int
    collected: bool = False
    """True if partial results are gathered and combined, where others are summed."""

    def contents(self) -> tuple[object, ...]:
        """What it is, to be looked up by."""
        states = (self.held, self.kept, self.source, self.target)
        sizes = (self.shape, self.factors, self.itemsize, self.reduce_itemsize, self.collected)
        return (*sizes, *((each.shape, each.tobytes()) for each in states))


class Decisions(Protocol):
    """What is to be decided, as `build_problem` takes it."""

    @property
    def nodes(self) -> Sequence[Node]: ...

    @property
    def reshards(self) -> Sequence[Reshard]: ...

    @property
    def fixed_bytes(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """The whole: what `build_problem` weighs and `evaluate_plan` reads."""

    program: Program
    graph: OpGraph
    structure: Structure
    liveness: Liveness
    mesh: Mesh
    collectives: Collectives
    compute: Compute
    residency: Residency
    padding: Padding
    nodes: tuple[Node, ...]
    reshards: tuple[Reshard, ...]
    cluster_node: tuple[int, ...]
    """Node of every cluster."""
    op_node: dict[int, int]
    """Node of every heavy op."""
    copy_nodes: dict[tuple[int, int], int]
    """Node of the copy of a tensor in a block."""
    fixed_bytes: int
    """Bytes that no choice changes (scalars)."""
    taken_back: frozenset[int]
    """Values whose bytes softmaxes take off the matmuls beside them; derived once, as every judgement asks for it."""

    @property
    def axis_sizes(self) -> list[int]:
        return list(self.mesh.sizes)

    @property
    def axis_names(self) -> list[str]:
        return list(self.mesh.names)


def link_names(mesh: Mesh) -> dict[str, str]:
    """Mesh axis -> the name of the physical links it uses; axes that share links share the name."""
    return {axis: "+".join(group) for group in links(mesh) for axis in group}
