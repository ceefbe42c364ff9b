"""Prices of the nodes of a model: the alternatives of every cluster and heavy op."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autoshard.cost import HOST, Calibration, Collectives, Compute, Mesh
from autoshard.graph import TILED, Cluster, ExtraTraffic, Fusion, Liveness, Op, OpClass, OpGraph, Softmax, Structure
from autoshard.planning.space.attention_exchange import ExchangeAsked
from autoshard.planning.space.decision_model import (
    EXPOSED,
    Channel,
    MemoryTerm,
    Node,
    Reshard,
    Residency,
    link_names,
)
from autoshard.planning.space.derived_axes import AxisParts, StageAxis
from autoshard.planning.space.op_models import FOLDED_OPS, heavy_seconds, model_of
from autoshard.planning.space.op_strategies import heavy_strategies
from autoshard.planning.space.op_work import OpWork
from autoshard.planning.space.spec_constraints import (
    Demand,
    allowed_states,
    axis_numbers,
    by_hand,
    free_of,
    own_collectives,
    program_demands,
)
from autoshard.planning.xla.array_layouts import Padding
from autoshard.planning.xla.axis_assignments import WHOLE, Seconds, States, enumerate_states, local_elements, relabel
from autoshard.planning.xla.partitioner_rules import inner_collectives
from autoshard.program import WEIGHTS, Program, Role


def streams(each: ExtraTraffic, graph: OpGraph, compute: Compute) -> float:
    """Return how many transfers of the tensor's bytes take as long as all of these passes in one step.

    A pass by rows counts as several, by the chip's rate for rows of this dtype.
    """
    once = compute.row_passes(graph.tensors[each.tensor].itemsize) if each.by_rows else 1.0
    return each.count * once * graph.trips(each.block)


LARGE_SHARE = 0.005
"""Share of the memory limit above which a tensor is large.

Copies of a large batch argument cost the host's time, and a large gathered tensor gets a copy node with its own memory.
"""

_STORED = {Role.PARAMETER: "parameters", Role.FROZEN: "frozen_parameters", Role.OPTIMIZER_STATE: "optimizer_state"}
"""Memory kind of an argument by its role; other roles count as `batch`."""


class NodePricer:
    """Builder of a model's nodes, with the seconds and bytes of their alternatives."""

    def __init__(
        self,
        program: Program,
        graph: OpGraph,
        structure: Structure,
        liveness: Liveness,
        mesh: Mesh | StageAxis,
        memory_limit: int,
        axis_parts: AxisParts | None,
        calibration: Calibration | None,
    ) -> None:
        """Index roles, clusters and the program's constraints; `nodes` is empty until clusters and heavy ops are added.

        - `mesh`: mesh, or one with an axis for the stages of a pipeline.
        - `memory_limit`: bytes of one device.
        - `axis_parts`: cut of an axis in two that `mesh` has; None for none.
        - `calibration`: figures for prices; None for the chip's shipped ones.
        """
        self.stage_axis, mesh = (mesh, mesh.mesh) if isinstance(mesh, StageAxis) else (None, mesh)
        self.axis_parts = axis_parts
        self.program, self.graph, self.structure, self.liveness = program, graph, structure, liveness
        self.mesh, self.memory_limit = mesh, memory_limit
        self.collectives = Collectives(mesh, calibration)
        self.compute = Compute(mesh.topology, calibration)
        self.residency = Residency(graph, liveness, mesh.topology.chip, math.prod(mesh.axes.values()))
        self.padding = Padding(graph, mesh.topology.backend)
        self.axes = list(mesh.axes.values())
        self.names = list(mesh.axes)
        self.link_of = link_names(mesh)
        self.exchange = ExchangeAsked(program, graph)
        self.nodes: list[Node] = []
        roles = {t: a.role for t, a in zip(graph.arguments, program.arguments, strict=True)}
        self.roles = roles
        self.begun = {c.body: roles[c.init] for loop in graph.loops for c in loop.carries if c.init in roles}
        self.begun |= {graph.results[a.result]: a.role for a in program.arguments if a.donated and a.result is not None}
        self.carried = {carry.body for loop in graph.loops for carry in loop.carries}
        self.local: dict[tuple[object, ...], Seconds] = {}
        self.softmaxes = {softmax.cluster: softmax for softmax in liveness.softmaxes}
        self.credited_tensors = frozenset[int]().union(*(softmax.credited_tensors for softmax in liveness.softmaxes))
        self.stored = self.clusters_of(t for t, role in roles.items() if role in WEIGHTS)
        states = self.clusters_of(t for t, role in roles.items() if role is Role.OPTIMIZER_STATE)
        updates = {structure.cluster_of[result] for result, argument in structure.ties if argument in roles}
        self.updated = states | updates
        least_fed = LARGE_SHARE * memory_limit
        large = [t for t, role in roles.items() if role is Role.BATCH and graph.tensors[t].bytes > least_fed]
        # Arrays of a program without weights may be on the devices already, and devices of one machine need no copies.
        is_fed = self.stored and not mesh.topology.traits.shares_machine
        self.fed = frozenset(large if is_fed else ())
        even = set(graph.arguments) | set(graph.results)
        self.even = self.clusters_of(even)
        self.demands: dict[int, list[Demand]] = defaultdict(list)
        for demand in program_demands(graph, structure, mesh):
            self.demands[structure.cluster_of[demand.tensor]].append(demand)

    def role(self, each: Reshard) -> str:
        """Return the role of a reshard for `CombinedCollectives.parts`."""
        if self.updates(each.source, each.target):
            return "sum" if self.cluster_at(each.source) not in self.stored else ""
        return "gather" if self.cluster_at(each.source) in self.stored else ""

    def updates(self, source: int, target: int) -> bool:
        """Return True if a value that is no update itself enters a cluster of updates: a gradient does."""
        end = self.nodes[target]
        return end.kind == "cluster" and end.ref in self.updated and self.cluster_at(source) not in self.updated

    def cluster_at(self, node: int) -> int:
        """Return the cluster of a node, or of the tensor that it copies; -1 for an op."""
        each = self.nodes[node]
        return (
            self.structure.cluster_of[each.ref] if each.kind == "copy" else each.ref if each.kind == "cluster" else -1
        )

    def clusters_of(self, tensors: Iterable[int]) -> set[int]:
        """Return the clusters of some tensors, without -1 for tensors that have none."""
        return {self.structure.cluster_of[t] for t in tensors} - {-1}

    def add_clusters(self) -> None:
        """Add a node for every cluster: its states, the time of its fusions' memory traffic, and its buffers.

        States that the program's constraints, a cut axis or the axis of stages exclude are left out. Traffic of
        heavy ops is left to their own nodes, except that of `FOLDED_OPS`. Launches add their overhead to the compute
        time. A cluster with a softmax has the time and the buffers of the softmax instead.
        """
        traffic: dict[int, dict[int, list[tuple[int, float, int]]]] = defaultdict(lambda: defaultdict(list))
        for fusion in self.liveness.fusions:
            op = self.graph.ops[fusion.root]
            if op.op_class is OpClass.HEAVY and op.kind not in FOLDED_OPS:
                continue
            written = [(tensor, -1) for tensor in fusion.moved]
            for tensor, reader in (*written, *((tensor, op.id) for tensor in self.read_tensors(fusion))):
                cluster = self.structure.cluster_of[tensor]
                if cluster >= 0:
                    traffic[cluster][op.loop].append((tensor, self.graph.trips(op.loop), reader))
        launches = self.launches()
        for each in self.liveness.extra_traffic:
            cluster = self.structure.cluster_of[each.tensor]
            if cluster >= 0:
                times = streams(each, self.graph, self.compute)
                traffic[cluster][each.block].append((each.tensor, times, -1))
        buffers: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for tensor, start, stop in self.liveness.buffers:
            if self.structure.cluster_of[tensor] >= 0:
                buffers[self.structure.cluster_of[tensor]].append((tensor, start, stop))
        for cluster in self.structure.clusters:
            states = self.asked_states(
                cluster, enumerate_states(cluster.sizes, self.axes, cluster.blocked, cluster.id in self.even)
            )
            if self.axis_parts is not None:
                groups = self.group_sizes(cluster.id, range(len(cluster.sizes)))
                states = states[self.axis_parts.allowed_states(states, groups)]
            if self.stage_axis is not None:
                states = states[self.stage_axis.of_cluster(cluster.id, states)]
            local = {t: self.local_bytes(cluster.id, states, t) for t in cluster.tensors}
            softmax = self.softmaxes.get(cluster.id)
            if softmax is None:
                time = self.cluster_seconds(traffic[cluster.id], local, len(states))
                self.add_feed(time, [local[t] for t in self.fed.intersection(cluster.tensors)])
                memory = tuple(
                    MemoryTerm(
                        self.memory_kind(cluster.id, *buffer), *buffer[1:], self.buffer_bytes(local[buffer[0]], *buffer)
                    )
                    for buffer in buffers[cluster.id]
                )
            else:
                again = self.recomputes(softmax, states)
                time = {(softmax.loop, "compute"): self.softmax_seconds(softmax, again, local)}
                memory = self.softmax_memory(softmax, again, local)
            name = self.cluster_name(cluster.tensors)
            held = np.ones(len(states), dtype=bool)
            mine = launches.get(cluster.id, {})
            for block, count in mine.items():
                before = time.get((block, "compute"), np.zeros(len(states)))
                time[block, "compute"] = before + count * self.compute.calibration.op_overhead_s
            self.nodes.append(Node("cluster", cluster.id, states, held, time, memory, name, launches=mine))

    def launches(self) -> Mapping[int, Mapping[int, float]]:
        """Return by cluster and block the count of fusions in one step, each at the cluster of its first written
        tensor.

        Backends without launch costs (CPUs) have none. Fusions that write single elements are left out: a TPU runs
        them on its scalar core, overlapped with other work. Fused siblings, and heavy ops other than `FOLDED_OPS`,
        are left out too.
        """
        counts: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        if not self.compute.topology.traits.launches:
            return counts
        for fusion in self.liveness.fusions:
            op = self.graph.ops[fusion.root]
            wide = [t for t in fusion.moved if self.graph.tensors[t].elements > 1 and self.structure.cluster_of[t] >= 0]
            if wide and not fusion.is_fused_sibling and (op.op_class is not OpClass.HEAVY or op.kind in FOLDED_OPS):
                counts[self.structure.cluster_of[wide[0]]][op.loop] += self.graph.trips(op.loop)
        return counts

    def read_tensors(self, fusion: Fusion) -> tuple[int, ...]:
        """Return the tensors whose bytes a fusion reads.

        A slice reads its own bytes only, so its results stand for them. If it strides within tiles, it reads the whole
        operand.
        """
        op = self.graph.ops[fusion.root]
        if op.kind != "slice" or fusion.reads != op.operands:
            return fusion.reads
        rank = len(self.graph.tensors[op.results[0]].shape)
        return fusion.reads if any(dim >= rank - TILED for dim in op.strided) else op.results

    def cluster_seconds(
        self, traffic: Mapping[int, Sequence[tuple[int, float, int]]], local: Mapping[int, Seconds], states: int
    ) -> dict[Channel, Seconds]:
        """Return the seconds of the memory traffic of a cluster's tensors in one step, by channel, [states].

        Tensors in the hosts' memory count in the channel of the host, all others in that of compute.

        - `traffic`: for each block (tensor, times per step, op that reads it or -1).
        - `local`: bytes of each tensor on one device, [states].
        - `states`: number of states.
        """
        time: dict[Channel, Seconds] = {}
        for block, items in traffic.items():
            for away, what in ((False, "compute"), (True, HOST)):
                moved = [
                    (local[t] if away else self.residency.streamed(t, local[t], reader)) * trips
                    for t, trips, reader in items
                    if (t in self.liveness.hosted) == away
                ]
                if moved:
                    rate = self.compute.host_seconds if away else self.compute.memory_seconds
                    time[(block, what)] = rate(sum(moved, np.zeros(states)))
        return time

    def add_feed(self, time: dict[Channel, Seconds], fed: Sequence[Seconds]) -> None:
        """Add to a cluster's `time` the seconds in which the host sends copies of a batch, in the channel of the host.

        The least that any state loads is left out, since a step's batch is sent during the step before. `fed` has the
        bytes of each large batch argument on one device, [states].
        """
        if not fed:
            return
        copies = np.sum([each - each.min() for each in fed], axis=0)
        if copies.any():
            channel = (-1, HOST)
            time[channel] = time.get(channel, np.zeros(len(copies))) + self.compute.host_seconds(copies)

    def recomputes(self, softmax: Softmax, states: States) -> np.ndarray:
        """Return a mask of the states in which kernels recompute the probabilities, [states].

        They do so if a dim has local size 1, if the softmax's rows are split, or if the scores are narrow.
        """
        if softmax.narrow:
            return np.ones(len(states), dtype=bool)
        shape = self.graph.tensors[softmax.scores].shape
        dims = self.dims_states(softmax.cluster, states, softmax.scores)
        split = np.isin(dims, softmax.rows).any(axis=1)
        single = [local_elements(np.where(dims == d, 0, WHOLE), (n,), self.axes) == 1 for d, n in enumerate(shape)]
        return np.logical_or.reduce([split, *single])

    def softmax_seconds(self, softmax: Softmax, again: np.ndarray, local: Mapping[int, Seconds]) -> Seconds:
        """Return the seconds in one step of a softmax outside its matmuls, [states]; below zero where it credits them.

        - `again`: mask of the states in which the probabilities are recomputed.
        - `local`: bytes of each tensor on one device, [states].
        """
        whole, other = (
            sum((times * self.residency.streamed(t, local[t]) for t, times in form.moved), np.zeros(len(again)))
            for form in (softmax.fused, softmax.recomputed)
        )
        return self.compute.memory_seconds(np.where(again, other, whole)) * self.graph.trips(softmax.loop)

    def uncharged_seconds(self, op: int, tensor: int, rows: States, columns: States, is_result: bool) -> Seconds | None:
        """Return the seconds that a softmax credits to an adjacent matmul but that the matmul was never charged.

        The tables of a softmax's cluster subtract tensors that are not stored from the matmuls' traffic. A matmul
        whose own state splits the tensor finer was charged for fewer bytes. The result is [rows, columns] for one
        execution. It is None if no pair of states has such seconds, or if the op is no heavy one.

        - `op`, `tensor`: the matmul, and its operand or result.
        - `rows`, `columns`: states of the tensor at the source and at the target of the reshard.
        - `is_result`: True if the matmul is at the source.
        """
        if tensor not in self.credited_tensors or self.graph.ops[op].op_class is not OpClass.HEAVY:
            return None
        record = self.graph.tensors[tensor]
        first, second = (
            self.residency.streamed(tensor, local_elements(states, record.shape, self.axes) * record.itemsize)
            for states in (rows, columns)
        )
        paid, taken = (first[:, None], second[None, :]) if is_result else (second[None, :], first[:, None])
        if (taken <= paid).all():
            return None
        return self.compute.memory_seconds(np.maximum(taken - paid, 0.0))

    def softmax_memory(
        self, softmax: Softmax, again: np.ndarray, local: Mapping[int, Seconds]
    ) -> tuple[MemoryTerm, ...]:
        """Return the buffers of a softmax on one device; a buffer of one form has size 0 in states of the other form.

        - `again`: mask of the states in which the probabilities are recomputed.
        - `local`: bytes of each tensor on one device, [states].
        """
        terms = []
        for form, mine in ((softmax.fused, ~again), (softmax.recomputed, again)):
            for tensor, start, stop, width in form.buffers:
                record = self.graph.tensors[tensor]
                size = np.rint(local[tensor] / record.itemsize * width)
                usage = np.where(mine, size, 0).astype(np.int64)
                terms.append(MemoryTerm(self.memory_kind(softmax.cluster, tensor, start, stop), start, stop, usage))
        return tuple(terms)

    def asked_states(self, cluster: Cluster, states: States) -> States:
        """Return the states that satisfy the program's sharding constraints; of contradictory ones the first count.

        Axes over which a tensor is split by hand must split nothing.
        """
        manual = {axis for t in cluster.tensors for axis in self.graph.tensors[t].manual}
        kept = free_of(states, axis_numbers(self.mesh, sorted(manual)))
        for demand in self.demands[cluster.id]:
            narrower = kept & allowed_states(self.structure, states, demand)
            if narrower.any():
                kept = narrower
        return states[kept]

    def group_sizes(self, cluster: int, factors: Iterable[int]) -> list[int]:
        """Return for each factor the size that an axis must divide to split the factor's dim group evenly.

        The size is 1 for factor -1, which stands for none, and for a group without a size in `axis_parts`. The list
        is empty if no axis is cut.
        """
        if self.axis_parts is None:
            return []
        sizes, of = self.axis_parts.group_sizes, self.axis_parts.of_factor
        return [sizes.get(of[(cluster, f)], 1) if f >= 0 else 1 for f in factors]

    def factor_group_sizes(self, op: Op) -> list[int]:
        """Return for each factor of an op the common divisor of its own size and of the group sizes of its dims.

        Dims of several factors, and groups of size 1, do not count. An axis must be cut (`axis_parts`), and the op
        must have a rule.
        """
        assert op.rule is not None
        sizes = list(op.rule.sizes)
        for tensor, dims in op.sides:
            cluster = self.structure.cluster_of[tensor]
            if cluster < 0:
                continue
            groups = self.group_sizes(cluster, self.structure.dims_of[tensor])
            for factors, size in zip(dims, groups, strict=True):
                if len(factors) == 1 and size > 1:
                    sizes[factors[0]] = math.gcd(sizes[factors[0]], size)
        return sizes

    def cluster_name(self, tensors: Sequence[int]) -> str:
        """Return the name of a cluster: that of its first argument, else of its largest tensor, else `value` and the
        tensor's number.
        """
        arguments = [t for t in tensors if t in self.roles]
        best = arguments[0] if arguments else max(tensors, key=lambda t: (self.graph.tensors[t].elements, -t))
        return self.graph.tensors[best].name or f"value {best}"

    def dims_states(self, cluster: int, states: States, tensor: int) -> States:
        """Convert a cluster's states to states over the dims of one of its tensors; factors that the tensor lacks split
        nothing.
        """
        mapping = [WHOLE] * len(self.structure.clusters[cluster].sizes)
        for dim, factor in enumerate(self.structure.dims_of[tensor]):
            if factor >= 0:
                mapping[factor] = dim
        return relabel(states, mapping)

    def local_bytes(self, cluster: int, states: States, tensor: int) -> Seconds:
        """Return the padded bytes of a cluster's tensor on one device, [states], in the program's dtype; cached."""
        record = self.graph.tensors[tensor]
        factors = self.structure.dims_of[tensor]
        key = (states.shape, states.tobytes(), factors, record.shape, record.itemsize, self.padding.tile_layout(tensor))
        if key not in self.local:  # equal tensors share one table
            dims = self.dims_states(cluster, states, tensor)
            size = local_elements(dims, record.shape, self.axes) * record.itemsize
            self.local[key] = size * self.padding.ratio(tensor, dims, self.axes)
        return self.local[key]

    def buffer_bytes(self, local: Seconds, tensor: int, start: int, stop: int) -> np.ndarray:
        """Return the bytes of a buffer, whose dtype in memory may be another, from the bytes of its tensor in the
        program's dtype, [states].
        """
        record = self.graph.tensors[tensor]
        width = self.liveness.itemsize(self.graph, (tensor, start, stop))
        return np.rint(local / record.itemsize * width).astype(np.int64)

    def memory_kind(self, cluster: int, tensor: int, start: int, stop: int) -> str:
        """Return the kind of memory that a buffer counts as.

        An argument is `parameters`, `frozen_parameters`, `optimizer_state` or `batch`, except a converted copy of it
        (`temporaries`). A value that a loop carries, and that starts as a parameter or optimizer state, has the kind of
        that argument. So has the new value of a donated argument, which overwrites it.
        Other values in clusters of updates are `gradients`. All else is `activations` if it lives from before a loop
        until after it, or is carried by one, else `temporaries`.
        """
        role = self.roles.get(tensor)
        if role is not None and (tensor, start, stop) in self.liveness.widths:
            return "temporaries"
        if role is not None:
            return _STORED.get(role, "batch")
        begun = self.begun.get(tensor)
        if begun is not None and begun in _STORED:  # an update in place, at once or layer by layer in a loop
            return _STORED[begun]
        if cluster in self.updated:
            return "gradients"
        crosses = any(start < loop.start and stop > loop.stop for loop in self.graph.loops if not loop.branches)
        return "activations" if crosses or tensor in self.carried else "temporaries"

    def add_heavy(self, op: Op) -> None:
        """Add the node of a heavy op: its strategies, their compute time, inner collectives and temporary memory.

        Strategies that the program's regions, the asked exchange, a cut axis or the axis of stages exclude are left
        out.
        """
        backend = self.mesh.topology.backend
        states = heavy_strategies(self.graph, op, self.axes, backend)
        states = states[by_hand(op, states, self.mesh.axes) & self.exchange.strategies(op.id, states)]
        if self.axis_parts is not None and op.rule is not None:
            states = states[self.axis_parts.allowed_states(states, self.factor_group_sizes(op))]
        if self.stage_axis is not None:
            states = states[self.stage_axis.of_op(op, states)]
        trips = self.graph.trips(op.loop)
        work = OpWork(self.graph, op, states, self.axes, self.compute, self.residency, self.padding)
        seconds, own = heavy_seconds(work), model_of(op)
        inner = tuple(inner_collectives(self.graph, op, states, self.axes, backend))
        inner += own_collectives(self.graph, op, states, self.collectives)
        inner += tuple(own.collectives(work, seconds, self.collectives))
        time: dict[Channel, Seconds] = {(op.loop, "compute"): seconds * trips}
        if inner:
            waits = (each.times(self.collectives)[1] for each in inner)
            time[EXPOSED] = sum(waits, np.zeros(len(states))) * trips
        held = np.ones(len(states), dtype=bool)
        usage = own.memory(work)
        memory = (MemoryTerm("temporaries", op.id, op.id + 1, usage),) if usage.any() else ()
        for start, stop, copied in own.copies(work):
            memory += (MemoryTerm("temporaries", start, stop, np.rint(copied).astype(np.int64)),)
        self.nodes.append(Node("op", op.id, states, held, time, memory, op.name or op.kind, inner))
