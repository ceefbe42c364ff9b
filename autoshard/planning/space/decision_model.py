"""The decisions of a program on a mesh with their prices, and the values that stay in on-chip memory."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.cost import Chip, Collectives, Compute, Mesh, links
from autoshard.graph import Liveness, OpClass, OpGraph, Structure
from autoshard.planning.xla.array_layouts import Padding
from autoshard.planning.xla.axis_assignments import Seconds, States
from autoshard.planning.xla.spatial_splits import Inner
from autoshard.program import Program


RESERVED = 16 << 20
"""Bytes of on-chip memory that a running kernel takes for its blocks: libtpu's default, and all that v2 to v4 have."""


LASTING = 32
"""A value during whose life more than this many times its own bytes are written is not kept: gradients of layers take
what their forward passes saved from main memory, however few the layers are."""


class Residency:
    """What of a program's values an accelerator keeps in on-chip memory, by how finely they are split.

    TPU compilers leave a value on the chip until its last use if what is written meanwhile fits there too. Of what
    fusions write in ResNet-50 and in loops of decoders, T5 and ViT (v5e with 128 MiB, libtpu 0.0.51) nearly all was
    there where less than 128 MB followed, and little where more than 256 MB did, whatever its size; what a loop carries
    or saves was not. What follows a value is held to be split as finely as the value is, which makes a share of it
    (local bytes over all) a bound that is known before any spec is. Values that look alike are treated alike, so that
    layers that repeat have the same prices.
    """

    def __init__(self, graph: OpGraph, liveness: Liveness, chip: Chip) -> None:
        self.graph = graph
        self.taken_over_own = liveness.computed
        self.stored_over_own = {
            source: graph.tensors[tensor].bytes / graph.tensors[source].bytes
            for source, tensor in liveness.stores.items()
        }
        self.ratio = chip.vmem_over_hbm_bandwidth
        self.share = np.zeros(len(graph.tensors))
        """Of every value the largest share of it that stays on the chip; 0: always in main memory."""
        room = chip.vmem_bytes // chip.cores_per_chip - RESERVED
        if room <= 0 or not self.ratio:
            return
        found = list(_candidates(graph, liveness))
        written = np.zeros(len(graph.ops) + 3)
        for size, _, start, _ in found:
            written[start + 1] += size
        written = written.cumsum()
        alike: dict[object, list[tuple[int, float]]] = defaultdict(list)
        users = _users(graph)
        for size, tensor, start, stop in found:
            # Values without elements have no bytes.
            meanwhile = max(written[stop] - written[start], 1.0)
            record = graph.tensors[tensor]
            what = (graph.ops[record.producer].kind, record.shape, record.dtype, record.loop, users[tensor], size)
            alike[what].append((tensor, room / meanwhile if meanwhile <= LASTING * size else 0.0))
        for members in alike.values():
            least = min(share for _, share in members)
            for tensor, _ in members:
                self.share[tensor] = least
        self._fused(liveness)

    def _fused(self, liveness: Liveness) -> None:
        """A value that is never written is read as those that it follows from are; what is generated is not read."""
        for source, tensor in liveness.stores.items():
            self.share[source] = self.share[tensor]
        generated = {t for op in self.graph.ops if op.op_class is OpClass.FREE for t in op.results}
        for op in self.graph.ops:
            if op.op_class in (OpClass.HEAVY, OpClass.LAYER):
                continue
            read = [self.share[t] for t in op.operands if t not in generated]
            for tensor in op.results:
                if read and tensor not in liveness.materialised:
                    self.share[tensor] = min(read)

    def streamed(self, tensor: int, local_bytes: ArrayLike) -> NDArray[np.float64]:
        """Bytes from main memory that take as long as that many bytes of a value, from where it is."""
        local = np.asarray(local_bytes, dtype=np.float64)
        if not self.share[tensor]:
            return local
        return np.where(local <= self.share[tensor] * self.graph.tensors[tensor].bytes, local / self.ratio, local)

    def taken_besides(self, tensor: int, local_bytes: ArrayLike) -> NDArray[np.float64]:
        """What a matmul reads to compute a value that it takes, beyond as many bytes as the value has."""
        return self.streamed(tensor, local_bytes) * (self.taken_over_own.get(tensor, 1.0) - 1.0)

    def left(self, tensor: int, local_bytes: ArrayLike) -> NDArray[np.float64]:
        """`streamed` for what a matmul makes: of a value that its kernel goes on with, what it stores instead."""
        return self.streamed(tensor, local_bytes) * self.stored_over_own.get(tensor, 1.0)


def _users(graph: OpGraph) -> list[tuple[str, ...]]:
    """For every value the kinds of the ops that take it."""
    kinds: list[set[str]] = [set() for _ in graph.tensors]
    for op in graph.ops:
        for tensor in op.operands:
            kinds[tensor].add(op.kind)
    return [tuple(sorted(each)) for each in kinds]


def _candidates(graph: OpGraph, liveness: Liveness) -> Iterator[tuple[int, int, int, int]]:
    """(bytes, tensor, start, stop) of everything that neither comes in, goes out nor is carried by a loop."""
    held = {*graph.arguments, *graph.results, *liveness.hosted}
    held.update(t for loop in graph.loops for c in loop.carries for t in (c.init, c.body, c.update, c.result))
    for tensor, start, stop in liveness.buffers:
        record = graph.tensors[tensor]
        if tensor not in held and record.producer >= 0:
            yield record.elements * liveness.itemsize(graph, (tensor, start, stop)), tensor, start, stop
    for softmax in liveness.softmaxes:
        for tensor, start, stop, width in softmax.whole.buffers:
            if tensor not in held:
                yield graph.tensors[tensor].elements * width, tensor, start, stop


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
