"""Stacks that a loop takes apart are in memory before it begins.

What a loop is given it is given in memory: no fusion reaches into a loop from outside. A stack whose slices the trips
take is therefore stored whole, although each slice alone would be computed where it is used: the microbatches that a
pipeline's first stage is fed with, the gradients that its last one begins with, a stack that was cast before its loop
(compiled pipelines on v5p and v6e, libtpu 0.0.51). What is only laid out anew is the stack that it was.

A matmul reads a slice of a stack where it lies, and of two slices the one that it needs, as where some stages have come
to their next chunk of layers. Where several matmuls take what is chosen, it is written once for all of them (the same
compiler; so the backward pass of a pipeline in rounds holds the weights of a chunk beside all of them).
"""

from autoshard.graph._records import Op, OpClass, OpGraph


_LAID_OUT = frozenset({"reshape", "transpose", "slice", "sharding_constraint"})
_PASSED_ON = _LAID_OUT | {"convert", "dynamic_slice"}


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


def chosen(graph: OpGraph, apart: frozenset[int]) -> dict[int, int]:
    """Values chosen among slices of stacks that several matmuls take, and the last of these matmuls.

    None of those that a loop takes `apart`, which are stored anyhow."""
    makers: dict[int, Op] = {tensor: op for op in graph.ops for tensor in op.results}
    users: dict[int, list[Op]] = {}
    for op in graph.ops:
        for tensor in set(op.operands):
            users.setdefault(tensor, []).append(op)
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.kind == "select" and op.loop >= 0 and all(_is_slice(makers, value) for value in op.operands[1:]):
            matmuls = _matmuls(users, op.results[0])
            if len(matmuls) > 1 and op.results[0] not in apart:
                found[op.results[0]] = max(matmuls)
    return found


def _is_slice(makers: dict[int, Op], tensor: int) -> bool:
    maker = makers.get(tensor)
    while maker is not None and maker.kind in _LAID_OUT:
        maker = makers.get(maker.operands[0])
    return maker is not None and maker.kind == "dynamic_slice" and maker.op_class is OpClass.LAYER


def _matmuls(users: dict[int, list[Op]], tensor: int) -> set[int]:
    """Those that take a value as it is, or narrowed."""
    found = set()
    for user in users.get(tensor, ()):
        if user.kind == "dot_general":
            found.add(user.id)
        elif user.kind in _PASSED_ON:
            found |= _matmuls(users, user.results[0])
    return found
