"""Values that TPU compilers store because two matmuls lay out their rows in different orders."""

from collections.abc import Iterator

from autoshard.graph.memory.fusion_analysis import FusionAnalysis
from autoshard.graph.memory.stack_layouts import minor_moves
from autoshard.graph.records import Op, OpClass, OpGraph


LEAST_ROWS = 128
"""Local size of the outermost row dim from which rows are laid out along it: the lanes of a register.

Mixers with 64 images on a device keep the order of the program, those with 128 to 512 do not (v5e, libtpu 0.0.52).
"""


def relaid_values(graph: OpGraph, analysis: FusionAnalysis) -> Iterator[tuple[int, int, int]]:
    """Yield the live ranges (tensor, start, stop) of values that are stored if the outermost dim has `LEAST_ROWS` rows.

    A matmul's kernel transposes its result and stores it in the program's order. A later matmul over two row dims of
    this value, such as the channels of a mixer, lays out rows along the outermost dim. Its operand cannot be computed
    inside its kernel then. The gradient of the next weight cannot compute its operand from the matmul's result either.
    Evidence: docs/compiler_behaviour.md, "Rows of matmuls around a transpose".
    """
    stored_by = {tensor: source for source, tensor in analysis.stores.items()}
    relaid = set[int]()
    for number in sorted(analysis.matmuls):
        op = graph.ops[number]
        operand = op.operands[0]
        large = _large(graph, analysis, operand)
        if op.kind != "dot_general" or len(graph.tensors[operand].shape) < 3 or operand in analysis.materialised:
            continue
        if len(large) == 1 and _is_transposed(graph, stored_by.get(next(iter(large)), -1)):
            relaid.add(op.results[0])
            yield from _stored(graph, analysis, operand, graph.tensors[operand].producer)
    for number in sorted(analysis.matmuls):
        operand = graph.ops[number].operands[0]
        large = _large(graph, analysis, operand)
        if operand not in analysis.materialised and len(large) == 1 and large <= relaid:
            yield from _stored(graph, analysis, operand, graph.tensors[next(iter(large))].producer)


def _large(graph: OpGraph, analysis: FusionAnalysis, tensor: int) -> frozenset[int]:
    """Return the stored values with as many elements as a tensor or more from which it is computed."""
    elements = graph.tensors[tensor].elements
    return frozenset(t for t in analysis.reach.get(tensor, ()) if graph.tensors[t].elements >= elements)


def _is_transposed(graph: OpGraph, source: int) -> bool:
    """Return True if a transpose that moves the minor dim reads a matmul's result; False for -1."""
    return source >= 0 and any(user.kind == "transpose" and minor_moves(graph, user) for user in graph.users[source])


def _stored(graph: OpGraph, analysis: FusionAnalysis, tensor: int, start: int) -> Iterator[tuple[int, int, int]]:
    """Yield the live range of an operand of two matmuls or more, from `start` to the last of them."""

    def matmuls_of(value: int) -> Iterator[Op]:
        for number in analysis.consumers[value]:
            user = graph.ops[number]
            if number in analysis.matmuls:
                yield user
            elif user.op_class is OpClass.VIEW or user.kind in ("transpose", "reshape"):
                yield from matmuls_of(user.results[0])

    users = {user.id for user in matmuls_of(tensor)}
    if len(users) > 1:
        yield tensor, start, max(users) + 1
