"""Slices of stacks that are copied for the kernels that take them.

XLA for GPUs reads a slice of a loop's stack in place from a fusion of pointwise ops, which a cast is. For matmuls,
convolutions and calls it makes a copy of the slice in every trip (weights in the dtype of the matmul, caches and saved
activations in bfloat16: all decoders that were compiled for h100, jaxlib 0.10.2).
"""

from collections.abc import Iterator, Sequence

from autoshard.graph._flops import is_sum
from autoshard.graph._hosted import TO_DEVICE
from autoshard.graph._lifetimes import outlast
from autoshard.graph._records import Op, OpClass, OpGraph


SHAPING = frozenset({"reshape", "transpose", "sharding_constraint"})
"""Ops that leave every element as it is."""


def copied_slices(graph: OpGraph, consumers: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (tensor, start, stop) of every slice that is copied; `consumers` has the ops that take each tensor."""
    for op in graph.ops:
        if op.kind != "dynamic_slice" or op.op_class is not OpClass.LAYER:
            continue
        users, last, copied = list(consumers[op.results[0]]), op.id, False
        while users:
            user = graph.ops[users.pop()]
            last = max(last, outlast(graph, op.results[0], user.id))
            copied |= takes_whole(user)
            if user.kind in SHAPING:
                users += consumers[user.results[0]]
            elif user.kind == TO_DEVICE:
                copied = False
                break
        if copied:
            yield op.results[0], op.id, last + 1


def takes_whole(op: Op) -> bool:
    """Return whether an op is a kernel that no slice is fused into."""
    if op.kind == "dot_general":
        return op.rule is not None and not is_sum(op.rule)
    return op.kind == "convolution" or op.opaque is not None
