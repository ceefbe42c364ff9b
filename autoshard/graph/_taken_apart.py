"""Stacks that a loop takes apart are in memory before it begins.

What a loop is given it is given in memory: no fusion reaches into a loop from outside. A stack whose slices the trips
take is therefore stored whole, although each slice alone would be computed where it is used: the microbatches that a
pipeline's first stage is fed with, the gradients that its last one begins with, a stack that was cast before its loop
(compiled pipelines on v5p and v6e, libtpu 0.0.51). What is only laid out anew is the stack that it was.
"""

from autoshard.graph._records import Op, OpClass, OpGraph


_LAID_OUT = frozenset({"reshape", "transpose", "slice", "sharding_constraint"})


def taken_apart(graph: OpGraph) -> frozenset[int]:
    """Values computed outside of the loops that take slices of them."""
    makers: dict[int, Op] = {tensor: op for op in graph.ops for tensor in op.results}
    found = set()
    for op in graph.ops:
        if op.kind != "dynamic_slice" or op.op_class is not OpClass.LAYER:
            continue
        tensor = op.operands[0]
        maker = makers.get(tensor)
        while maker is not None and maker.kind in _LAID_OUT and maker.loop != op.loop:
            tensor = maker.operands[0]
            maker = makers.get(tensor)
        if maker is not None and maker.loop != op.loop and maker.op_class is not OpClass.FREE:
            found.add(tensor)
    return frozenset(found)
