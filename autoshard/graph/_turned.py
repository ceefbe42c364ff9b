"""Stacks of a loop's results that TPU compilers lay out as the loop's matmul makes them, and what that copies.

A matmul's kernel writes its result in the order in which it is multiplied: JAX's gradient of a weight [d, f] is a
product [f, d] and a transpose, which becomes a layout. A loop that stacks such results hands on a stack whose two
minor dims are swapped. Parameters and optimizer state are arguments, and so lie in order: where the update meets
them, the stack, and every value that follows from it alone (its square, its product with a scalar), is written in
the stack's layout and copied into theirs (seen in scheduled decoders, v5p and v6e, libtpu 0.0.51). Before that the
stack is filled with zeros. Gradients outside of loops take part in the update's fusion instead.
"""

import dataclasses
from collections.abc import Iterator

from autoshard.graph._records import Op, OpClass, OpGraph


_UNMOVED = frozenset({"convert", "reshape", "broadcast_in_dim", "sharding_constraint", "squeeze", "expand_dims"})
_SMALL = 1 << 20
"""Bytes below which a stack is not looked at."""


@dataclasses.dataclass(frozen=True, slots=True)
class Passes:
    """What is read or written whole of a tensor beside all fusions, once in every execution of a block."""

    tensor: int
    block: int
    """A loop's number; -1 outside of all."""
    count: int
    """How often its bytes go through memory: a copy reads and writes, which is twice."""
    by_rows: bool = False
    """Whether it goes row by row: a row of a register's lanes at a time, of which `count` copies are made."""


def turned_passes(graph: OpGraph) -> tuple[Passes, ...]:
    """What the layouts of stacked results copy; none where nothing is laid out in tiles is for the caller to say."""
    consumers: list[list[Op]] = [[] for _ in graph.tensors]
    for op in graph.ops:
        for tensor in set(op.operands):
            consumers[tensor].append(op)
    found = []
    for loop in graph.loops:
        for carry in loop.carries:
            if not loop.branches and graph.tensors[carry.result].bytes >= _SMALL and _is_turned(graph, carry.update):
                copies = sorted(_met(graph, consumers, carry.result))
                found += [Passes(carry.result, loop.parent, 1)] if copies else []
                # A value that is not the stack itself is written too, before it is copied; the first is the stack's.
                found += [Passes(tensor, loop.parent, 2 if n == 0 else 4) for n, tensor in enumerate(copies)]
    return tuple(found)


def _is_turned(graph: OpGraph, update: int) -> bool:
    """Whether a loop puts into a stack what a matmul makes with another minor dim."""
    op = _maker(graph, update)
    if op is None or op.kind != "dynamic_update_slice":
        return False
    tensor, turns = op.operands[1], False
    while (op := _maker(graph, tensor)) is not None and op.op_class is not OpClass.HEAVY:
        if op.kind == "transpose":
            turns = not turns and _minor_moves(graph, op)
        elif op.kind not in _UNMOVED:
            return False
        tensor = op.operands[0]
    return op is not None and op.kind == "dot_general" and turns


def _minor_moves(graph: OpGraph, op: Op) -> bool:
    """Whether a transpose takes another dim of more than one place as its last one."""
    assert op.rule is not None
    sides = (op.rule.operands[0], op.rule.results[0])
    tensors = (op.operands[0], op.results[0])
    last = []
    for factors, tensor in zip(sides, tensors, strict=True):
        wide = [each for each, size in zip(factors, graph.tensors[tensor].shape, strict=True) if size > 1]
        last.append(wide[-1] if wide else ())
    return last[0] != last[1]


def exchanges_outer(op: Op) -> bool:
    """Whether a transpose exchanges the first two of three or more dims: the layers of a stack, and the dim beside."""
    assert op.rule is not None
    source, turned = op.rule.operands[0], op.rule.results[0]
    return len(source) > 2 and turned == (source[1], source[0], *source[2:])


def _met(graph: OpGraph, consumers: list[list[Op]], stack: int) -> Iterator[int]:
    """Values that follow from a stack alone and of which an op takes another value of that size beside them."""
    own, todo = {stack}, [stack]
    while todo:
        tensor = todo.pop()
        meets = False
        for op in consumers[tensor]:
            if op.kind == "transpose" and exchanges_outer(op):  # a layout, as the stack is kept layer by layer
                own.add(op.results[0])
                todo.append(op.results[0])
            if op.op_class is not OpClass.POINTWISE or not op.results:
                continue
            shape = graph.tensors[tensor].shape
            others = [
                t for t in op.operands if t not in own and graph.tensors[t].shape == shape and _is_value(graph, t)
            ]
            if others:
                meets = True
            elif graph.tensors[op.results[0]].shape == shape and op.results[0] not in own:
                own.add(op.results[0])
                todo.append(op.results[0])
        if meets:
            yield tensor


def _is_value(graph: OpGraph, tensor: int) -> bool:
    """Whether a tensor is more than a number that is repeated."""
    op = _maker(graph, tensor)
    while op is not None and op.kind in _UNMOVED and op.operands:
        tensor = op.operands[0]
        op = _maker(graph, tensor)
    return graph.tensors[tensor].elements > 1 and (op is None or op.op_class is not OpClass.FREE)


def _maker(graph: OpGraph, tensor: int) -> Op | None:
    producer = graph.tensors[tensor].producer
    return graph.ops[producer] if producer >= 0 else None
