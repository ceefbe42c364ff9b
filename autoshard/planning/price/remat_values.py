"""Where a program's layers make the values that a remat policy may name, and where they are computed again.

A layer is traced twice: in the forward pass, and in the backward pass for what is computed again. A matmul is known by
the weight that it takes, `model.layers.*.self_attn.q_proj.weight`; attention by its having none, and by giving, as it
is, what a matmul with a weight takes; the layer's input by the loop that carries it and puts it into a stack.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from autoshard.graph import Op, OpClass, OpGraph
from autoshard.program import CONTEXT, INPUT, Program, chosen_name


AGAIN = "rematted_computation"
"""What JAX puts into the name of an op that the backward pass computes again."""

_BACKWARD = "transpose("
_WEIGHTS = ("", ".weight", "_weight")
"""What a parameter's name has after the path of the module that multiplies by it."""
_SAME = frozenset(
    {"convert", "reshape", "transpose", "copy", "slice", "dynamic_slice", "broadcast_in_dim", "sharding_constraint"}
)
"""Ops whose result is their first operand in another form."""


@dataclasses.dataclass(frozen=True, slots=True)
class Occurrence:
    """One value of a layer of one loop, or of one layer by itself."""

    path: str
    made: int
    """The tensor in the forward pass."""
    loop: int
    """Loop of the forward pass that makes it; -1 for none."""
    again: tuple[int, ...]
    """Tensors that the backward pass computes again and need not if the value is kept; none for a layer's input."""
    loop_again: int
    """Loop of the backward pass that needs it."""


def find_values(program: Program, graph: OpGraph) -> tuple[Occurrence, ...]:
    """The values of `Program.savable` that the backward pass computes again, and the inputs that stay for it."""
    return tuple([*_ValueFinder(program, graph).computed(), *_inputs(graph)])


class _ValueFinder:
    def __init__(self, program: Program, graph: OpGraph) -> None:
        self.program, self.graph = program, graph
        self.names = {t: a.name for t, a in zip(graph.arguments, program.arguments, strict=True)}
        self.carried = {c.body: c.init for loop in graph.loops for c in loop.carries}
        self.users: dict[int, list[int]] = defaultdict(list)
        for op in graph.ops:
            for tensor in set(op.operands):
                self.users[tensor].append(op.id)

    def computed(self) -> Iterable[Occurrence]:
        """Of every value that is computed again: where it is made first, and where again."""
        heavy = [op for op in self.graph.ops if op.op_class is OpClass.HEAVY and op.kind in _PRODUCTS]
        known: dict[object, list[tuple[str, Op]]] = defaultdict(list)
        for op in heavy:
            path = None if AGAIN in op.name or _BACKWARD in op.name else self.path_of(op)
            if path is not None:
                known[self.alike(op)].append((path, op))
        again = [op for op in heavy if AGAIN in op.name]
        loops = {-1: -1}  # a loop of the backward pass -> the loop of the forward pass with the same weights
        for op in sorted(again, key=lambda op: self.weight(op) is None):
            found = [
                (path, made)
                for path, made in known[self.alike(op)]
                if loops.setdefault(op.loop, made.loop) == made.loop
            ]
            if found:
                # Layers by themselves are computed again in the opposite order.
                path, made = found[-1 if op.loop < 0 else 0]
                known[self.alike(op)].remove((path, made))
                yield Occurrence(path, self.value(made), made.loop, op.results, op.loop)

    def alike(self, op: Op) -> object:
        """Equal for an op of the forward pass and the same one computed again."""
        shapes = tuple(self.graph.tensors[t].shape for t in (*op.operands, *op.results))
        return op.kind, self.weight(op), shapes, op.line, _tail(op.name)

    def path_of(self, op: Op) -> str | None:
        """The path of the value that an op of the forward pass makes; None if it has none."""
        weight = self.weight(op)
        if weight is None:
            return CONTEXT if CONTEXT in self.program.savable and self.feeds_weight(op) else None
        fitting = [
            path for path in self.program.savable for end in _WEIGHTS if chosen_name(weight, [path + end]) is not None
        ]
        return max(fitting, key=len, default=None)

    def weight(self, op: Op) -> str | None:
        """The name of the parameter that an op takes as it is; None if it takes none."""
        for tensor in op.operands:
            seen = self.origin(tensor)
            if seen in self.names and seen in self.graph.arguments and len(self.graph.tensors[seen].shape) > 1:
                return self.names[seen]
        return None

    def origin(self, tensor: int) -> int:
        """What a tensor is another form of."""
        while True:
            producer = self.graph.tensors[tensor].producer
            if producer >= 0 and self.graph.ops[producer].kind in _SAME:
                tensor = self.graph.ops[producer].operands[0]
            elif tensor in self.carried:
                tensor = self.carried[tensor]
            else:
                return tensor

    def feeds_weight(self, op: Op) -> bool:
        """Whether a matmul with a weight takes what an op gives, in some form."""
        waiting = list(op.results)
        while waiting:
            for user in (self.graph.ops[u] for u in self.users[waiting.pop()]):
                if user.kind in _SAME:
                    waiting += user.results
                elif user.kind == "dot_general" and (self.path_of(user) or CONTEXT) not in (CONTEXT, *_EXPERTS):
                    return True
        return False

    def value(self, op: Op) -> int:
        """The largest of an op's results that something uses."""
        used = [t for t in op.results if self.users[t]] or list(op.results)
        return max(used, key=lambda t: (self.graph.tensors[t].bytes if t in self.direct(op) else -1, -t))

    def direct(self, op: Op) -> set[int]:
        """Results that are taken whole: of the row sums that a kernel repeats along a lane only one is."""
        return {t for t in op.results if not all(self.graph.ops[u].kind == "slice" for u in self.users[t])}


_EXPERTS = frozenset({"experts.gate_up_proj", "experts.down_proj"})
"""Matmuls with a weight that tokens enter by a matmul of their own."""

_PRODUCTS = frozenset({"dot_general", "custom_call", "attention"})


def _tail(name: str) -> str:
    """The end of an op's name, the same whether it is computed again or not."""
    return "/".join(re.sub(r"^(?:\w+\()*|\)*$", "", part) for part in name.split("/")[-2:])


def _inputs(graph: OpGraph) -> Iterable[Occurrence]:
    """What loops of the forward pass carry and put into a stack, from which a loop of the backward pass takes it."""
    carries = {c.body: c for loop in graph.loops for c in loop.carries}
    slices: Mapping[int, list[Op]] = defaultdict(list)
    for op in graph.ops:
        if op.kind == "dynamic_slice":
            slices[op.operands[0]].append(op)
    for op in graph.ops:
        if op.kind != "dynamic_update_slice" or op.loop < 0 or _BACKWARD in op.name or op.operands[0] not in carries:
            continue
        value = op.operands[1]
        while graph.tensors[value].producer >= 0 and graph.ops[graph.tensors[value].producer].kind in _SAME:
            value = graph.ops[graph.tensors[value].producer].operands[0]
        if value not in carries or carries[value].update == carries[value].body:
            continue
        stack = carries[op.operands[0]].result
        takers = [taker for taker in slices[stack] if _BACKWARD in taker.name]
        if takers:
            yield Occurrence(INPUT, value, op.loop, (), takers[0].loop)
