"""Decisions of a program on a mesh with their prices, and a model of the tensors that stay in on-chip memory."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.cost import Chip, Collectives, Compute, Mesh, links
from autoshard.graph import Liveness, Loop, OpClass, OpGraph, Structure
from autoshard.planning.xla.array_layouts import Padding
from autoshard.planning.xla.axis_assignments import Emitted, Seconds, States
from autoshard.planning.xla.spatial_splits import Inner
from autoshard.planning.xla.sums_after_loops import adds_up
from autoshard.program import Program


RESERVED = 16 << 20
"""Bytes of on-chip memory for the blocks of a running kernel: libtpu's default, and the whole memory of v2 to v4."""
SCOPED = {"v6e": 2 * RESERVED}
"""Bytes of on-chip memory for the blocks of kernels, by chip, where they are not `RESERVED`: libtpu's scoped limit."""


_SLICING = frozenset({"dynamic_slice", "dynamic_update_slice", "gather", "scatter"})
"""Kinds of ops that use a part of their first operand, which is in main memory."""

_PARTS = frozenset({"slice", "concatenate"})
"""Kinds of heavy ops that copy parts of their operands, and that are fused into the ops that use them."""

LASTING = 32
"""Limit for tensors that stay on the chip, in writes during a tensor's life over the tensor's own bytes.

Layer gradients read activations of the forward pass from main memory, however few the layers are.
"""


class Residency:
    """Model of the tensors that an accelerator retains in on-chip memory, by how finely they are split.

    TPU compilers leave a tensor on the chip until its last use if everything written until then fits there too. Stacks
    that a loop carries or saves are in main memory. Other values that it carries stay on the chip if all that one trip
    uses fits there. So do weights that it reads in every trip.

    Later writes are assumed to be split as finely as the tensor. This makes the bound a share of the tensor (local
    bytes over all bytes), which is known before any spec is. Tensors that look alike are treated alike, so that
    repeated layers have the same prices.

    Evidence: docs/compiler_behaviour.md, "Tensors in on-chip memory".
    """

    def __init__(self, graph: OpGraph, liveness: Liveness, chip: Chip, devices: int = 1) -> None:
        """Compute `share` of every tensor; all are 0 for a chip without on-chip memory beyond `RESERVED`.

        `devices` is the number of devices among which the values of a loop are split.
        """
        self.graph = graph
        self.taken_over_own = liveness.fused_operand_ratios
        self.fetches = liveness.fetches
        self.stored_over_own = {
            source: graph.tensors[tensor].bytes / graph.tensors[source].bytes
            for source, tensor in liveness.stores.items()
        }
        self.ratio = chip.vmem_over_hbm_bandwidth
        self.share = np.zeros(len(graph.tensors))
        """Largest share of each tensor that stays on the chip, [tensors]; 0 if it is always in main memory."""
        self.room = room = chip.vmem_bytes // chip.cores_per_chip - RESERVED
        self._written, self._made = np.zeros(len(graph.ops) + 3), dict[int, tuple[int, int]]()
        if room <= 0 or not self.ratio:
            return
        candidates = list(_candidates(graph, liveness))
        for size, tensor, start, _ in candidates:
            self._written[start + 1] += size
            self._made[tensor] = start, size
        self._written = written = self._written.cumsum()
        alike: dict[object, list[tuple[int, float]]] = defaultdict(list)
        for size, tensor, start, stop in candidates:
            # Values without elements have no bytes.
            later_writes = max(written[stop] - written[start], 1.0)
            record = graph.tensors[tensor]
            kinds = tuple(sorted({user.kind for user in graph.users[tensor]}))
            look = (graph.ops[record.producer].kind, record.shape, record.dtype, record.loop, kinds, size)
            alike[look].append((tensor, room / later_writes if later_writes <= LASTING * size else 0.0))
        for members in alike.values():
            least = min(share for _, share in members)
            for tensor, _ in members:
                self.share[tensor] = least
        for loop in graph.loops:
            if not loop.branches and all(inner.parent != loop.id for inner in graph.loops):
                made = sum(size for size, _, start, stop in candidates if loop.start <= start and stop <= loop.stop)
                self._in_loop(loop, made, room, devices)
        self._fused(liveness)

    def _in_loop(self, loop: Loop, made: int, room: int, devices: int) -> None:
        """Give values that a loop carries, and those that it reads in every trip, their share of the chip's room.

        `made` are the bytes of all buffers that one trip writes and reads. Weights, and the sums that are added up for
        them, may be whole if the other values are split among all devices.
        """
        tensors = self.graph.tensors
        ops = self.graph.ops[loop.start : loop.stop]
        stacked = {op.operands[0] for op in ops if op.kind in _SLICING}
        carried = [c for c in loop.carries if c.body not in stacked and tensors[c.body].elements > 1]
        weights = {
            t for op in ops if op.kind not in _SLICING for t in op.operands
            if tensors[t].loop != loop.id and t not in self.graph.generated
        }  # fmt: skip
        bodies = {c.body for c in carried}
        added = [c for c in carried if adds_up(self.graph, c)]
        kept = sum(tensors[t].bytes for t in weights | {c.body for c in added})
        split = made + sum(tensors[t].bytes for t in bodies) - sum(tensors[c.body].bytes for c in added)
        share = room / max(1, kept + split)
        for carry in carried:
            self.share[carry.body] = self.share[carry.update] = share
        if kept + split / devices <= room:
            share = 1.0
        for tensor in (*weights, *(t for c in added for t in (c.body, c.update))):
            self.share[tensor] = share

    def _fused(self, liveness: Liveness) -> None:
        """Give tensors that are never materialised the least share of the tensors that they are computed from.

        Generated tensors (constants, iotas) are not read and do not count. Updates of stacks are written to main
        memory.
        """
        stacked = {op.operands[1] for op in self.graph.ops if op.kind == "dynamic_update_slice"}
        for source, tensor in liveness.stores.items():
            self.share[source] = self.share[tensor]
        for op in self.graph.ops:
            if op.op_class is OpClass.LAYER or op.op_class is OpClass.HEAVY and op.kind not in _PARTS:
                continue
            read = [self.share[t] for t in op.operands if t not in self.graph.generated]
            for tensor in op.results:
                if read and tensor not in liveness.materialised and tensor not in stacked:
                    self.share[tensor] = min(read)

    def streamed(self, tensor: int, local_bytes: ArrayLike, reader: int = -1) -> NDArray[np.float64]:
        """Return the main-memory bytes that take as long to transfer as `local_bytes` of a tensor do.

        A shard within `share` of the tensor stays on the chip and counts less, by the ratio of bandwidths. So does one
        that an op `reader` outside of loops reads soon enough (`_share_until`).
        """
        local = np.asarray(local_bytes, dtype=np.float64)
        share = max(self.share[tensor], self._share_until(tensor, reader))
        if not share:
            return local
        return np.where(local <= share * self.graph.tensors[tensor].bytes, local / self.ratio, local)

    def _share_until(self, tensor: int, reader: int) -> float:
        """Return the largest share of a tensor that is still on the chip when an op reads it; 0 if none is.

        The compiler copies a value that later ops need to main memory while other kernels run. Kernels read the first
        copy until something else needs its place. Sums of batch norms read outputs of convolutions so (v5e, v6e).
        """
        start, size = self._made.get(tensor, (0, 0))
        if not size or reader < start or self.graph.ops[reader].loop >= 0:
            return 0.0
        written = float(self._written[reader + 1] - self._written[start])
        return self.room / max(written, 1.0) if written <= LASTING * size else 0.0

    def fused_operand_bytes(self, tensor: int, local_bytes: ArrayLike) -> NDArray[np.float64]:
        """Return the `streamed` bytes, beyond its operand's own, that a kernel reads to compute a fused operand.

        `local_bytes` is the size of the operand's shard. The result is 0 for an operand without fused ops, and below 0
        for one that is computed from fewer bytes.
        """
        return self.streamed(tensor, local_bytes) * (self.taken_over_own.get(tensor, 1.0) - 1.0)

    def stored_bytes(self, tensor: int, local_bytes: ArrayLike) -> NDArray[np.float64]:
        """Return the `streamed` bytes that a matmul stores for a result.

        If its kernel goes on with the result in an epilogue, these are the bytes of the tensor that is stored instead.
        """
        return self.streamed(tensor, local_bytes) * self.stored_over_own.get(tensor, 1.0)


def _candidates(graph: OpGraph, liveness: Liveness) -> Iterator[tuple[int, int, int, int]]:
    """Yield (bytes, tensor, start, stop) of every tensor that may stay on the chip, of its whole size.

    Arguments, results, tensors in the host's memory and tensors that a loop carries may not. Buffers of fused softmaxes
    are included.
    """
    excluded = {*graph.arguments, *graph.results, *liveness.hosted}
    excluded.update(t for loop in graph.loops for c in loop.carries for t in (c.init, c.body, c.update, c.result))
    for tensor, start, stop in liveness.buffers:
        record = graph.tensors[tensor]
        if tensor not in excluded and record.producer >= 0:
            yield record.elements * liveness.itemsize(graph, (tensor, start, stop)), tensor, start, stop
    for softmax in liveness.softmaxes:
        for tensor, start, stop, width in softmax.fused.buffers:
            if tensor not in excluded:
                yield graph.tensors[tensor].elements * width, tensor, start, stop


Channel = tuple[int, str]
"""(block, resource): the resource is `compute` or the name of a link; the block is a loop, -1 for the top level."""

EXPOSED: Channel = (-2, "exposed")
"""Channel of communication that compute waits for, of all blocks together."""


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryTerm:
    """Bytes that are live on every device during [start, stop), for each alternative of a node."""

    kind: str
    """Kind of memory, as in `Prediction.memory`."""
    start: int
    """Number of the op at which the bytes become live."""
    stop: int
    """Number of the first op at which they are no longer live."""
    usage: NDArray[np.int64]
    """Bytes on one device, [states]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One decision with its alternatives."""

    kind: str
    """Kind of decision: `cluster`, `op` or `copy`."""
    ref: int
    """Id of the cluster, op or tensor."""
    states: States
    """Alternatives: the cluster factor, op factor or tensor dim that each mesh axis splits, [states, axes]."""
    has_memory: NDArray[np.bool_]
    """For a copy, a mask of the alternatives with memory of their own; True for other nodes."""
    time: dict[Channel, Seconds]
    """Seconds in one step by channel, [states]."""
    memory: tuple[MemoryTerm, ...]
    """Bytes of each alternative over the program."""
    name: str
    """Name of the cluster's main tensor, of the op or of the copied tensor, for readers."""
    inner: tuple[Inner, ...] = ()
    """Collectives of one execution inside an op; their time is in `time`, exposed."""
    launches: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Number of fusions that write a cluster's tensors in one step, by block; their launch time is in `time`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reshard:
    """Reshard of a tensor between two nodes, with the collectives that each pair of alternatives needs."""

    source: int
    """Node in whose spec the tensor is computed or stored."""
    target: int
    """Node in whose spec the tensor is consumed or stored."""
    tensor: int
    op: int
    """Op that the tensor enters or leaves; -1 for a tie."""
    block: int
    """Loop in which the reshard runs, -1 for the top level."""
    trips: float
    """Number of executions in one step."""
    overlap: str
    """An `Overlap`: how the reshard may be hidden; `reshard_overlap` refines it for chosen alternatives."""
    rows: NDArray[np.int64]
    """Row of `costs` for each alternative of `source`."""
    columns: NDArray[np.int64]
    """Column of `costs` for each alternative of `target`."""
    costs: dict[Channel, Seconds]
    """Seconds of one of `trips` executions by channel, [distinct source states, distinct target states]."""
    forbidden: NDArray[np.bool_] | None
    """Mask of the pairs of rows and columns that are not allowed; None if all are."""
    path: "Path"
    """States of the tensor at both ends; `rows` and `columns` count its `source` and `target`."""
    narrow: NDArray[np.bool_] | None = None
    """Mask of the matmul's alternatives that compute too little to pipeline the reshard into them; None for none."""
    runs: NDArray[np.bool_] | None = None
    """Mask of the pairs of rows and columns at which the reshard runs in this block; None for all."""
    combined: int = 1
    """Number of equal tensors in `path`, of which this one is one; `trips` counts its share of their executions."""
    exposed: float = 0.0
    """Share of the seconds that overlaps with nothing; `overlap` holds for the rest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Path:
    """States of a tensor at its source and at its target, one row or column for each distinct state."""

    shape: tuple[int, ...]
    """Dims of the tensor at the source."""
    source_dims: States
    """States of the source, over the tensor's dims."""
    passed_dims: States
    """`source_dims` without the axes that the op between cannot pass on; these axes are gathered first."""
    factors: tuple[int, ...]
    """Sizes that `source` and `target` refer to: of factors that the op between passes on, or of the tensor's dims."""
    source: States
    """Distinct states at the source, over `factors`."""
    target: States
    """Distinct states at the target, over `factors`, as `source` has those at the source."""
    itemsize: int
    """Bytes of one element of the tensor."""
    reduce_itemsize: int
    """Bytes of an element in sums of partial results."""
    collected: bool = False
    """True if partial results are gathered and combined, not summed."""
    stacked: bool = False
    """True if partial results are matrices in a stack whose dims keep their order, as filters of a convolution are."""
    whole_sums: tuple[Emitted, ...] = ()
    """Forms in place of which a sum whose result is split is an all-reduce and a slice."""

    def contents(self) -> tuple[object, ...]:
        """Return a key that is equal for equal paths."""
        states = (self.source_dims, self.passed_dims, self.source, self.target)
        sizes = (self.shape, self.factors, self.itemsize, self.reduce_itemsize)
        marks = (self.collected, self.stacked, self.whole_sums)
        return (*sizes, *marks, *((each.shape, each.tobytes()) for each in states))


class Decisions(Protocol):
    """Nodes and reshards, as `build_problem` needs them; `fixed_bytes` are those that no choice changes."""

    @property
    def nodes(self) -> Sequence[Node]: ...

    @property
    def reshards(self) -> Sequence[Reshard]: ...

    @property
    def fixed_bytes(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """Priced decisions of a program on a mesh, which `build_problem` weighs and `evaluate` reads."""

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
    copy_nodes: dict[tuple[int, int, int], int]
    """Node of each copy of a tensor, by the use that shares it (`Op.use`)."""
    fixed_bytes: int
    """Bytes that no choice changes (scalars, and tables of addresses on TPUs)."""
    credited_tensors: frozenset[int]
    """Tensors whose bytes softmaxes subtract from adjacent matmuls; cached, since every evaluation needs them."""
    eager: bool = False
    """Value of `AnalysedProgram.eager`."""

    @property
    def one_in_flight(self) -> bool:
        """True if the step has one collective in flight at a time: compiled steps on GPUs have."""
        return self.mesh.topology.traits.one_in_flight and not self.eager

    @property
    def axis_sizes(self) -> list[int]:
        """Sizes of the mesh axes, major first."""
        return list(self.mesh.sizes)

    @property
    def axis_names(self) -> list[str]:
        """Names of the mesh axes, major first."""
        return list(self.mesh.names)


def link_names(mesh: Mesh) -> dict[str, str]:
    """Return the name of each mesh axis's physical links; axes that share links share the name."""
    return {axis: "+".join(group) for group in links(mesh) for axis in group}
