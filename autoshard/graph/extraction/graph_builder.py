"""State of the extraction: tensors, ops and loops so far, and the tensor of each MLIR value."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.graph.extraction.position_masks import Known, known_value, selected_share
from autoshard.graph.extraction.rolls import Cut, join_rolls
from autoshard.graph.records import Constraint, Loop, Manual, Op, OpClass, OpGraph, Rule, Tensor


MOST_TENSOR_BYTES = 1 << 53
"""Largest allowed tensor, in bytes. Up to this size byte counts are exact in floating point, and sums over a step fit
in 64 bits.
"""


class GraphBuilder:
    """Builder of an `OpGraph`: grows op by op, and `graph` returns the result.

    - `loops`: loops by id; None while the loop's body is being read.
    - `without_rule`: ids of ops without a sharding rule.
    - `ids`: tensor of each MLIR value.
    - `barrier_of`: number of the last optimization barrier that each MLIR value came through, of those that did.
    - `free`: tensors that no op needs to compute from arguments, such as constants.
    - `constants`: values of integer constants, by tensor.
    - `known`: values of tensors that follow from positions alone, by tensor.
    - `number`: number of the MLIR op that was read last.
    - `cuts`: attributes of slices, pads and concatenations, by op id.
    - `meshes`: the module's meshes by name.
    - `manual`: axes that the surrounding `shard_map` regions split by hand.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.loops: list[Loop | None] = []
        self.constraints: list[Constraint] = []
        self.without_rule: list[int] = []
        self.arguments: list[int] = []
        self.results: list[int] = []
        self.ids: dict[Any, int] = {}
        self.barrier_of: dict[Any, int] = {}
        self.free: set[int] = set()
        self.constants: dict[int, int] = {}
        self.known: dict[int, Known] = {}
        self.number = -1
        self.hash = ""
        self.cuts: dict[int, Cut] = {}
        self.meshes: dict[str, mlir.MeshAxes] = {}
        self.manual: tuple[str, ...] = ()
        self.regions: list[Manual] = []
        self.rules: dict[Any, Rule] = {}
        """Sharding rule of each attribute that was read."""

    def graph(self) -> OpGraph:
        """Return the graph of the ops so far, with rolls joined (`join_rolls`); the builder does not change."""
        loops = tuple(loop for loop in self.loops if loop is not None)
        returned = set(self.results) | {t for loop in loops for c in loop.carries for t in (c.init, c.update)}
        ops = join_rolls(self.ops, self.tensors, self.cuts, returned)
        return OpGraph(
            tuple(self.tensors), tuple(ops), loops, tuple(self.arguments), tuple(self.results),
            tuple(self.constraints), tuple(self.without_rule), self.hash, tuple(self.regions),
        )  # fmt: skip

    def new_tensor(self, value: Any, producer: int, loop: int, where: tuple[int, int], name: str = "") -> int:
        """Add a tensor for an MLIR value, map the value to it, and return its id.

        - `producer`: id of the op that computes it; -1 for none.
        - `loop`: loop in which it is computed; -1 for none.
        - `where`: (op number, position) that becomes `Tensor.value`.
        - `name`: name for display.

        Raises `UserError` if it exceeds `MOST_TENSOR_BYTES`.
        """
        shape, dtype, size = mlir.tensor_type(value.type)
        size *= math.prod(shape)
        if size > MOST_TENSOR_BYTES:
            named = f"the tensor {name or mlir.location_name(value.location)}".rstrip()
            raise UserError(
                f"{named} has the shape {list(shape)}, more than {MOST_TENSOR_BYTES >> 50} PiB; "
                "times and sizes of such a program cannot be counted: make it smaller."
            )
        tensor = Tensor(len(self.tensors), shape, dtype, size, producer, loop, where, name, self.manual)
        self.tensors.append(tensor)
        self.ids[value] = tensor.id
        return tensor.id

    def alias(self, op: Any) -> None:
        """Map each result of an op to the tensor of the operand at the same position; the op adds neither op nor
        tensor. An optimization barrier is noted for its results.
        """
        for operand, result in zip(op.operands, op.results, strict=True):
            self.ids[result] = self.ids[operand]
            barrier = self.number if op.name == "stablehlo.optimization_barrier" else self.barrier_of.get(operand, -1)
            if barrier >= 0:
                self.barrier_of[result] = barrier

    def append_pass_through(
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
        """Append an op that only defines a split of its operand: a constraint, or one value at an end of a `shard_map`
        region. A constraint is a view, an end a heavy op, and either is free if its operand is.

        - `op`, `kind`: the MLIR op and the kind of the new op.
        - `source`, `value`: tensor of the operand, MLIR value of the result.
        - `where`: (op number, position) that becomes `Tensor.value`.
        - `operand`: position of the source among the operands of the MLIR op.
        - `rule`, `loop`, `fixed`, `manual`: see `Op`.
        """
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
                line=mlir.code_line(op),
            )
        )

    def note_known(self, op: Any, kind: str, operands: Sequence[int], results: Sequence[int]) -> float:
        """Record the value of a generated op in `known`; return the share that a select takes from its computed operand
        (`selected_share`), 1 for other ops.
        """
        values = [self.known.get(tensor) for tensor in operands]
        takes, gives = [self.tensors[tensor] for tensor in operands], [self.tensors[tensor] for tensor in results]
        if len(results) == 1 and all(tensor in self.free for tensor in operands):
            value = known_value(op, kind, values, takes, gives[0])
            if value is not None:
                self.known[results[0]] = value
        elif kind == "select":
            return selected_share(values, gives[0].shape, [tensor in self.free for tensor in operands])
        return 1.0

    def note_constant(self, op: Any, tensor: int) -> None:
        """Record the value of an integer constant in `constants`.

        Other constants are skipped: they are not needed, and the MLIR bindings cannot read complex ones.
        """
        if not self.tensors[tensor].dtype.startswith(("int", "uint")):
            return
        self.constants[tensor] = mlir.scalar_of(op.attributes["value"])


ReadBlock = Callable[[Any, int], list[int]]
"""Function that reads the ops of an MLIR block into the builder, within a loop (-1 for none).

It returns the tensors of the operands of the block's terminator.
"""
