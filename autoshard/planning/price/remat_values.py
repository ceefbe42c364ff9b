"""Ops that compute the values of a remat policy, in the forward pass and again in the backward pass.

A traced layer occurs twice: in the forward pass, and in the backward pass as the part that is recomputed. Values are
recognised as follows:

- A matmul by the weight that it consumes, such as `model.layers.*.self_attn.q_proj.weight`.
- Attention by having no weight, and by a result that feeds a matmul with a weight without further arithmetic.
- The layer's input by the loop that carries it and writes it into a stack.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable

from autoshard.graph import Op, OpClass, OpGraph
from autoshard.program import CONTEXT, INPUT, Program, chosen_name


AGAIN = "rematted_computation"
"""Part of the names that JAX gives to ops that the backward pass recomputes."""

_BACKWARD = "transpose("
"""Part of the names that JAX gives to ops of the backward pass."""
_WEIGHTS = ("", ".weight", "_weight")
"""Suffixes of a weight's name after the path of the module that multiplies by the weight."""
_SAME = frozenset(
    {"convert", "reshape", "transpose", "copy", "slice", "dynamic_slice", "broadcast_in_dim", "sharding_constraint"}
)
"""Ops whose result has the elements of their first operand in another form."""


@dataclasses.dataclass(frozen=True, slots=True)
class Occurrence:
    """One value of the layers of a loop, or of one layer outside loops."""

    path: str
    """Path of the value in the policy, such as `self_attn.q_proj`, or `CONTEXT` or `INPUT`."""
    value: int
    """Tensor that holds the value in the forward pass."""
    loop: int
    """Loop of the forward pass that computes the value; -1 for none."""
    recomputed: tuple[int, ...]
    """Tensors that the backward pass need not recompute if the value is saved; empty for a layer's input."""
    recompute_loop: int
    """Loop of the backward pass that consumes the value; -1 for none."""


def find_values(program: Program, graph: OpGraph) -> tuple[Occurrence, ...]:
    """Return the values of `Program.savable` that the backward pass recomputes, then the layer inputs stored for it.

    There is one record for each loop, or for each layer outside loops.
    """
    return tuple([*_ValueFinder(program, graph).computed(), *_inputs(graph)])


class _ValueFinder:
    """Search for the pairs of a forward op and the op that recomputes it."""

    def __init__(self, program: Program, graph: OpGraph) -> None:
        self.program, self.graph = program, graph
        self.names = {t: a.name for t, a in zip(graph.arguments, program.arguments, strict=True)}
        self.carried = {c.body: c.init for loop in graph.loops for c in loop.carries}

    def computed(self) -> Iterable[Occurrence]:
        """Yield every recomputed value with its ops in the forward and in the backward pass.

        Each recomputed op is paired with an unpaired forward op that is alike, in the forward loop of its backward
        loop. Ops with a weight are paired first, since they decide which loops belong together. Outside loops the last
        forward op comes first.
        """
        heavy = [op for op in self.graph.ops if op.op_class is OpClass.HEAVY and op.kind in _PRODUCTS]
        forward_ops: dict[object, list[tuple[str, Op]]] = defaultdict(list)
        for op in heavy:
            path = None if AGAIN in op.name or _BACKWARD in op.name else self.path_of(op)
            if path is not None:
                forward_ops[self.alike(op)].append((path, op))
        again = [op for op in heavy if AGAIN in op.name]
        loops = {-1: -1}  # a loop of the backward pass -> the loop of the forward pass with the same weights
        for op in sorted(again, key=lambda op: self.weight(op) is None):
            matches = [
                (path, made)
                for path, made in forward_ops[self.alike(op)]
                if loops.setdefault(op.loop, made.loop) == made.loop
            ]
            if matches:
                # Layers outside loops are recomputed in the opposite order.
                path, made = matches[-1 if op.loop < 0 else 0]
                forward_ops[self.alike(op)].remove((path, made))
                yield Occurrence(path, self.value(made), made.loop, op.results, op.loop)

    def alike(self, op: Op) -> object:
        """Return a key that is equal for a forward op and for the op that recomputes it.

        It has the kind, weight, shapes, source line and end of the name.
        """
        shapes = tuple(self.graph.tensors[t].shape for t in (*op.operands, *op.results))
        return op.kind, self.weight(op), shapes, op.line, _tail(op.name)

    def path_of(self, op: Op) -> str | None:
        """Return the policy's path of the value that a forward op computes; None if the value has no path.

        The longest path that matches the op's weight counts. An op without a weight is `CONTEXT` if it feeds a matmul
        with one.
        """
        weight = self.weight(op)
        if weight is None:
            return CONTEXT if CONTEXT in self.program.savable and self.feeds_weight(op) else None
        fitting = [
            path for path in self.program.savable for end in _WEIGHTS if chosen_name(weight, [path + end]) is not None
        ]
        return max(fitting, key=len, default=None)

    def weight(self, op: Op) -> str | None:
        """Return the name of the first argument with two or more dims that an op consumes, possibly in another form;
        None if there is none.
        """
        for tensor in op.operands:
            seen = self.origin(tensor)
            if seen in self.names and seen in self.graph.arguments and len(self.graph.tensors[seen].shape) > 1:
                return self.names[seen]
        return None

    def origin(self, tensor: int) -> int:
        """Return the tensor at the start of a chain of ops of `_SAME` and of loop carries."""
        while True:
            maker = self.graph.maker(tensor)
            if maker is not None and maker.kind in _SAME:
                tensor = maker.operands[0]
            elif tensor in self.carried:
                tensor = self.carried[tensor]
            else:
                return tensor

    def feeds_weight(self, op: Op) -> bool:
        """Return True if a matmul with a savable weight, other than an expert's, consumes one of the op's results,
        possibly in another form.
        """
        waiting = list(op.results)
        while waiting:
            for user in self.graph.users[waiting.pop()]:
                if user.kind in _SAME:
                    waiting += user.results
                elif user.kind == "dot_general" and (self.path_of(user) or CONTEXT) not in (CONTEXT, *_EXPERTS):
                    return True
        return False

    def value(self, op: Op) -> int:
        """Return the largest used result of an op, preferring results that are consumed whole; the first of equals."""
        used = [t for t in op.results if self.graph.users[t]] or list(op.results)
        return max(used, key=lambda t: (self.graph.tensors[t].bytes if t in self.direct(op) else -1, -t))

    def direct(self, op: Op) -> set[int]:
        """Return the results that some op consumes whole.

        Kernels repeat row sums along a lane, and of such a result only slices are consumed.
        """
        return {t for t in op.results if not all(user.kind == "slice" for user in self.graph.users[t])}


_EXPERTS = frozenset({"experts.gate_up_proj", "experts.down_proj"})
"""Weights of expert matmuls, which dispatch tokens by a matmul of their own."""

_PRODUCTS = frozenset({"dot_general", "custom_call", "attention"})
"""Kinds of heavy ops whose results a policy may save."""


def _tail(name: str) -> str:
    """Return the end of an op's name without JAX's transformation wrappers, equal for an op and its recomputation."""
    return "/".join(re.sub(r"^(?:\w+\()*|\)*$", "", part) for part in name.split("/")[-2:])


def _inputs(graph: OpGraph) -> Iterable[Occurrence]:
    """Yield the layer inputs: tensors that a forward loop carries, changes, and writes into a stack from which a
    backward loop slices.
    """
    carries = {c.body: c for loop in graph.loops for c in loop.carries}
    for op in graph.ops:
        if op.kind != "dynamic_update_slice" or op.loop < 0 or _BACKWARD in op.name or op.operands[0] not in carries:
            continue
        value = op.operands[1]
        while (maker := graph.maker(value)) is not None and maker.kind in _SAME:
            value = maker.operands[0]
        if value not in carries or carries[value].update == carries[value].body:
            continue
        stack = carries[op.operands[0]].result
        takers = [t for t in graph.users[stack] if t.kind == "dynamic_slice" and _BACKWARD in t.name]
        if takers:
            yield Occurrence(INPUT, value, op.loop, (), takers[0].loop)
