"""Stacks that a loop keeps in another layout, for dots whose batch dims do not lead.

XLA for GPUs wants the batch dims of a dot outermost. A loop that takes such an operand from a stack (a cache [layers,
batch, places, heads, size] under attention) keeps the stack in that layout: it is copied before the loop, held there,
and copied back where the loop updates it (jaxlib 0.10.2 for h100; caches [layers, batch, heads, places, size] are not).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from autoshard.graph._copied_slices import SHAPING, takes_whole
from autoshard.graph._records import Loop, Op, OpClass, OpGraph, is_batched


@dataclasses.dataclass(frozen=True, slots=True)
class RelaidStack:
    """A stack that is copied into another layout before a loop."""

    source: int
    """The tensor that the loop takes slices of."""
    loop: Loop
    result: int
    """The stack of updated slices that the loop makes; -1 for none."""
    better: tuple[int, ...]
    """The shape of the stack with the batch dims of the dot behind that of the loop, which is copied nowhere."""


def relaid_stacks(graph: OpGraph, consumers: Sequence[Sequence[int]]) -> Iterator[RelaidStack]:
    """Yield every such stack; `consumers` has the ops that take each tensor."""
    results = {carry.update: carry.result for loop in graph.loops for carry in loop.carries}
    seen = set()
    for op in graph.ops:
        if not is_batched(op) or not takes_whole(op) or op.loop < 0:
            continue
        for tensor, factors in zip(op.operands, op.rule.operands[:2] if op.rule else (), strict=False):
            batch = _batch_dims(op, tensor, factors, graph)
            chain = list(_chain(graph, tensor))
            if batch == set(range(len(batch))) or not chain or chain[-1].op_class is not OpClass.LAYER:
                continue
            source = chain[-1]
            if source.id in seen:
                continue
            seen.add(source.id)
            shape = [size for size in graph.tensors[tensor].shape if size > 1]
            order = [*sorted(batch), *(dim for dim in range(len(shape)) if dim not in batch)]
            better = (graph.tensors[source.operands[0]].shape[0], *(shape[dim] for dim in order))
            result = _stack_of(graph, consumers, chain, results)
            yield RelaidStack(source.operands[0], graph.loops[source.loop], result, better)


def _batch_dims(op: Op, tensor: int, factors: Sequence[Sequence[int]], graph: OpGraph) -> set[int]:
    """Return the dims of an operand that the other operand and the result have too, without those of size 1.

    Dims are counted as if those of size 1 were not there.
    """
    assert op.rule is not None
    left, right, out = ({f for dim in dims for f in dim} for dims in (*op.rule.operands[:2], op.rule.results[0]))
    wide = [dim for dim, size in zip(factors, graph.tensors[tensor].shape, strict=True) if size > 1]
    return {place for place, dim in enumerate(wide) if left & right & out & set(dim)}


def _chain(graph: OpGraph, tensor: int) -> Iterator[Op]:
    """Yield the ops that an operand comes from, up to a slice of a stack.

    They are reshapes that only add or drop dims of size 1, and updates of a part; the last op may be of any kind.
    """
    while (producer := graph.tensors[tensor].producer) >= 0:
        op = graph.ops[producer]
        yield op
        shapes = [[size for size in graph.tensors[t].shape if size > 1] for t in (*op.operands[:1], tensor)]
        if (
            op.op_class is OpClass.LAYER
            or op.kind not in ("reshape", "dynamic_update_slice")
            or shapes[0] != shapes[-1]
        ):
            return
        tensor = op.operands[0]


def _stack_of(
    graph: OpGraph, consumers: Sequence[Sequence[int]], chain: Sequence[Op], results: Mapping[int, int]
) -> int:
    """Return the stack that a loop puts an updated slice into, by its name after the loop."""
    todo = [tensor for op in chain if op.kind == "dynamic_update_slice" for tensor in op.results]
    while todo:
        for user in (graph.ops[number] for number in consumers[todo.pop()]):
            if user.kind == "dynamic_update_slice" and user.op_class is OpClass.LAYER:
                return results.get(user.results[0], -1)
            if user.kind in SHAPING or user.kind == "broadcast_in_dim":
                todo += user.results
    return -1
