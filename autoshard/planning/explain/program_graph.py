"""A program as a graph for readers and for graph libraries: ops, the tensors between them, and a plan's figures."""

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autoshard.base.providers import provides
from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.graph import Op, OpClass, OpGraph, Tensor
from autoshard.planning.explain.plan_program import reopen
from autoshard.planning.price.analysed_program import AnalysedProgram, analyse_program, as_planned, reprice
from autoshard.planning.price.evaluate import spec_of, tensor_spec
from autoshard.planning.price.op_prices import OpPrices, price_ops
from autoshard.planning.price.step_ledger import Place, itemise
from autoshard.planning.record.hlo_shardings import hlo_sharding
from autoshard.planning.record.plan_parts import Collective
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec, mesh_words, spec_text
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import factor_states, tensor_groups
from autoshard.program import Program


if TYPE_CHECKING:
    import networkx


@dataclasses.dataclass(frozen=True, slots=True)
class Priced:
    """A plan on its program: the plan's choices, and the price of each op under them."""

    plan: Plan
    model: Model
    choices: NDArray[np.int64]
    """Chosen state of each node."""
    prices: OpPrices


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramGraph:
    """The ops of a program and the tensors between them, with a plan's specs and times if there is a plan.

    `Program.graph` and `Plan.graph` return it.
    """

    program: Program
    reading: AnalysedProgram = dataclasses.field(repr=False)
    """Analysis of the program for the plan's backend, or for CPUs without a plan."""
    priced: Priced | None = dataclasses.field(default=None, repr=False)
    """Plan with its prices; None for a graph without a plan."""

    def to_networkx(self, next_trips: bool = False) -> "networkx.MultiDiGraph":
        """Return a new `networkx.MultiDiGraph` with ops as nodes and tensors as edges.

        Parallel edges exist since an op may use one tensor twice, or several results of one op. An edge's key is the
        number of the operand. By default the graph has no cycles and every loop's body runs once. With `next_trips`,
        edges from the end of a body lead back to its start.

        The nodes are in program order: `argument0`, ..., `op0`, ..., `result0`, .... Every value that a loop carries
        has two nodes: `loop0.in0` at the start of the body and `loop0.out0` after the last trip. Attributes of a node:

        - `kind`: that of the op, or `argument`, `result`, `loop_in`, `loop_out`.
        - `name`, `line`, `op_class`, `role`.
        - `block`: the loop whose body contains the node; -1 for none.
        - `branch`: branch of a conditional; -1 for none.
        - `trips`: executions in one step.
        - `cluster`: that of its first result; -1 for none.
        - `shapes`, `dtypes`: those of its results.
        - `flops`, `bytes_read`, `bytes_written`: of all devices in one step, before fusion.

        Attributes of an edge:

        - `tensor`, `name`, `shape`, `dtype`.
        - `bytes`: of the whole tensor.
        - `dims`: the dim group of each dim.
        - `cluster`.
        - `back`: True for edges of `next_trips`.

        With a plan, a node has also:

        - `specs`: those of its results.
        - `seconds`, `host_seconds`: compute and host traffic in one step.
        - `collectives`: those inside the op, and those that sum its partial results or reshard its result to the
          planned spec.

        With a plan, an edge has also:

        - `spec`: the tensor's planned spec; `sharding` is the same in XLA's notation.
        - `taken_as`: the spec in which an op with its own strategies consumes the tensor, else empty.
        - `device_bytes`: bytes of one device's shard.
        - `collectives`: those of the reshard between the two specs. Several ops of a block may share a reshard; it is
          then at the first one.

        A collective is a dict of `kind`, `axes`, `count`, `wire_bytes` of one device, `seconds` and `exposed_s`, all
        for one step. The seconds of all nodes add up to the prediction's compute, and those of all collectives to its
        communication.
        """
        return _Maker(self, next_trips).made

    def held(self, tensor: int) -> Spec:
        """Return the planned spec of a tensor, given by its number in the graph; the graph must have a plan."""
        assert self.priced is not None
        return tensor_spec(self.priced.model, self.priced.choices, tensor)

    def taken(self, op: Op, operand: int) -> Spec | None:
        """Return the planned spec in which an op consumes operand number `operand`; None for ops without strategies of
        their own. The graph must have a plan.
        """
        assert self.priced is not None
        return _taken_as(self.priced, op, operand)


@provides("graph")
def graph_of(program: Program | None, plan: Plan | None) -> ProgramGraph:
    """Return the graph for `Program.graph` and `Plan.graph`; without a program, open the plan's again from its source.

    At least one of the two must be given. Raises `UserError` as `program_graph` and `reopen` do.
    """
    if program is None:
        assert plan is not None
        program = reopen(plan)
    return program_graph(program, plan)


def program_graph(program: Program, plan: Plan | None = None) -> ProgramGraph:
    """Return the ops of a program and the tensors between them; with a plan also specs, times and collectives.

    The program is lowered for the plan's devices, or for CPUs without a plan. Raises `UserError` for a plan of another
    program, and for a plan whose choices cannot be priced again since another version made it.
    """
    if plan is None:
        return ProgramGraph(program, analyse_program(program, "cpu"))
    program = as_planned(program, plan)
    if program.fingerprint != plan.program_fingerprint:
        raise UserError(
            f"the plan (of {plan.program_name}) is not for {program.name}: it is another program, it has changed, or "
            "it was planned with other options; plan it again."
        )
    reading = analyse_program(program, Topology.parse(plan.topology))
    model, choices = reprice(plan, program, reading)
    return ProgramGraph(program, reading, Priced(plan, model, choices, price_ops(itemise(model, choices))))


class _Maker:
    """Builder of the networkx graph: nodes in program order, then edges in the order of their users."""

    def __init__(self, source: ProgramGraph, next_trips: bool) -> None:
        """Build the graph in `made`; `next_trips` adds the edges to the next trip of each loop."""
        import networkx

        self.program, self.priced = source.program, source.priced
        self.reading, self.graph = source.reading, source.reading.graph
        self.made = networkx.MultiDiGraph(**self.about())
        self.maker = _makers(self.graph)
        self.seconds: dict[str, dict[str, float]] = {"seconds": {}, "host_seconds": {}}
        if self.priced is not None:
            self.seconds = {
                "seconds": self.at_nodes(self.priced.prices.compute),
                "host_seconds": self.at_nodes(self.priced.prices.host),
            }
        self.add_nodes()
        self.add_edges(next_trips)

    def about(self) -> dict[str, Any]:
        """Return the attributes of the graph itself: program, loops and, with a plan, topology, mesh and seconds of a
        step.
        """
        loops = [
            {
                "loop": loop.id, "parent": loop.parent, "trips": loop.trips, "known": loop.known,
                "is_branch": bool(loop.branches),
            }
            for loop in self.graph.loops
        ]  # fmt: skip
        attributes = {"program": self.program.name, "fingerprint": self.program.fingerprint, "flops": self.graph.flops}
        if self.priced is not None:
            plan = self.priced.plan
            attributes |= {"topology": plan.topology, "mesh": mesh_words(plan.mesh)}
            attributes |= {"step_time_s": plan.prediction.step_time_s, "compute_s": plan.prediction.compute_s}
            attributes |= {"exposed_comm_s": plan.prediction.exposed_comm_s}
        return {**attributes, "loops": loops}

    def at_nodes(self, places: dict[Place, float]) -> dict[str, float]:
        """Return the seconds by node from the seconds by op and by tensor; those of a tensor count at the node that
        gives it.
        """
        seconds_of: dict[str, float] = {}
        for (what, number), seconds in places.items():
            node = f"op{number}" if what == "op" else self.maker[number]
            seconds_of[node] = seconds_of.get(node, 0.0) + seconds
        return seconds_of

    def add_nodes(self) -> None:
        """Add the nodes of arguments, loops, ops and results, in program order. Loops that end where others start come
        first, the inner ones first.
        """
        graph = self.graph
        for number, (argument, tensor) in enumerate(zip(self.program.arguments, graph.arguments, strict=True)):
            self.add(f"argument{number}", "argument", -1, (tensor,), name=argument.name, role=str(argument.role))
        opened = {loop.start: [] for loop in graph.loops}
        closed = {loop.stop: [] for loop in graph.loops}
        for loop in graph.loops:
            opened[loop.start].append(loop)
            closed[loop.stop].insert(0, loop)  # inner loops end first
        for moment in range(len(graph.ops) + 1):
            for loop in closed.get(moment, ()):
                for k, carry in enumerate(loop.carries):
                    self.add(f"loop{loop.id}.out{k}", "loop_out", loop.parent, (carry.result,))
            for loop in opened.get(moment, ()):
                for k, carry in enumerate(loop.carries):
                    self.add(f"loop{loop.id}.in{k}", "loop_in", loop.id, (carry.body,))
            if moment < len(graph.ops):
                self.add_op(graph.ops[moment])
        for number, (result, tensor) in enumerate(zip(self.program.results, graph.results, strict=True)):
            self.add(f"result{number}", "result", -1, (tensor,), name=result.name)

    def add_op(self, op: Op) -> None:
        """Add the node of an op, with FLOPs and bytes of all its executions in one step."""
        trips, tensors = self.graph.trips(op.loop), self.graph.tensors
        self.add(
            f"op{op.id}",
            op.opaque.target if op.opaque else op.kind,
            op.loop,
            op.results,
            name=op.name,
            line=op.line,
            op_class=str(op.op_class),
            flops=round(op.flops * trips),
            bytes_read=round(sum(tensors[t].bytes for t in dict.fromkeys(op.operands)) * trips),
            bytes_written=round(sum(tensors[t].bytes for t in op.results) * trips),
        )

    def add(self, node: str, kind: str, loop: int, results: Iterable[int], **overrides: Any) -> None:
        """Add a node.

        - `node`, `kind`: name of the node and its kind.
        - `loop`: innermost loop or branch that contains the node; -1 for none.
        - `results`: tensors that the node gives; the first one gives name and cluster.
        - `overrides`: attributes that replace the defaults.
        """
        tensors = [self.graph.tensors[t] for t in results]
        block, branch = self.block(loop)
        attributes = {
            "kind": kind,
            "name": tensors[0].name if tensors else "",
            "line": "",
            "op_class": "",
            "role": "",
            "block": block,
            "branch": branch,
            "trips": self.graph.trips(loop),
            "cluster": self.reading.structure.cluster_of[tensors[0].id] if tensors else -1,
            "shapes": [list(tensor.shape) for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "flops": 0,
            "bytes_read": 0,
            "bytes_written": 0,
        } | overrides
        if self.priced is not None:
            own = self.priced.prices.inside.get(int(node[2:]), ()) if attributes["op_class"] else ()
            attributes["specs"] = [spec_text(self.spec(tensor), tensor.shape) for tensor in tensors]
            attributes |= {name: seconds.get(node, 0.0) for name, seconds in self.seconds.items()}
            attributes["collectives"] = [_collective(c) for c in own]
        self.made.add_node(node, **attributes)

    def block(self, loop: int) -> tuple[int, int]:
        """Return the innermost loop, and the innermost branch of a conditional, that contain the body `loop` or are it;
        -1 for none.
        """
        block = branch = -1
        while loop >= 0 and (block < 0 or branch < 0):
            record = self.graph.loops[loop]
            if record.branches and branch < 0:
                branch = loop
            elif not record.branches and block < 0:
                block = loop
            loop = record.parent
        return block, branch

    def add_edges(self, next_trips: bool) -> None:
        """Add the edges of operands, loops and results.

        Collectives of a reshard count at the first use of a tensor by an op, or as a result. For an initial value they
        count at the first loop that carries the value in another cluster.
        """
        graph, cluster_of = self.graph, self.reading.structure.cluster_of
        for op in graph.ops:
            seen: set[int] = set()
            for number, tensor in enumerate(op.operands):
                self.connect(tensor, f"op{op.id}", number, op, first=tensor not in seen)
                seen.add(tensor)
        tied: set[int] = set()
        for loop in graph.loops:
            for k, carry in enumerate(loop.carries):
                reshards = cluster_of[carry.init] != cluster_of[carry.body] and carry.init not in tied
                self.connect(carry.init, f"loop{loop.id}.in{k}", 0, first=reshards)
                if reshards:
                    tied.add(carry.init)
                self.connect(carry.update, f"loop{loop.id}.out{k}", 0)
                if next_trips:
                    self.connect(carry.update, f"loop{loop.id}.in{k}", 1, back=True)
        for number, tensor in enumerate(graph.results):
            self.connect(tensor, f"result{number}", 0, first=tensor not in tied)
            tied.add(tensor)

    def connect(
        self, tensor: int, node: str, number: int, op: Op | None = None, first: bool = False, back: bool = False
    ) -> None:
        """Add the edge of a tensor to a node that uses it.

        - `tensor`, `node`: number of the tensor, and name of the node.
        - `number`: number of the operand, the key of the edge.
        - `op`: op of the node, if it is one.
        - `first`: True if the collectives of the reshard count at this edge.
        - `back`: True for an edge to the next trip of a loop.
        """
        record = self.graph.tensors[tensor]
        groups = self.reading.groups
        attributes: dict[str, Any] = {
            "tensor": tensor,
            "name": record.name,
            "shape": list(record.shape),
            "dtype": record.dtype,
            "bytes": record.bytes,
            "dims": [
                groups.names.get(group, "") if group is not None else ""
                for group in tensor_groups(self.reading.structure, groups.of_factor, tensor)
            ],
            "cluster": self.reading.structure.cluster_of[tensor],
            "back": back,
        }
        if self.priced is not None:
            plan, spec = self.priced.plan, self.spec(record)
            moved = self.priced.prices.moved.get((tensor, -1 if op is None else op.id), ()) if first else ()
            taken = None if op is None else _taken_as(self.priced, op, number)
            attributes["spec"] = spec_text(spec, record.shape)
            attributes["sharding"] = hlo_sharding(spec, plan.mesh, plan.device_order)
            attributes["taken_as"] = "" if taken is None else spec_text(taken, record.shape)
            local = math.prod(spec.local_shape(record.shape, plan.mesh))
            attributes["device_bytes"] = local * record.itemsize
            attributes["collectives"] = [_collective(c) for c in moved]
        self.made.add_edge(self.maker[tensor], node, number, **attributes)

    def spec(self, tensor: Tensor) -> Spec:
        """Return the planned spec of a tensor."""
        assert self.priced is not None
        return tensor_spec(self.priced.model, self.priced.choices, tensor.id)


def _makers(graph: OpGraph) -> dict[int, str]:
    """Return the name of the node that gives each tensor, by number of the tensor. Values that a loop carries belong to
    the loop's nodes.
    """
    nodes = {t: f"op{op.id}" for op in graph.ops for t in op.results}
    nodes |= {tensor: f"argument{number}" for number, tensor in enumerate(graph.arguments)}
    for loop in graph.loops:
        for k, carry in enumerate(loop.carries):
            nodes |= {carry.body: f"loop{loop.id}.in{k}", carry.result: f"loop{loop.id}.out{k}"}
    return nodes


def _taken_as(priced: Priced, op: Op, operand: int) -> Spec | None:
    """Return the spec in which the op's strategy consumes operand number `operand`; None for ops without strategies of
    their own.
    """
    model = priced.model
    number = model.op_node.get(op.id)
    if op.op_class is not OpClass.HEAVY or op.rule is None or number is None:
        return None
    states = model.nodes[number].states[[int(priced.choices[number])]]
    rank = len(model.graph.tensors[op.operands[operand]].shape)
    return spec_of(model, factor_states(states, op.rule.operands[operand]), 0, rank)


def _collective(collective: Collective) -> dict[str, Any]:
    """Return a collective as a dict of figures of one step, without its cause."""
    return {
        "kind": collective.kind,
        "axes": list(collective.axes),
        "count": collective.count,
        "wire_bytes": collective.wire_bytes,
        "seconds": collective.seconds,
        "exposed_s": collective.waited_s,
    }
