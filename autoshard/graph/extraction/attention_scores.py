"""Scores of attention in a graph: those of softmaxes between matmuls, and those of jax's kernels."""

import dataclasses

from autoshard.graph.extraction.opaque_rules import KERNELS, float_operands
from autoshard.graph.records import Op, OpClass, OpGraph, Tensor, is_batched


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one head, and the part that a kernel computes in one step."""

    queries: int
    keys: int
    head: int
    """Elements of one query."""
    block: int = 0
    """Scores of one step of a kernel's grid; 0 without a kernel."""


def is_summed(graph: OpGraph, exponential: Op) -> bool:
    """Return True if the result of an exponential, or its conversion, is reduced, as a softmax does."""
    users = graph.users[exponential.results[0]]
    converted = (each for user in users if user.kind == "convert" for each in graph.users[user.results[0]])
    return any(user.kind == "reduce" for user in (*users, *converted))


def scores_of(graph: OpGraph, exponential: Op) -> Tensor | None:
    """Return the result of a matmul with batch dims from which elementwise ops compute the operand of an exponential;
    None if there is none.

    Dims may be moved in between, as `jax.nn.dot_product_attention` does.
    """
    waiting, seen = list(exponential.operands), set[int]()
    elements = graph.tensors[exponential.results[0]].elements
    while waiting:
        tensor = graph.tensors[waiting.pop()]
        op = graph.maker(tensor.id)
        if op is None or tensor.id in seen or tensor.elements != elements:
            continue
        seen.add(tensor.id)
        if is_batched(op):
            return tensor
        waiting += op.operands if op.op_class is not OpClass.HEAVY else ()
    return None


def attention_scores(graph: OpGraph, op: Op) -> Scores | None:
    """Return the scores of an exponential of a softmax between matmuls, or of one of jax's kernels of attention; None
    for other ops.
    """
    if op.kind == "exponential" and is_summed(graph, op) and (scores := scores_of(graph, op)) is not None:
        queries, keys = [1, 1, *(size for size in graph.tensors[op.results[0]].shape if size > 1)][-2:]
        return Scores(queries, keys, graph.ops[scores.producer].flops // (2 * scores.elements))
    kernel = attention_kernel(graph, op)
    if kernel is None or op.opaque is None:
        return None
    queries, keys, steps = kernel.queries, kernel.keys, op.opaque.steps
    block = op.flops // (2 * kernel.computed * queries.shape[-1] * steps) if steps else 0
    return Scores(queries.shape[-2], keys.shape[-2], queries.shape[-1], block)


def sorted_sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes above 1 of a shape in ascending order, equal for tensors whose dims are only moved."""
    return tuple(sorted(size for size in shape if size > 1))


def scores_by_op(graph: OpGraph) -> dict[int, Scores]:
    """Return the scores that ops compute or pass over, by op: those of `attention_scores`, and those of the ops around
    a softmax, forward and backward.

    An op around a softmax is no heavy op, and reads or writes a tensor with the sizes of the softmax's scores.
    """
    scores = {op.id: found for op in graph.ops if (found := attention_scores(graph, op)) is not None}
    stored = {
        sorted_sizes(graph.tensors[op.results[0]].shape): scores[op.id]
        for op in graph.ops
        if op.id in scores and op.kind == "exponential"
    }
    for op in graph.ops if stored else ():
        if op.id not in scores and op.op_class is not OpClass.HEAVY:
            sides = (sorted_sizes(graph.tensors[tensor].shape) for tensor in (*op.operands, *op.results))
            passed = next((stored[sizes] for sizes in sides if sizes in stored), None)
            if passed is not None:
                scores[op.id] = passed
    return scores


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionKernel:
    """One of jax's kernels of attention."""

    queries: Tensor
    keys: Tensor
    computed: int
    """Matmuls over the scores that the kernel computes."""
    needed: int
    """Matmuls that the model needs: without the scores, and the gradient of the probabilities, of another kernel."""


def attention_kernel(graph: OpGraph, op: Op) -> AttentionKernel | None:
    """Return the queries, keys and matmuls of an op that is one of jax's kernels of attention; None for other ops."""
    target = "" if op.opaque is None or not op.opaque.head else op.opaque.target
    flops = next((flops for name, flops in KERNELS.items() if target.startswith(name)), 0)
    floats = float_operands([graph.tensors[tensor] for tensor in op.operands]) if flops else []
    if len(floats) < 2:
        return None
    # A fused backward kernel has parts of the queries' gradient as results of one more dim, one for each block of keys.
    fused = "_dkv" in target and any(len(graph.tensors[t].shape) > len(floats[0].shape) for t in op.results)
    needed = 4 if fused else 3 if "_dkv" in target else 1 if "_dq" in target else 2
    return AttentionKernel(floats[0], floats[1], flops // 2 + fused, needed)
