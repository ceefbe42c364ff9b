"""Gradients of weights that are made late: what they are made from is held until then.

A gradient that the optimizer alone uses may be made as near to it as can be. Compilers for tpu7x, and for v5p without
flags, so make the gradient of a decoder's head after the loop of the backward pass, and hold the gradients of all
logits meanwhile (a stack of MLPs with a head on v5p:2x2x1 and tpu7x:2x2x1, a mixture on tpu7x:4x4x4, libtpu 0.0.51).
That for v5e, and that for v5p with flags for SparseCores, make it before the loop.
"""

import dataclasses

from autoshard.graph.memory.fusion import Liveness
from autoshard.graph.records import OpClass, OpGraph


def made_late(graph: OpGraph, liveness: Liveness) -> Liveness:
    """The same, with what such products read held until the last loop is done that stands before their use."""
    whole = [loop for loop in graph.loops if loop.parent < 0]
    needed = _needed(graph)
    late: dict[int, int] = {}
    for fusion in liveness.fusions:
        op = graph.ops[fusion.root]
        if op.kind != "dot_general" or op.loop >= 0:
            continue
        use = needed[op.results[0]]
        after = max((loop.stop for loop in whole if op.id < loop.start and loop.stop <= use), default=0)
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
    """By tensor the first op that needs it, not counting elementwise ops outside of loops, which wait as well."""
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
