"""A program as a graph for people and for graph libraries: ops, the tensors between them, and a plan's figures."""

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
from autoshard.planning.explain.explanation import reopen
from autoshard.planning.price.analysed_program import Reading, as_planned, price_again, read_program
from autoshard.planning.price.evaluate import spec_of, tensor_spec
from autoshard.planning.price.op_prices import OpPrices, Place, price_ops
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
    """A plan on its program: the choices that it holds, and what each op takes under them."""

    plan: Plan
    model: Model
    choices: NDArray[np.int64]
    prices: OpPrices


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramGraph:
    """The ops of a program and the tensors between them, with a plan's specs and times if it was made with one.

    Made by `Program.graph` and `Plan.graph`.
    """

    program: Program
    reading: Reading = dataclasses.field(repr=False)
    priced: Priced | None = dataclasses.field(default=None, repr=False)

    def to_networkx(self, next_trips: bool = False) -> "networkx.MultiDiGraph":
        """A new `networkx.MultiDiGraph`: ops are nodes, tensors are edges.

        Parallel edges are needed: an op may take one tensor twice, or several results of one op; an edge's key is the
        number of the operand. Without `next_trips` the graph has no cycles and every loop's body runs once; with it,
        edges from the end of a body lead back to its start.

        Nodes, in program order: `argument0`, ..., `op0`, ..., `result0`, ..., and for every value that a loop carries
        `loop0.in0` (as the body takes it) and `loop0.out0` (after the last trip). Every node has `kind` (the op's, or
        `argument`, `result`, `loop_in`, `loop_out`), `name`, `line`, `op_class`, `role`, `block` (the loop in whose
        body it is, -1 for none), `branch` (of a conditional, -1 for none), `trips` (executions in one step), `cluster`
        (of its first result, -1 for none), `shapes` and `dtypes` of its results; and of all devices in one step, before
        anything is fused, `flops`, `bytes_read` and `bytes_written`. An edge has `tensor`, `name`, `shape`, `dtype`,
        `bytes` (of the whole tensor), `dims` (the dim group of each), `cluster` and `back` (True for `next_trips`).

        With a plan, a node has `specs` of its results, `seconds` of compute in one step, `host_seconds`, and
        `collectives`: those inside the op, and those that sum its parts or bring its result where it is held. An edge
        has the `spec` that the tensor is held in, also as XLA's `sharding`, `taken_as` (the spec that an op with
        strategies of its own takes it in, else empty), `device_bytes`, and the `collectives` of the reshard between the
        two. A reshard that several ops of a block share stands at the first. A collective is a dict of `kind`, `axes`,
        `count`, `wire_bytes` of one device, `seconds` and `exposed_s`, all for one step. All seconds of nodes add up
        to the prediction's compute, and collectives to its communication.
        """
        return _Maker(self, next_trips).made

    def held(self, tensor: int) -> Spec:
        """The spec that the plan holds a tensor in; of a graph that was made with a plan."""
        assert self.priced is not None
        return tensor_spec(self.priced.model, self.priced.choices, tensor)

    def taken(self, op: Op, operand: int) -> Spec | None:
        """The spec in which the plan has an op take an operand; None for ops that have no strategies of their own."""
        assert self.priced is not None
        return _taken_as(self.priced, op, operand)


@provides("graph")
def graph_of(program: Program | None, plan: Plan | None) -> ProgramGraph:
    """What `Program.graph` and `Plan.graph` give: of a plan alone the program is opened again where it came from."""
    if program is None:
        assert plan is not None
        program = reopen(plan)
    return program_graph(program, plan)


def program_graph(program: Program, plan: Plan | None = None) -> ProgramGraph:
    """The ops of a program and the tensors between them; with a plan of it also specs, times and collectives.

    Raises `UserError` for a plan of another program, and for one whose choices cannot be priced again: it was made by
    another version.
    """
    if plan is None:
        return ProgramGraph(program, read_program(program, "cpu"))
    program = as_planned(program, plan)
    if program.fingerprint != plan.program_fingerprint:
        raise UserError(
            f"the plan (of {plan.program_name}) is not for {program.name}: it is another program, it has changed, or "
            "it was planned with other options; plan it again."
        )
    reading = read_program(program, Topology.parse(plan.topology).backend)
    model, choices = price_again(plan, program, reading)
    return ProgramGraph(program, reading, Priced(plan, model, choices, price_ops(model, choices)))


class _Maker:
    """Builds the graph: nodes in program order, then edges in the order of who takes them."""

    def __init__(self, source: ProgramGraph, next_trips: bool) -> None:
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
        """Attributes of the graph itself."""
        loops = [
            {
                "loop": loop.id, "parent": loop.parent, "trips": loop.trips, "known": loop.known,
                "is_branch": bool(loop.branches),
            }
            for loop in self.graph.loops
        ]  # fmt: skip
        found = {"program": self.program.name, "fingerprint": self.program.fingerprint, "flops": self.graph.flops}
        if self.priced is not None:
            plan = self.priced.plan
            found |= {"topology": plan.topology, "mesh": mesh_words(plan.mesh)}
            found |= {"step_time_s": plan.prediction.step_time_s, "compute_s": plan.prediction.compute_s}
            found |= {"exposed_comm_s": plan.prediction.exposed_comm_s}
        return {**found, "loops": loops}

    def at_nodes(self, places: dict[Place, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for (what, number), seconds in places.items():
            node = f"op{number}" if what == "op" else self.maker[number]
            found[node] = found.get(node, 0.0) + seconds
        return found

    def add_nodes(self) -> None:
        graph = self.graph
        for number, (argument, tensor) in enumerate(zip(self.program.arguments, graph.arguments, strict=True)):
            self.add(f"argument{number}", "argument", -1, (tensor,), name=argument.name, role=str(argument.role))
        opened = {loop.start: [] for loop in graph.loops}
        closed = {loop.stop: [] for loop in graph.loops}
        for loop in graph.loops:
            opened[loop.start].append(loop)
            closed[loop.stop].insert(0, loop)  # inner ones end first
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

    def add(self, node: str, kind: str, loop: int, results: Iterable[int], **said: Any) -> None:
        tensors = [self.graph.tensors[t] for t in results]
        block, branch = self.block(loop)
        found = {
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
        } | said
        if self.priced is not None:
            own = self.priced.prices.inside.get(int(node[2:]), ()) if found["op_class"] else ()
            found["specs"] = [spec_text(self.spec(tensor), tensor.shape) for tensor in tensors]
            found |= {name: seconds.get(node, 0.0) for name, seconds in self.seconds.items()}
            found["collectives"] = [_collective(c) for c in own]
        self.made.add_node(node, **found)

    def block(self, loop: int) -> tuple[int, int]:
        """The innermost loop, and the innermost branch of a conditional; -1 for none."""
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
        graph = self.graph
        for op in graph.ops:
            seen: set[int] = set()
            for number, tensor in enumerate(op.operands):
                self.connect(tensor, f"op{op.id}", number, op, first=tensor not in seen)
                seen.add(tensor)
        for loop in graph.loops:
            for k, carry in enumerate(loop.carries):
                self.connect(carry.init, f"loop{loop.id}.in{k}", 0)
                self.connect(carry.update, f"loop{loop.id}.out{k}", 0)
                if next_trips:
                    self.connect(carry.update, f"loop{loop.id}.in{k}", 1, back=True)
        tied: set[int] = set()
        for number, tensor in enumerate(graph.results):
            self.connect(tensor, f"result{number}", 0, first=tensor not in tied)
            tied.add(tensor)

    def connect(
        self, tensor: int, node: str, number: int, op: Op | None = None, first: bool = False, back: bool = False
    ) -> None:
        """Adds the edge of a tensor that a node takes; `first`: what brings the tensor there is counted here."""
        record = self.graph.tensors[tensor]
        groups = self.reading.groups
        found: dict[str, Any] = {
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
            found["spec"] = spec_text(spec, record.shape)
            found["sharding"] = hlo_sharding(spec, plan.mesh, plan.device_order)
            found["taken_as"] = "" if taken is None else spec_text(taken, record.shape)
            local = math.prod(spec.local_shape(record.shape, plan.mesh))
            found["device_bytes"] = local * record.itemsize
            found["collectives"] = [_collective(c) for c in moved]
        self.made.add_edge(self.maker[tensor], node, number, **found)

    def spec(self, tensor: Tensor) -> Spec:
        assert self.priced is not None
        return tensor_spec(self.priced.model, self.priced.choices, tensor.id)


def _makers(graph: OpGraph) -> dict[int, str]:
    """The node that each tensor comes from."""
    found = {t: f"op{op.id}" for op in graph.ops for t in op.results}
    found |= {tensor: f"argument{number}" for number, tensor in enumerate(graph.arguments)}
    for loop in graph.loops:
        for k, carry in enumerate(loop.carries):
            found |= {carry.body: f"loop{loop.id}.in{k}", carry.result: f"loop{loop.id}.out{k}"}
    return found


def _taken_as(priced: Priced, op: Op, operand: int) -> Spec | None:
    """The spec in which the op's strategy takes an operand; None for ops that have no strategies of their own."""
    model = priced.model
    number = model.op_node.get(op.id)
    if op.op_class is not OpClass.HEAVY or op.rule is None or number is None:
        return None
    states = model.nodes[number].states[[int(priced.choices[number])]]
    rank = len(model.graph.tensors[op.operands[operand]].shape)
    return spec_of(model, factor_states(states, op.rule.operands[operand]), 0, rank)


def _collective(collective: Collective) -> dict[str, Any]:
    return {
        "kind": collective.kind,
        "axes": list(collective.axes),
        "count": collective.count,
        "wire_bytes": collective.wire_bytes,
        "seconds": collective.seconds,
        "exposed_s": collective.waited_s,
    }
