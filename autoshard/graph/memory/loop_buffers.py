"""Buffers of loops: materialised loop inputs, and matmuls of pipeline stages."""

from autoshard.graph.extraction.rolls import ROTATE
from autoshard.graph.records import OpClass, OpGraph


def matmuls_of_stages(graph: OpGraph) -> frozenset[int]:
    """Return the matmuls of pipeline loops whose one batch dim is the dim of stages.

    A pipeline loop is one that rotates the stages' results by one place.
    """
    stages: dict[int, int] = {}
    for op in graph.ops:
        if op.kind == ROTATE and op.loop >= 0:
            size = graph.tensors[op.operands[0]].shape[0]
            if op.shift in (1, size - 1):
                stages[op.loop] = size
    matmuls = set()
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
                matmuls.add(op.id)
    return frozenset(matmuls)


_LAID_OUT = frozenset({"reshape", "transpose", "slice", "sharding_constraint"})
_PASSED_ON = _LAID_OUT | {"convert", "dynamic_slice"}


def sliced_loop_inputs(graph: OpGraph) -> frozenset[int]:
    """Return the values computed outside of the loops that slice them."""
    loop_inputs = set()
    for op in graph.ops:
        if op.kind != "dynamic_slice" or op.op_class is not OpClass.LAYER:
            continue
        tensor = op.operands[0]
        while (maker := graph.maker(tensor)) is not None and maker.kind in _LAID_OUT and maker.loop != op.loop:
            tensor = maker.operands[0]
        if maker is not None and maker.loop != op.loop and maker.op_class is not OpClass.FREE:
            loop_inputs.add(tensor)
    return frozenset(loop_inputs)


def selected_slices(graph: OpGraph, apart: frozenset[int]) -> dict[int, int]:
    """Map values selected among slices of stacks that several matmuls read to the last of these matmuls.

    The values in `apart`, which are stored in any case, are left out.
    """
    last_matmuls: dict[int, int] = {}
    for op in graph.ops:
        if op.kind == "select" and op.loop >= 0 and all(_is_slice(graph, value) for value in op.operands[1:]):
            matmuls = _matmuls(graph, op.results[0])
            if len(matmuls) > 1 and op.results[0] not in apart:
                last_matmuls[op.results[0]] = max(matmuls)
    return last_matmuls


def _is_slice(graph: OpGraph, tensor: int) -> bool:
    """Return True if a tensor is one layer of a stack, possibly in another layout."""
    maker = graph.maker(tensor)
    while maker is not None and maker.kind in _LAID_OUT:
        maker = graph.maker(maker.operands[0])
    return maker is not None and maker.kind == "dynamic_slice" and maker.op_class is OpClass.LAYER


def _matmuls(graph: OpGraph, tensor: int) -> set[int]:
    """Return the matmuls that consume a tensor, directly or after layout ops, casts and slices."""
    matmuls = set()
    for user in graph.users[tensor]:
        if user.kind == "dot_general":
            matmuls.add(user.id)
        elif user.kind in _PASSED_ON:
            matmuls |= _matmuls(graph, user.results[0])
    return matmuls
