"""Values in the hosts' memory, and transfers between it and the devices' memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard import mlir
from autoshard.graph.records import Op, OpClass, OpGraph, is_batched


# Kinds of the ops that move a value to the host's memory, and back to the device's.
TO_HOST, TO_DEVICE = "to_host", "to_device"
INTO_STACKS = frozenset({"dynamic_update_slice", "broadcast_in_dim", "reshape"})
"""Ops that insert a value into a stack as one slice."""
_PASSING = INTO_STACKS | {"transpose", "copy", "sharding_constraint"}
"""Ops whose results lie in the same memory as their operand."""


def placement_kind(call: Any) -> str | None:
    """Return `to_host` or `to_device` for a custom call that places a value; None for any other call."""
    if mlir.target_name(call) != mlir.PLACEMENT:
        return None
    return TO_HOST if mlir.is_sent_to_host(call) else TO_DEVICE


def hosted(graph: OpGraph) -> frozenset[int]:
    """Return the tensors in the host's memory: results of `to_host`, and slices, stacks and carried values of them.

    Results of `to_device` are not among them.
    """
    tensors = {t for op in graph.ops if op.kind == TO_HOST for t in op.results}
    before = -1
    while tensors and len(tensors) != before:
        before = len(tensors)
        for op in graph.ops:
            passing = op.kind in _PASSING or (op.op_class is OpClass.LAYER and op.kind == "dynamic_slice")
            if passing and not tensors.isdisjoint(op.operands[:2]):
                tensors.update(op.results)
        for loop in graph.loops:
            for carry in loop.carries:
                parts = (carry.init, carry.body, carry.update, carry.result)
                if not tensors.isdisjoint(parts):
                    tensors.update(parts)
    return frozenset(tensors)


_PUT = "dynamic_update_slice"
_SHAPING = ("reshape", "broadcast_in_dim", "sharding_constraint")


def in_transit(
    graph: OpGraph, reach: Mapping[int, frozenset[int]], hosted: frozenset[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (tensor, start, stop) of the extra buffer that each transfer in a loop needs for a value in transit.

    `reach` maps each tensor to the stored values from which it is computed. A fetched value has one during its loop. So
    have the sources of a value that is sent into a stack, until the next fetching loop begins. A loop that sends and
    fetches needs none.
    """
    sent, fetched = (_moving(graph, kind) for kind in (TO_HOST, TO_DEVICE))
    # A loop that sends and fetches, as an update of state on the host, needs one layer's buffer only.
    both = {op.loop for op in sent} & {op.loop for op in fetched}
    starts = [graph.loops[op.loop].start for op in fetched]
    for op in fetched:
        if op.loop not in both:
            loop = graph.loops[op.loop]
            yield from ((tensor, loop.start, loop.stop) for tensor in op.results if tensor not in hosted)
    for op in sent:
        if op.loop not in both and _is_stacked(graph, op.results[0]):
            loop = graph.loops[op.loop]
            stop = min((start for start in starts if start >= loop.stop), default=loop.stop)
            sources = reach.get(op.operands[0], frozenset())
            yield from ((tensor, loop.start, stop) for tensor in sources if graph.tensors[tensor].loop == op.loop)


def is_copied(shape: Sequence[int]) -> bool:
    """Return True if stacks of values of this shape are copied for the loop's peeled trip: [B, S, D] with S >= D."""
    return len(shape) == 3 and shape[-2] >= shape[-1]


def copied_stacks(graph: OpGraph, hosted: frozenset[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (tensor, start, stop) of copies of stacks that stay on the device while others are offloaded.

    These stacks store the values with which trips begin, such as layer inputs, in a loop that offloads and attends. A
    copy is live from that loop's end to the end of the loop that reads the stack. `tensor` is the stack inside the
    loop's body.
    """
    sending = {op.loop for op in _moving(graph, TO_HOST) if _is_stacked(graph, op.results[0])}
    fetching = {op.loop for op in _moving(graph, TO_DEVICE)}
    slices = [op for op in graph.ops if op.loop in fetching and op.op_class is OpClass.LAYER]
    stops = {op.operands[0]: graph.loops[op.loop].stop for op in slices}
    shaped = {op.results[0]: op.operands[0] for op in graph.ops if op.kind in _SHAPING}
    # Attention is an opaque call, or in plain ops a matmul with a batch dim for the heads.
    attending = {op.loop for op in graph.ops if op.opaque is not None or is_batched(op)}
    for first in (graph.loops[number] for number in sorted(sending & attending)):
        puts = [op for op in graph.ops if op.kind == _PUT and op.loop == first.id]
        given = {op.operands[0]: _behind(op.operands[1], shaped) for op in puts}
        bodies = {carry.body for carry in first.carries}
        for carry in first.carries:
            stack = carry.result
            stays = stack in stops and stack not in hosted and given.get(carry.body) in bodies
            if stays and is_copied(graph.tensors[stack].shape[1:]):
                yield carry.body, first.stop, stops[stack]


def _behind(tensor: int, shaped: Mapping[int, int]) -> int:
    """Return the tensor that reshapes, broadcasts and constraints turn into `tensor`; `shaped` maps their results to
    operands.
    """
    while tensor in shaped:
        tensor = shaped[tensor]
    return tensor


def _moving(graph: OpGraph, kind: str) -> list[Op]:
    """Return the ops of a kind in loops, in program order, without those in branches of conditionals."""
    return [op for op in graph.ops if op.kind == kind and op.loop >= 0 and not graph.loops[op.loop].branches]


def _is_stacked(graph: OpGraph, tensor: int) -> bool:
    """Return True if a value has users and all of them insert it into stacks."""
    users = graph.users[tensor]
    return bool(users) and all(op.kind in INTO_STACKS for op in users)
