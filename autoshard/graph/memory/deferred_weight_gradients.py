"""Weight gradients that some compilers schedule after the backward loop; their inputs stay live until then.

Evidence: docs/compiler_behaviour.md, "Deferred weight gradients".
"""

import dataclasses

from autoshard.graph.memory.fusion import Liveness
from autoshard.graph.records import OpClass, OpGraph


def defer_weight_gradients(graph: OpGraph, liveness: Liveness) -> Liveness:
    """Return the liveness with deferred weight gradients.

    The matmuls are those outside of loops whose result is first needed after a later loop. Their inputs stay live until
    the last loop before that use is done.
    """
    outer_loops = [loop for loop in graph.loops if loop.parent < 0]
    needed = _needed(graph)
    late: dict[int, int] = {}
    for fusion in liveness.fusions:
        op = graph.ops[fusion.root]
        if op.kind != "dot_general" or op.loop >= 0:
            continue
        use = needed[op.results[0]]
        after = max((loop.stop for loop in outer_loops if op.id < loop.start and loop.stop <= use), default=0)
        for tensor in fusion.reads if after else ():
            late[tensor] = max(late.get(tensor, 0), after)
    widths = dict(liveness.widths)
    buffers = []
    for buffer in liveness.buffers:
        tensor, start, stop = buffer
        longer = (tensor, start, max(stop, late.get(tensor, 0)))
        if buffer != longer and buffer in widths:
            widths[longer] = widths.pop(buffer)
        buffers.append(longer)
    return dataclasses.replace(liveness, buffers=tuple(sorted(buffers)), widths=widths)


def _needed(graph: OpGraph) -> dict[int, int]:
    """Map each tensor to the first op that needs it.

    Elementwise ops outside of loops do not count, since compilers defer them too.
    """
    needed = dict.fromkeys(range(len(graph.tensors)), len(graph.ops))
    for loop in graph.loops:
        for carry in loop.carries:
            needed[carry.init] = min(needed[carry.init], loop.start)
    for op in reversed(graph.ops):
        waits = op.op_class in (OpClass.POINTWISE, OpClass.VIEW) and op.loop < 0
        first = min((needed[t] for t in op.results), default=op.id) if waits else op.id
        for tensor in op.operands:
            needed[tensor] = min(needed[tensor], first)
    return needed
