"""FLOPs of the ops that a matrix unit runs."""

import math
from collections.abc import Sequence

from autoshard.graph._linear_algebra import decomposition_flops
from autoshard.graph._records import FactorKind, Rule, Tensor


def op_flops(
    kind: str, rule: Rule | None, operands: Sequence[Tensor], results: Sequence[Tensor], dilation: int = 1
) -> int:
    """Multiply-adds counted as two; 0 for ops that only the vector unit runs.

    `dilation`: of a convolution's input, one element in so many is not an inserted zero (the gradient of a strided
    convolution); products with the zeros do not count.
    """
    if kind == "dot_general" and rule is not None:
        contracted = math.prod(s for s, k in zip(rule.sizes, rule.kinds, strict=True) if k is FactorKind.REDUCTION)
        return 2 * results[0].elements * contracted
    if kind == "convolution" and rule is not None:
        kernel = operands[1]
        out_features = _kernel_output_features(rule, kernel)
        return 2 * results[0].elements * kernel.elements // max(1, out_features * dilation)
    return decomposition_flops(kind, operands, results)


def is_sum(rule: Rule) -> bool:
    """Return whether XLA computes a dot by a product and a sum, in place of a matmul.

    It does so where nothing is contracted, and where one side has no dim of its own (a matrix times a vector), in
    batches as well. Dims of size 1 do not count.
    """
    left, right = ({f for dim in dims for f in dim if rule.sizes[f] > 1} for dims in rule.operands[:2])
    contracted = (left & right) - {f for dim in rule.results[0] for f in dim}
    return left <= right or right <= left or not contracted


def _kernel_output_features(rule: Rule, kernel: Tensor) -> int:
    """Size of the kernel dim whose factor also stands in the result (output features)."""
    in_result = {factor for dim in rule.results[0] for factor in dim}
    sizes = [
        size
        for size, factors in zip(kernel.shape, rule.operands[1], strict=True)
        if factors and all(f in in_result for f in factors)
    ]
    return math.prod(sizes)
