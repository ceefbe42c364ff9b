"""What is on its way between the devices' memory and the host's: held a trip of the loop longer.

A loop that sends a slice of each trip to the host, or fetches one, does so beside the computation of the next trip: the
slice sent last is still held then, and the next one has a place already. What the last trip sends is on its way while
the program goes on, at most until it is fetched again (libtpu 0.0.51: it peels a trip off such loops).

A trip that is peeled off the backward loop has layouts of its own. Where sequences are at least as long as what they
hold at each position is wide, loops with attention lay out positions side by side, and so the stack of what trips begin
with is copied for that trip if it stays on the devices: seen with 8192 and 4096 positions of 4096 numbers, not with
2048. Other stacks that stay are not copied: seen with 4096 positions of 4096 numbers, compiled for v6e and measured on
tpu7x. Loops without attention keep the layout of their arguments and copy no stack: layers of two matmuls with 1024 to
8192 positions of 2048 numbers, in bfloat16 and float32, with and without a norm (v5e, v5p).
"""

from collections.abc import Iterator, Mapping, Sequence

from autoshard.graph._hosted import INTO_STACKS, TO_DEVICE, TO_HOST
from autoshard.graph._records import Op, OpClass, OpGraph, is_batched


_PUT = "dynamic_update_slice"
_SHAPING = ("reshape", "broadcast_in_dim", "sharding_constraint")


def in_transit(
    graph: OpGraph, reach: Mapping[int, frozenset[int]], hosted: frozenset[int]
) -> Iterator[tuple[int, int, int]]:
    """(tensor, start, stop) of what is held beside the value that a trip itself computes or uses.

    `reach` are the values in memory behind each tensor.
    """
    sent, fetched = (_moving(graph, kind) for kind in (TO_HOST, TO_DEVICE))
    # A loop that does both, as an update of state on the host, holds one layer's at once.
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
    """Whether stacks of values of that shape [B, S, D] are copied for the trip that is peeled off."""
    return len(shape) == 3 and shape[-2] >= shape[-1]


def copied_stacks(graph: OpGraph, hosted: frozenset[int]) -> Iterator[tuple[int, int, int]]:
    """(tensor, start, stop) of the copies of stacks of what trips begin with, where other stacks wait on the host."""
    sending = {op.loop for op in _moving(graph, TO_HOST) if _is_stacked(graph, op.results[0])}
    fetching = {op.loop for op in _moving(graph, TO_DEVICE)}
    slices = [op for op in graph.ops if op.loop in fetching and op.op_class is OpClass.LAYER]
    stops = {op.operands[0]: graph.loops[op.loop].stop for op in slices}
    shaped = {op.results[0]: op.operands[0] for op in graph.ops if op.kind in _SHAPING}
    # A kernel of attention is a call, and one in plain ops multiplies matrices of every head.
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
    """What is shaped into a tensor."""
    while tensor in shaped:
        tensor = shaped[tensor]
    return tensor


def _moving(graph: OpGraph, kind: str) -> list[Op]:
    """Ops of that kind in loops."""
    return [op for op in graph.ops if op.kind == kind and op.loop >= 0 and not graph.loops[op.loop].branches]


def _is_stacked(graph: OpGraph, tensor: int) -> bool:
    """Whether a value is only put into stacks."""
    users = [op for op in graph.ops if tensor in op.operands]
    return bool(users) and all(op.kind in INTO_STACKS for op in users)
