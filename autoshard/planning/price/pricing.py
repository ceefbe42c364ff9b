"""Pricing of every decision of a program on a mesh: alternatives with their times, reshards, memory."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Calibration, Mesh
from autoshard.graph import FactorKind, Op, OpClass, is_batched, rounds_rows
from autoshard.planning.price.combined_collectives import CombinedCollectives, PartTables
from autoshard.planning.price.device_memory import fixed_bytes
from autoshard.planning.price.node_prices import LARGE_SHARE, NodePricer
from autoshard.planning.price.reshard_paths import PathPrices, PathTables
from autoshard.planning.price.sum_places import SumPlaces
from autoshard.planning.space.decision_model import EXPOSED, Channel, MemoryTerm, Model, Node, Path, Reshard
from autoshard.planning.space.derived_axes import AxisParts, StageAxis
from autoshard.planning.space.dim_groups import factor_states, looped_factors
from autoshard.planning.space.op_strategies import result_states
from autoshard.planning.space.overlap import (
    ALONE,
    AT_NARROW,
    READING,
    NarrowMatmuls,
    Overlap,
    alone_between_loops,
    ends_of_step,
)
from autoshard.planning.space.program_analysis import AnalysedProgram
from autoshard.planning.xla.axis_assignments import (
    PARTIAL,
    WHOLE,
    Seconds,
    States,
    decompose,
    distinct,
    enumerate_states,
    exchanged_sizes,
    local_elements,
    relabel,
)
from autoshard.planning.xla.partitioner_rules import collected_factors, sliced_by_itself, united
from autoshard.planning.xla.rewritten_sums import summed_whole
from autoshard.program import Program


def price(
    program: Program,
    reading: AnalysedProgram,
    mesh: Mesh | AxisParts | StageAxis,
    memory_limit: int,
    calibration: Calibration | None = None,
    tables: PathTables | None = None,
) -> Model:
    """Price all nodes, reshards and memory of a program on a mesh.

    - `program`, `reading`: the program and its analysis for the backend of the mesh.
    - `mesh`: the mesh, or the record of its axes that are cut into parts, or of its `stage` axis.
    - `memory_limit`: bytes of one device.
    - `calibration`: default: the calibration of the mesh's chip.
    - `tables`: path tables of other programs that were priced with the same calibration; they are extended and trimmed.
    """
    parts = mesh.parts if isinstance(mesh, StageAxis) else mesh if isinstance(mesh, AxisParts) else None
    whole = mesh.mesh if isinstance(mesh, AxisParts) else mesh
    what = (program, reading.graph, reading.structure, reading.liveness, whole, memory_limit, parts, calibration)
    model = _Pricer(tables, *what).model(reading.eager)
    if tables is not None:
        tables.trim()
    return model


@dataclasses.dataclass(frozen=True, slots=True)
class ValueUse:
    """One use of a tensor: the op that reshards the tensor, and how often."""

    tensor: int
    op: int
    """Id of the op; -1 for a result that becomes the next step's argument, and for a loop's initial value."""
    block: int
    """Loop in which the op consumes the tensor; -1 for none."""
    trips: float
    """Reshards of the tensor in one step."""
    operand: int = -1
    """Position among the operands of a heavy op that consumes the tensor itself; -1 for any other use."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReshardStates:
    """States of a tensor at both ends of a reshard; one row for each alternative."""

    source_dims: States
    """Alternatives of the source, over the tensor's own dims, [source states, axes]."""
    passed_dims: States
    """`source_dims` without the axes that the op between cannot pass on, over the tensor's own dims."""
    source: States
    """Alternatives of the source, over `factors`."""
    target: States
    """Alternatives of the target, over `factors`, [target states, axes]."""
    factors: Sequence[int]
    """Sizes of the dims of the tensor, or of the factors of the op's rule, that `source` and `target` refer to."""
    dtype: str
    """Dtype in which partial results are summed."""
    stacked: bool = False
    """Value of `Path.stacked`."""


class _Pricer(NodePricer):
    """Builder of a model: the nodes, and the reshards between them."""

    def __init__(self, tables: PathTables | None, *what: Any) -> None:
        """Start a model whose paths share the tables of `tables`, if there are any; `what` is the input of
        `NodePricer`.
        """
        super().__init__(*what)
        self.reshards: list[Reshard] = []
        self.equal: dict[tuple[object, ...], Path] = {}
        self.op_node: dict[int, int] = {}
        self.narrows = NarrowMatmuls(self.axes, self.collectives.calibration.pipelined_columns)
        self.paths: dict[tuple[object, ...], dict[str, Seconds]] = {} if tables is None else tables.of(self.mesh)
        self.path_prices = PathPrices(self.collectives, self.link_of)
        self.shared_credits: dict[tuple[object, ...], Seconds] = {}
        self.part_tables = PartTables(self.path_prices)
        self.sum_places = SumPlaces(self.graph, self.structure, self.collectives, self.part_tables)
        self.alone = alone_between_loops(self.graph, self.structure, self.stored, self.updated)
        self.first, self.last = ends_of_step(self.graph)

    def model(self, eager: bool) -> Model:
        """Build the model: nodes of clusters, then of heavy ops, then of copies, and the reshards. Buffers without a
        cluster, and tables of addresses, add up to its fixed bytes.

        A framework that runs op by op (`eager`) sends the collectives of a block while the next one computes.
        """
        cluster_node = tuple(range(len(self.structure.clusters)))
        self.add_clusters()
        for op in self.structure.heavy:
            self.op_node[op] = len(self.nodes)
            self.add_heavy(self.graph.ops[op])
        copies = self.add_reshards(cluster_node)
        if self.mesh.topology.traits.separate_collective_buffers:
            combined = CombinedCollectives(self.graph, self.axes, self.part_tables, eager)
            self.reshards = list(combined.parts(self.reshards, self.role))
        fixed = fixed_bytes(self.graph, self.structure, self.liveness, self.mesh.topology)
        return Model(
            self.program, self.graph, self.structure, self.liveness, self.mesh, self.collectives, self.compute,
            self.residency, self.padding, tuple(self.nodes), tuple(self.reshards), cluster_node, self.op_node, copies,
            fixed, self.credited_tensors, eager,
        )  # fmt: skip

    def add_reshards(self, cluster_node: Sequence[int]) -> dict[tuple[int, int, int], int]:
        """Add the reshards of all edges, ties and loop carries, and return the node of each copy by use (`Op.use`).

        A tensor with several heavy consumers in a block, or one above `LARGE_SHARE` of the memory limit, gets a copy
        node that its consumers share.

        - `cluster_node`: node of each cluster.
        """
        groups: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
        seen: set[tuple[object, ...]] = set()
        for edge in self.structure.edges:
            if edge.op < 0:
                continue
            op = self.graph.ops[edge.op]
            cluster = self.structure.cluster_of[edge.tensor]
            if op.op_class is not OpClass.HEAVY:
                self.add_light(op, edge.operand, edge.result, cluster, seen)
            elif edge.operand < 0:
                self.add_heavy_result(op, edge.result, cluster, self.op_node[op.id])
            else:
                groups[op.use(edge.operand)].append((op.id, edge.operand))
        copies = {}
        for (tensor, block, barrier), uses in groups.items():
            source = cluster_node[self.structure.cluster_of[tensor]]
            users = {op for op, _ in uses}
            if len(users) > 1 or self.graph.tensors[tensor].bytes > LARGE_SHARE * self.memory_limit:
                copies[tensor, block, barrier] = source = self.add_copy(tensor, block, source, sorted(users))
            for op_id, operand in uses:
                self.add_heavy_operand(self.graph.ops[op_id], operand, tensor, source, self.op_node[op_id])
        for pair in self.sum_places.joined.items():
            ends = [(self.op_node[op], self.nodes[self.op_node[op]].states) for op in pair]
            self.reshards.extend(self.sum_places.apart(pair, ends, self.shared))
        for result, argument in self.structure.ties:
            self.add_tie(result, argument, -1, cluster_node)
        for loop in self.graph.loops:
            for carry in loop.carries:
                if -1 != self.structure.cluster_of[carry.init] != self.structure.cluster_of[carry.body] != -1:
                    self.add_tie(carry.init, carry.body, loop.parent, cluster_node)
        return copies

    def block_trips(self, tensor: int, op: Op) -> tuple[int, float]:
        """Return the block in which `op` consumes a tensor, and the number of reshards of the tensor in one step.

        A tensor that a loop does not change is resharded once, before the loop, but still counts for the op's block. No
        reshard is hoisted out of a conditional: the operands of a branch are resharded whenever the branch runs. A
        result of an inner block, such as a branch, is resharded as often as `op` runs.
        """
        home = self.graph.tensors[tensor].loop
        block = op.loop
        while block not in (-1, home) and not self.graph.loops[block].branches:
            block = self.graph.loops[block].parent
        within = block == -1 and home != -1
        return op.loop, self.graph.trips(op.loop if within else block)

    def add_light(self, op: Op, operand: int, result: int, cluster: int, seen: set[tuple[object, ...]]) -> None:
        """Add the reshard between the clusters of an operand and a result of an op without strategies of its own.

        Axes that the op cannot pass on are gathered before it. Axes on reduced factors leave partial sums, which the
        reshard sums. Other factors that only one end has cost nothing. An op without a rule gets no reshard.

        - `operand`, `result`: positions among the op's operands and results.
        - `cluster`: cluster of the operand.
        - `seen`: keys of the reshards added so far, to skip equal ones (extended in place).
        """
        rule = op.rule
        if rule is None:
            return
        tensor, out = op.operands[operand], op.results[result]
        target = self.structure.cluster_of[out]
        held = self.dims_states(cluster, self.nodes[cluster].states, tensor)
        wanted = self.dims_states(target, self.nodes[target].states, out)
        inner = {f for dim in rule.operands[operand] for f in dim}
        outer = {f for dim in rule.results[result] for f in dim}
        looped = looped_factors(self.structure, op)
        source, kept = decompose(held, rule.operands[operand], rule.sizes, self.axes, looped)
        aim, _ = decompose(wanted, rule.results[result], rule.sizes, self.axes)
        reduced = [PARTIAL - f if rule.kinds[f] is FactorKind.REDUCTION else WHOLE for f in range(len(rule.sizes))]
        collected = bool(collected_factors(self.graph, op, self.mesh.topology.backend))
        if collected and operand != result and self.structure.cluster_of[op.operands[result]] >= 0:
            reduced = [WHOLE] * len(reduced)  # the operand at the result's position accounts for the collection
        source = relabel(source, [f if f in outer else reduced[f] for f in range(len(rule.sizes))])
        aim = relabel(aim, [f if f in inner else WHOLE for f in range(len(rule.sizes))])
        moved = exchanged_sizes(rule.operands[operand], rule.sizes, self.axes, looped)
        sizes = tuple(size if f in inner and f in outer else 1 for f, size in enumerate(moved))
        block, trips = self.block_trips(tensor, op)
        key = (tensor, target, block, aim.tobytes(), source.tobytes())
        if key in seen:
            return
        seen.add(key)
        way = ReshardStates(held, kept, source, aim, sizes, self.graph.tensors[out].dtype)
        self.add_reshard(cluster, target, ValueUse(tensor, op.id, block, trips), way, collected=collected)

    def add_heavy_result(self, op: Op, result: int, cluster: int, node: int) -> None:
        """Add the reshard from a heavy op's result, as its strategy leaves it, to the result's cluster."""
        out = op.results[result]
        states = self.nodes[node].states
        shape = self.graph.tensors[out].shape
        source = result_states(op, states, result)
        aim = self.dims_states(cluster, self.nodes[cluster].states, out)
        trips = self.graph.trips(op.loop)
        dtype = self.graph.tensors[out].dtype
        stacked = op.kind == "convolution" or is_batched(op)
        self.add_reshard(
            node,
            cluster,
            ValueUse(out, op.id, op.loop, trips),
            ReshardStates(source, source, source, aim, shape, dtype, stacked),
            collected=bool(collected_factors(self.graph, op, self.mesh.topology.backend)),
        )

    def add_heavy_operand(self, op: Op, operand: int, tensor: int, source_node: int, node: int) -> None:
        """Add the reshard from a cluster or copy to an operand of a heavy op; an op without a rule wants it whole.

        - `operand`, `tensor`: position among the op's operands, and the tensor there.
        - `source_node`: node of the cluster or copy.
        - `node`: node of the op.
        """
        shape = self.graph.tensors[tensor].shape
        held = self.held_states(source_node, tensor)
        states = self.nodes[node].states
        aim = np.full_like(states, WHOLE)
        if op.rule is not None:
            aim = factor_states(states, op.rule.operands[operand])
        block, trips = self.block_trips(tensor, op)
        dtype = self.graph.tensors[tensor].dtype
        use = ValueUse(tensor, op.id, block, trips, operand)
        self.add_reshard(source_node, node, use, ReshardStates(held, held, held, aim, shape, dtype))

    def held_states(self, node: int, tensor: int) -> States:
        """Return the states of a cluster or copy node over the dims of one of its tensors."""
        record = self.nodes[node]
        return record.states if record.kind == "copy" else self.dims_states(record.ref, record.states, tensor)

    def add_copy(self, tensor: int, block: int, source: int, users: Sequence[int]) -> int:
        """Add a copy node with the reshard from its source: one gathered tensor that several heavy ops of a block
        share; return its number.

        A large tensor's copy has each state twice: with memory of its own, and as a free alias of the source tensor.

        - `tensor`, `block`: tensor to copy, and loop of its users.
        - `source`: node of the tensor's cluster.
        - `users`: ids of the consuming ops, in program order.
        """
        record = self.graph.tensors[tensor]
        cluster = self.structure.clusters[self.structure.cluster_of[tensor]]
        factors = self.structure.dims_of[tensor]
        blocked = [d for d, f in enumerate(factors) if f < 0 or f in cluster.blocked]
        states = enumerate_states(record.shape, self.axes, blocked)
        if self.axis_parts is not None:
            states = states[self.axis_parts.allowed_states(states, self.group_sizes(cluster.id, factors))]
        if self.stage_axis is not None:
            states = states[self.stage_axis.of_tensor(tensor, states)]
        large = record.bytes > LARGE_SHARE * self.memory_limit
        held = np.ones(len(states), dtype=bool)
        memory: tuple[MemoryTerm, ...] = ()
        if large:
            # Every state occurs twice: with memory of its own, and as a free alias of the source tensor.
            held = np.concatenate([held, ~held])
            states = np.concatenate([states, states])
            size = local_elements(states, record.shape, self.axes) * record.itemsize
            size = np.rint(size * self.padding.ratio(tensor, states, self.axes))
            usage = np.where(held, size, 0).astype(np.int64)
            memory = (MemoryTerm("gathered", users[0], users[-1] + 1, usage),)
        node = len(self.nodes)
        self.nodes.append(Node("copy", tensor, states, held, {}, memory, record.name))
        have = self.held_states(source, tensor)
        op = self.graph.ops[users[0]]
        _, trips = self.block_trips(tensor, op)
        way = ReshardStates(have, have, have, states, record.shape, record.dtype)
        self.add_reshard(source, node, ValueUse(tensor, op.id, block, trips), way, held)
        return node

    def add_tie(self, value: int, heir: int, block: int, cluster_node: Sequence[int]) -> None:
        """Add the reshard from a result to the next step's argument, or from a loop's initial value to its carried one.

        The reshard runs once in each execution of `block` (-1: once a step).

        - `value`, `heir`: tensor at the source, and tensor at the target.
        - `cluster_node`: node of each cluster.
        """
        source = cluster_node[self.structure.cluster_of[value]]
        target = cluster_node[self.structure.cluster_of[heir]]
        record = self.graph.tensors[value]
        held, aim = self.held_states(source, value), self.held_states(target, heir)
        use = ValueUse(value, -1, block, self.graph.trips(block))
        self.add_reshard(source, target, use, ReshardStates(held, held, held, aim, record.shape, record.dtype))

    def add_reshard(
        self,
        source: int,
        target: int,
        use: ValueUse,
        way: ReshardStates,
        holds: np.ndarray | None = None,
        collected: bool = False,
    ) -> None:
        """Add a reshard unless it is free for all pairs of alternatives and none is forbidden.

        - `source`, `target`: numbers of the nodes.
        - `use`: tensor, op and number of executions.
        - `way`: states at both ends.
        - `holds`: for a copy node as target, a mask of the alternatives that have memory of their own.
        - `collected`: True if partial results are gathered and combined, not summed.

        Alternatives with equal states share a row or column of the tables.
        """
        record = self.graph.tensors[use.tensor]
        held, states, aim = way.source_dims, way.source, way.target
        overlap = self.overlap(source, target, use.op)
        narrow = self.narrow(source, target, use, overlap)
        if narrow is not None and narrow.all():
            overlap, narrow = AT_NARROW[overlap], None
        at_source = self.nodes[source].kind == "op"
        have = held if held is states else np.concatenate([held, states], axis=1)
        marks = np.ones((len(aim), 1), dtype=np.int64) if holds is None else holds[:, None].astype(np.int64)
        if narrow is not None and at_source:
            have = np.concatenate([have, narrow[:, None].astype(np.int64)], axis=1)
        elif narrow is not None:
            marks = np.concatenate([marks, narrow[:, None].astype(np.int64)], axis=1)
        first, rows = distinct(have)
        first_aim, columns = distinct(np.concatenate([aim, marks], axis=1))
        itemsize = record.itemsize
        widened = self.collectives.widen_dtype(way.dtype)
        # Some backends sum narrow types in float32, and rows are rounded after their sum.
        in_float32 = widened != way.dtype or (use.op >= 0 and rounds_rows(self.graph, self.graph.ops[use.op]))
        reduce_itemsize = 4 if in_float32 else itemsize
        ends = (held[first], way.passed_dims[first], tuple(way.factors), states[first], aim[first_aim])
        is_tpu, at_result = self.mesh.topology.traits.joins_sums, self.nodes[source].kind == "op"
        whole_sums = summed_whole(self.graph, use.tensor) if is_tpu and at_result else ()
        path = self.shared(Path(record.shape, *ends, itemsize, reduce_itemsize, collected, way.stacked, whole_sums))
        apart = None
        if narrow is not None:
            apart = narrow[first][:, None] if at_source else narrow[first_aim][None, :]
        seconds = self.seconds(path, overlap, apart)
        costs: dict[Channel, Seconds] = {
            EXPOSED if what == EXPOSED[1] else (use.block, what): table for what, table in seconds.items()
        }
        unpaid = (
            self.uncharged_seconds(use.op, use.tensor, path.source, path.target, at_source) if use.op >= 0 else None
        )
        if unpaid is not None:
            computing = (use.block, "compute")
            before = costs.get(computing)
            key = (id(before), unpaid.shape, unpaid.tobytes())  # repeated layers share their tables
            costs[computing] = self.shared_credits.setdefault(key, unpaid if before is None else before + unpaid)
        forbidden = None
        if holds is not None and not holds.all():
            same = (path.source[:, None, :] == path.target[None, :, :]).all(axis=2)
            alias = ~holds[first_aim]
            # An alias must have the source's state; a copy with its own memory must have another one.
            forbidden = np.where(alias[None, :], ~same, same)
        ends_of_path = (use.op, path.source, path.target)
        unasked = self.exchange.forbids(use.tensor, *ends_of_path)
        forbidden = united(forbidden, unasked, sliced_by_itself(self.graph, *ends_of_path) if at_source else None)
        if costs or forbidden is not None:
            each = Reshard(
                source, target, use.tensor, use.op, use.block, use.trips, overlap, rows, columns, costs, forbidden,
                path, narrow,
            )  # fmt: skip
            self.reshards.extend(self.sum_places.parts(each))

    def narrow(self, source: int, target: int, use: ValueUse, overlap: Overlap) -> NDArray[np.bool_] | None:
        """Return a mask of the matmul's alternatives that are too narrow to pipeline a collective into the matmul.

        An alternative is too narrow if it has fewer MACs for each element of the tensor than the calibration's
        `pipelined_columns`. None if neither end is the op of the use, or if `overlap` is not that of a matmul. None
        also if no alternative is too narrow.
        """
        if overlap not in AT_NARROW:
            return None
        op, start, end = self.graph.ops[use.op], self.nodes[source], self.nodes[target]
        if overlap is Overlap.PARAMETERS_AT_MATMUL and end.kind == "copy":
            # Several ops read the copy. It is gathered in a loop if the first one is wide enough however it is split.
            narrow = self.narrows.mask(op, op.operands.index(use.tensor), self.nodes[self.op_node[op.id]].states)
            return None if narrow is None else np.ones(len(end.states), dtype=bool)
        for node, side in ((start, len(op.operands)), (end, use.operand)):
            if node.kind == "op" and node.ref == use.op:
                return self.narrows.mask(op, side, node.states)
        return None

    def overlap(self, source: int, target: int, op: int) -> Overlap:
        """Return how a reshard may be hidden: as one of parameters, of gradients or next to a matmul.

        A reshard without an op (-1) is never hidden. Ops without other compute between loops get the weaker form of
        `ALONE`. So do the first gathers and the last sums of a step without loops.
        """
        if op < 0:
            return Overlap.NONE
        overlap = self.overlap_anywhere(source, target, op)
        at_end = op in (self.first if overlap in READING else self.last)
        return ALONE.get(overlap, overlap) if op in self.alone or at_end else overlap

    def overlap_anywhere(self, source: int, target: int, op: int) -> Overlap:
        """Return how a reshard may be hidden where other compute is available to overlap with.

        Tensors of clusters of weights count as parameters. Values that enter a cluster of updates count as gradients;
        at a dot these are `GRADIENTS_AT_MATMUL`. Others are hidden next to a dot only.
        """
        at_matmul = self.graph.ops[op].kind == "dot_general"
        cluster, end = self.cluster_at(source), self.nodes[target]
        if cluster in self.stored:
            # A gather for the update itself runs next to the update, where no matmul is left to hide it.
            if end.kind == "cluster" and end.ref in self.updated:
                return Overlap.NETWORK
            loops = at_matmul and self.mesh.topology.chip.loops_weight_gathers
            return Overlap.PARAMETERS_AT_MATMUL if loops else Overlap.PARAMETERS
        if self.updates(source, target):
            return Overlap.GRADIENTS_AT_MATMUL if at_matmul else Overlap.GRADIENTS
        return Overlap.MATMUL if at_matmul else Overlap.NONE

    def shared(self, path: Path) -> Path:
        """Return the first path with equal contents, so that all its reshards share results cached by identity."""
        return self.equal.setdefault(path.contents(), path)

    def seconds(self, path: Path, overlap: Overlap, apart: NDArray[np.bool_] | None = None) -> dict[str, Seconds]:
        """Return the seconds of one execution of a path by channel, [rows, columns]; equal paths share their tables.

        `apart` marks the alternatives, [rows, 1] or [1, columns], whose matmul is too narrow to pipeline the reshard
        into; None marks none.
        """
        key = (overlap, *path.contents(), None if apart is None else (apart.shape, apart.tobytes()))
        if key not in self.paths:
            if apart is None:
                self.paths[key] = self.path_prices.seconds(path, overlap)
            else:
                self.paths[key] = _chosen(apart, self.seconds(path, AT_NARROW[overlap]), self.seconds(path, overlap))
        return self.paths[key]


def _chosen(apart: NDArray[np.bool_], these: dict[str, Seconds], others: dict[str, Seconds]) -> dict[str, Seconds]:
    """Return tables with the values of `these` where `apart` is True, and those of `others` elsewhere; a missing table
    is 0.
    """
    none = np.zeros(1)
    return {what: np.where(apart, these.get(what, none), others.get(what, none)) for what in {**others, **these}}
