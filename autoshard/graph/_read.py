"""From an inlined StableHLO module to an `OpGraph`.

Works on the objects that the room `mlir` hands out and never imports MLIR itself.
"""

import dataclasses
import math
import re
from typing import Any

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.graph._calls import known_call
from autoshard.graph._classes import classify
from autoshard.graph._flops import op_flops
from autoshard.graph._halos import windowed_rule
from autoshard.graph._manual import COLLECTIVES, IN, OUT, end_rule, same_rule
from autoshard.graph._opaque import read_opaque
from autoshard.graph._records import (
    Carry,
    Constraint,
    Halo,
    Loop,
    Manual,
    Op,
    OpClass,
    OpGraph,
    Rule,
    Sharding,
    Tensor,
)
from autoshard.graph._rotate import Cut, join_rolls
from autoshard.graph._rules import parse_rule
from autoshard.graph._shardings import parse_axes, parse_mesh, parse_shardings, tiled
from autoshard.graph._types import parse_type


_GENERATED = frozenset({"constant", "iota", "partition_id"})
BRANCHING = frozenset({"case", "if"})
_ALIASES = frozenset({"optimization_barrier", "propagation_barrier"})
_CONSTRAINTS = frozenset({"sharding_constraint", "reshard"})
_CUTS = {
    "slice": ("start_indices", "limit_indices", "strides"),
    "pad": ("edge_padding_low", "edge_padding_high", "interior_padding"),
    "concatenate": ("dimension",),
}
"""Attributes that say what a slice, pad or concatenation does."""


def read_graph(module: bytes) -> OpGraph:
    """The graph of a lowered module (StableHLO bytecode or text), calls inlined and rules populated."""
    with mlir.new_context() as context:
        parsed = mlir.parse_module(module, context)
        mlir.inline_calls(parsed)
        reader = _Reader()
        reader.hash = mlir.structure_hash(parsed)
        mlir.populate_rules(parsed)
        reader.meshes = {name: parse_mesh(text) for name, text in mlir.mesh_texts(parsed).items()}
        reader.read_main(mlir.main_block(parsed), mlir.argument_shardings(parsed))
        return reader.graph()


class _Reader:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.loops: list[Loop | None] = []
        self.constraints: list[Constraint] = []
        self.without_rule: list[int] = []
        self.arguments: list[int] = []
        self.results: list[int] = []
        self.ids: dict[Any, int] = {}
        self.free: set[int] = set()
        self.constants: dict[int, int] = {}
        self.number = -1
        self.hash = ""
        self.cuts: dict[int, Cut] = {}
        self.meshes: dict[str, tuple[tuple[str, int], ...]] = {}
        self.manual: tuple[str, ...] = ()
        self.regions: list[Manual] = []

    def graph(self) -> OpGraph:
        loops = tuple(loop for loop in self.loops if loop is not None)
        returned = set(self.results) | {t for loop in loops for c in loop.carries for t in (c.init, c.update)}
        ops = join_rolls(self.ops, self.tensors, self.cuts, returned)
        return OpGraph(
            tuple(self.tensors), tuple(ops), loops, tuple(self.arguments), tuple(self.results),
            tuple(self.constraints), tuple(self.without_rule), self.hash, tuple(self.regions),
        )  # fmt: skip

    def read_main(self, block: Any, shardings: dict[int, str]) -> None:
        for position, value in enumerate(block.arguments):
            self.arguments.append(self.new_tensor(value, -1, -1, (-1, position)))
            for sharding in parse_shardings(shardings.get(position, ""), self.meshes):
                if not sharding.is_free:
                    where = f"the sharding of argument {position}"
                    self.constraints.append(Constraint(self.arguments[-1], sharding, where))
        self.results = self.read_block(block, -1)

    def new_tensor(self, value: Any, producer: int, loop: int, where: tuple[int, int], name: str = "") -> int:
        shape, dtype, size = parse_type(str(value.type))
        size *= math.prod(shape)
        tensor = Tensor(len(self.tensors), shape, dtype, size, producer, loop, where, name, self.manual)
        self.tensors.append(tensor)
        self.ids[value] = tensor.id
        return tensor.id

    def read_block(self, block: Any, loop: int) -> list[int]:
        """Reads the ops of a block; gives the tensors its terminator returns."""
        for handle in block.operations:
            op = handle.operation
            self.number += 1
            kind = op.name.rpartition(".")[2]
            if kind == "return":
                return [self.ids[value] for value in op.operands]
            if kind == "while":
                self.read_while(op, loop)
            elif kind in BRANCHING:
                self.read_branches(op, kind, loop)
            elif kind == "manual_computation":
                self.read_manual(op, loop)
            elif kind in _ALIASES:
                self.alias(op)
            elif kind in _CONSTRAINTS or _called(op, kind) == "Sharding":
                self.read_constraint(op, loop)
            else:
                self.read_op(op, kind, loop)
        return []

    def alias(self, op: Any) -> None:
        for operand, result in zip(op.operands, op.results, strict=True):
            self.ids[result] = self.ids[operand]

    def read_constraint(self, op: Any, loop: int) -> None:
        """A tensor of its own, so that the value may be split in another way before and after.

        A constraint that says nothing is the value itself, and so is one on an argument that nothing else uses.
        """
        source = self.ids[op.operands[0]]
        if "sharding" in op.attributes:
            (sharding,) = parse_shardings(str(op.attributes["sharding"]), self.meshes)
        else:
            sharding = tiled(op.attributes, len(self.tensors[source].shape))
        if sharding.is_free or not sharding.dims or source in self.free:
            return self.alias(op)
        where = _place("with_sharding_constraint", op)
        if self.tensors[source].value[0] == -1 and len(list(op.operands[0].uses)) == 1:
            self.alias(op)
            self.constraints.append(Constraint(source, sharding, where))
            return None
        shape = self.tensors[source].shape
        self.passing(
            op, "sharding_constraint", source, op.results[0], (self.number, 0), loop, same_rule([shape], [shape])
        )
        self.constraints.append(Constraint(self.ids[op.results[0]], sharding, where))
        return None

    def passing(
        self,
        op: Any,
        kind: str,
        source: int,
        value: Any,
        where: tuple[int, int],
        loop: int,
        rule: Rule | None,
        operand: int = 0,
        fixed: tuple[tuple[int, tuple[str, ...]], ...] = (),
        manual: tuple[str, ...] = (),
    ) -> None:
        """An op that only says how its operand is split: a constraint, or one value at an end of a region."""
        op_class = OpClass.VIEW if kind == "sharding_constraint" else OpClass.HEAVY
        op_id, name = len(self.ops), mlir.location_name(op.location)
        result = self.new_tensor(value, op_id, loop, where, name)
        if source in self.free:
            self.free.add(result)
            op_class = OpClass.FREE
        self.ops.append(
            Op(
                op_id,
                where[0],
                kind,
                op_class,
                (source,),
                (result,),
                rule,
                loop,
                0,
                name,
                (operand,),
                (),
                manual,
                fixed,
            )
        )

    def read_manual(self, op: Any, loop: int) -> None:
        """A `shard_map`: an op for each value that enters or leaves, and the body's ops in between."""
        number, outer = self.number, self.manual
        sides = [parse_shardings(str(op.attributes[f"{side}_shardings"]), self.meshes) for side in ("in", "out")]
        axes = parse_axes(str(op.attributes["manual_axes"]))
        both = tuple(dict.fromkeys((*outer, *axes)))
        mesh = next((s.mesh for side in sides for s in side), ())
        self.regions.append(Manual(number, axes, mesh, _place("shard_map", op)))
        body = op.regions[0].blocks[0]
        self.manual = both
        for k, (value, argument, sharding) in enumerate(zip(op.operands, body.arguments, sides[0], strict=True)):
            self.read_end(op, IN, self.ids[value], argument, (number, len(op.results) + k), loop, k, sharding, axes)
        returned = self.read_block(body, loop)
        self.manual = outer
        for r, (source, result, sharding) in enumerate(zip(returned, op.results, sides[1], strict=True)):
            self.read_end(op, OUT, source, result, (number, r), loop, r, sharding, axes)

    def read_end(
        self,
        op: Any,
        kind: str,
        source: int,
        value: Any,
        where: tuple[int, int],
        loop: int,
        position: int,
        sharding: Sharding,
        axes: tuple[str, ...],
    ) -> None:
        shape, _, _ = parse_type(str(value.type))
        mine = self.tensors[source].shape
        if not shape and source not in self.free:
            self.ids[value] = source
            return
        own = dataclasses.replace(
            sharding, dims=tuple(tuple(a for a in dim if a.name in axes) for dim in sharding.dims)
        )
        rule, fixed = end_rule(*((mine, shape) if kind == IN else (shape, mine)), own, kind)
        manual = tuple(dict.fromkeys((*self.manual, *axes)))
        self.passing(op, kind, source, value, where, loop, rule, position, fixed, manual)

    def read_op(self, op: Any, kind: str, loop: int) -> None:
        number = self.number
        name = mlir.location_name(op.location)
        op_id = len(self.ops)
        operands = tuple(self.ids[value] for value in op.operands)
        results = tuple(
            self.new_tensor(value, op_id, loop, (number, index), name) for index, value in enumerate(op.results)
        )
        takes, gives = [self.tensors[t] for t in operands], [self.tensors[t] for t in results]
        opaque = read_opaque(op, takes, gives, name) if kind == "custom_call" else None
        rule = parse_rule(str(op.attributes["sdy.sharding_rule"])) if "sdy.sharding_rule" in op.attributes else None
        groups: tuple[tuple[int, ...], ...] = ()
        if kind in COLLECTIVES:
            rule = same_rule([self.tensors[t].shape for t in operands], [self.tensors[t].shape for t in results])
            groups = mlir.device_groups(op)
        if opaque is not None:
            rule = opaque.rule
        halos: tuple[Halo, ...] = ()
        if rule is not None and kind in mlir.WINDOWED:
            shapes = [[self.tensors[t] for t in side] for side in (operands, results)]
            # A region in a region would be one of the program's own; and what lies beyond the edges must be known.
            split = not self.manual and (kind != "select_and_scatter" or mlir.selects_extreme(op))
            rule, halos = windowed_rule(kind, rule, mlir.attribute_texts(op), *shapes, split=split)
        known = None
        if opaque is not None and "mhlo.backend_config" in op.attributes:
            known = known_call(opaque.target, str(op.attributes["mhlo.backend_config"]), takes, gives)
        if known is not None:
            (kind, rule, _), opaque = known, None
        if kind in _GENERATED or (operands and all(t in self.free for t in operands) and rule is not None):
            self.free.update(results)
            op_class = OpClass.FREE
            if kind == "constant" and self.tensors[results[0]].shape == ():
                self.note_constant(op, results[0])
        else:
            op_class = OpClass.HEAVY if opaque and opaque.on_shards else classify(kind, rule, takes, gives)
            op_class = OpClass.HEAVY if kind in COLLECTIVES else op_class
            if rule is None and any(self.tensors[t].elements > 1 for t in (*operands, *results)):
                self.without_rule.append(op_id)
        if kind in _CUTS and all(name in op.attributes for name in _CUTS[kind]):
            self.cuts[op_id] = tuple(_integers(str(op.attributes[name])) for name in _CUTS[kind])
        zeros = str(op.attributes["lhs_dilation"]).partition(":")[2] if "lhs_dilation" in op.attributes else ""
        dilation = math.prod(int(n) for n in re.findall(r"\d+", zeros))
        flops = opaque.flops if opaque else op_flops(kind, rule, takes, gives, dilation)
        numbers = tuple(range(len(operands)))
        flops = known[2] if known is not None else flops
        self.ops.append(
            Op(
                op_id, number, kind, op_class, operands, results, rule, loop, flops, name, numbers, groups,
                self.manual, opaque=opaque, halos=halos,
            )
        )  # fmt: skip

    def note_constant(self, op: Any, tensor: int) -> None:
        match = re.search(r"dense<(-?\d+)>", str(op.attributes["value"]))
        if match:
            self.constants[tensor] = int(match[1])

    def read_branches(self, op: Any, kind: str, parent: int) -> None:
        """A conditional: the ops of every branch, and for each result an op that takes what the branches give for it.

        So branches and results agree on a spec as operands and results of pointwise ops do.
        """
        number, name = self.number, mlir.location_name(op.location)
        given = []
        for region in op.regions:
            branch, start = len(self.loops), len(self.ops)
            self.loops.append(None)
            given.append(self.read_block(region.blocks[0], branch))
            self.loops[branch] = Loop(
                branch, number, parent, 1, True, (), start, len(self.ops), 0, branches=len(op.regions)
            )
        for r, value in enumerate(op.results):
            sources, op_id = tuple(values[r] for values in given), len(self.ops)
            result = self.new_tensor(value, op_id, parent, (number, r), name)
            shape = self.tensors[result].shape
            op_class = OpClass.POINTWISE
            if all(source in self.free for source in sources):
                self.free.add(result)
                op_class = OpClass.FREE
            rule = same_rule([shape] * len(sources), [shape])
            numbers = tuple(range(len(sources)))
            self.ops.append(
                Op(op_id, number, kind, op_class, sources, (result,), rule, parent, 0, name, numbers,
                   manual=self.manual)
            )  # fmt: skip

    def read_while(self, op: Any, parent: int) -> None:
        number, loop_id = self.number, len(self.loops)
        self.loops.append(None)
        condition, body = (region.blocks[0] for region in op.regions)
        invariant = [body.operations[len(body.operations) - 1].operation.operands[k] == argument
                     for k, argument in enumerate(body.arguments)]  # fmt: skip
        inits = [self.ids[value] for value in op.operands]
        carried = []
        for k, (argument, init) in enumerate(zip(body.arguments, inits, strict=True)):
            self.ids[condition.arguments[k]] = init
            if invariant[k]:
                self.ids[argument] = init
                carried.append(init)
            else:
                carried.append(
                    self.new_tensor(argument, -1, loop_id, (number, len(inits) + k), self.tensors[init].name)
                )
        bound = self.read_condition(condition)
        start = len(self.ops)
        updates = self.read_block(body, loop_id)
        stop = len(self.ops)
        carries = []
        for k, result in enumerate(op.results):
            if invariant[k]:
                self.ids[result] = inits[k]
                continue
            out = self.new_tensor(result, -1, parent, (number, k), self.tensors[inits[k]].name)
            carries.append(Carry(inits[k], carried[k], updates[k], out))
        trips = self.count_trips(bound, inits, carried, updates)
        self.loops[loop_id] = Loop(
            loop_id, number, parent, trips or 1, trips is not None, tuple(carries), start, stop, len(inits)
        )

    def read_condition(self, block: Any) -> tuple[int, int] | None:
        """(counter's tensor as seen by the condition, limit) of `counter < limit`."""
        found = None
        for handle in block.operations:
            op = handle.operation
            self.number += 1
            kind = op.name.rpartition(".")[2]
            if kind == "constant":
                tensor = self.new_tensor(op.results[0], -1, -1, (self.number, 0))
                self.free.add(tensor)
                self.note_constant(op, tensor)
            elif kind == "compare" and "LT" in str(op.attributes["comparison_direction"]):
                left, right = (self.ids.get(value) for value in op.operands)
                if left is not None and right in self.constants:
                    found = (left, self.constants[right])
            else:
                for value in op.results:
                    self.ids.setdefault(value, -1)
        return found

    def count_trips(
        self, bound: tuple[int, int] | None, inits: list[int], carried: list[int], updates: list[int]
    ) -> int | None:
        if bound is None or bound[0] not in inits:
            return None
        # Several carries may start from one shared zero: the counter is the one whose update adds a constant.
        for k, init in enumerate(inits):
            if init != bound[0] or init not in self.constants:
                continue
            producer = self.tensors[updates[k]].producer
            if producer < 0 or self.ops[producer].kind != "add":
                continue
            terms = self.ops[producer].operands
            step = next((self.constants[t] for t in terms if t in self.constants), None)
            if carried[k] in terms and step:
                return max(0, -(-(bound[1] - self.constants[init]) // step))
        return None


def _called(op: Any, kind: str) -> str:
    """What a custom call calls; regions by hand in GSPMD's form are refused."""
    if kind != "custom_call":
        return ""
    target = str(op.attributes["call_target_name"]).strip('"')
    if target in ("SPMDFullToShardShape", "SPMDShardToFullShape"):
        raise UserError(
            f"the program has a region split by hand in GSPMD's form ({target}), whose axes have no names: export it "
            "with Shardy (jax_use_shardy_partitioner), or before it is split."
        )
    return target


def _integers(text: str) -> tuple[int, ...]:
    """The numbers of `array<i64: 3, 0>` or `0 : i64`."""
    body = text.partition(":")[2] if text.startswith("array") else text.partition(":")[0]
    return tuple(int(n) for n in re.findall(r"-?\d+", body))


def _place(what: str, op: Any) -> str:
    """What asks for a spec and where, for a person: the source line if it is known, else the op's name."""
    name, line = mlir.location_name(op.location), mlir.source_line(op).rpartition("/")[2]
    line = line.replace("-:", "line ", 1) if line.startswith("-:") else line
    return f"{what} at {line}" if line else f"{what} {name}".strip()


def replace_names(graph: OpGraph, names: list[str]) -> OpGraph:
    """The same graph with argument tensors named as the program names them."""
    tensors = list(graph.tensors)
    for tensor, name in zip(graph.arguments, names, strict=True):
        tensors[tensor] = dataclasses.replace(tensors[tensor], name=name)
    return dataclasses.replace(graph, tensors=tuple(tensors))
