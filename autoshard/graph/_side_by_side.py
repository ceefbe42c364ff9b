"""Matmuls of a pipeline's stages: side by side in the program, one on each device.

A program in stages computes all of them at once, each in one place of the first dim of what it hands round, and rolls
that by one place at every tick. Every matmul of a layer so gets a batch dim, that of the stages. Where stages stand on
different devices the compiler finds one place in it, drops it, and has a matmul like any other (compiled pipelines on
v5p and v6e, libtpu 0.0.51: no value between two matmuls of an MLP is stored but their results).
"""

from autoshard.graph._records import OpGraph
from autoshard.graph._rotate import ROTATE


def matmuls_of_stages(graph: OpGraph) -> frozenset[int]:
    """Matmuls in loops that hand stages' results round, whose one batch dim is that of the stages."""
    stages: dict[int, int] = {}
    for op in graph.ops:
        if op.kind == ROTATE and op.loop >= 0:
            size = graph.tensors[op.operands[0]].shape[0]
            if op.shift in (1, size - 1):
                stages[op.loop] = size
    found = set()
    for op in graph.ops if stages else ():
        if op.kind != "dot_general" or op.rule is None:
            continue
        loop = op.loop
        while loop >= 0 and loop not in stages:
            loop = graph.loops[loop].parent
        sides = (*op.rule.operands, op.rule.results[0])
        shared = set.intersection(*({f for dim in dims for f in dim} for dims in sides))
        if loop >= 0 and len(shared) == 1 and all(dims[0] == tuple(shared) for dims in sides):
            if op.rule.sizes[shared.pop()] == stages[loop]:
                found.add(op.id)
    return frozenset(found)
