"""Elementwise ops that kernels of matmuls on GPUs compute before they store their results.

XLA fuses a chain of such ops into its Triton kernels, a bias and an activation function for example. Each value of the
chain has one consumer, no other large operand enters, and the result grows no wider (jaxlib 0.10.2 for h100).
"""

from collections.abc import Collection, Sequence

from autoshard.graph._continued import SMALL, Continued
from autoshard.graph._flops import is_sum
from autoshard.graph._records import Fusion, OpClass, OpGraph


def with_epilogues(
    graph: OpGraph, fusions: Sequence[Fusion], consumers: Sequence[Sequence[int]], pinned: Collection[int]
) -> Continued:
    """Return the fusions without those that matmuls do before they store, and what they store instead."""
    made, stores = list(fusions), {}
    number_of = {fusion.root: number for number, fusion in enumerate(fusions)}
    for fusion in fusions:
        op = graph.ops[fusion.root]
        if op.kind != "dot_general" or op.rule is None or is_sum(op.rule) or op.results[0] in pinned:
            continue
        root = _end_of_chain(graph, op.results[0], consumers, pinned)
        number = number_of.get(root, -1)
        if number < 0 or len(fusions[number].writes) != 1 or fusions[number].moved != fusions[number].writes:
            continue
        stores[op.results[0]] = fusions[number].writes[0]
        reads = tuple(t for t in fusions[number].reads if t != op.results[0])
        made[number] = Fusion(root, fusions[number].writes, reads, (), True)
    return Continued(made, stores)


def _end_of_chain(graph: OpGraph, tensor: int, consumers: Sequence[Sequence[int]], pinned: Collection[int]) -> int:
    """Return the last elementwise op of a chain from a value, each with one consumer; -1 for none."""
    own, last = graph.tensors[tensor], -1
    while len(set(consumers[tensor])) == 1:
        op = graph.ops[consumers[tensor][0]]
        result = graph.tensors[op.results[0]] if op.results else own
        if op.op_class is not OpClass.POINTWISE or op.loop != own.loop or result.shape != own.shape:
            break
        others = [t for t in op.operands if t != tensor]
        if (
            result.bytes > own.bytes
            or op.kind == "transpose"
            or not all(_is_small(graph, t, own.elements) for t in others)
        ):
            break
        tensor, last = op.results[0], op.id
        if tensor in pinned:
            break
    return last


def _is_small(graph: OpGraph, tensor: int, elements: int) -> bool:
    """Return whether a value is small, or repeats a small one."""
    while graph.tensors[tensor].elements * SMALL > elements:
        producer = graph.tensors[tensor].producer
        if producer < 0 or graph.ops[producer].op_class not in (OpClass.FREE, OpClass.VIEW):
            return False
        if graph.ops[producer].op_class is OpClass.FREE:
            return True
        tensor = graph.ops[producer].operands[0]
    return True
