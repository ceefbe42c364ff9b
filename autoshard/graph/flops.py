"""FLOPs of matrix-unit ops, of factorisations, and of custom calls whose meaning is known."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from autoshard.graph.records import FactorKind, Rule, Tensor


ATTENTION = "attention"
"""Kinds of ops that compute attention: forward, backward in two kernels, backward in one kernel."""
ATTENTION_BACKWARD = "attention_backward"
ATTENTION_FUSED = "attention_backward_fused"
GROUPED = "grouped_matmul"
"""Kinds of ops that multiply groups of rows by one matrix for each group, and of their weight gradient."""
GROUPED_GRADIENT = "grouped_matmul_gradient"
CUDNN = "cudnn_attention"
"""Prefix of the names of calls that cuDNN's attention computes (`program/kernels/cudnn_attention.py`)."""
RING = "ring_attention"
"""Prefix of the names of calls that send keys and values around a ring of devices (`ring_attention.py`)."""
RAGGED = "ragged_exchange"
"""Prefix of the names of calls that send rows to their experts' devices (`ragged_exchange.py`). The name ends with the
share of rows that are real.
"""
RING_ATTENTION, RING_BACKWARD, RING_FUSED = RING, f"{RING}_backward", f"{RING}_backward_fused"
"""Op kinds of the ring calls in a graph."""

_TARGETS = {
    "autoshard_attention": ATTENTION,
    "autoshard_attention_backward": ATTENTION_BACKWARD,
    "autoshard_attention_backward_fused": ATTENTION_FUSED,
    "autoshard_grouped": GROUPED,
    "autoshard_grouped_gradient": GROUPED_GRADIENT,
    "autoshard_ring_attention": RING_ATTENTION,
    "autoshard_ring_attention_backward": RING_BACKWARD,
    "autoshard_ring_attention_backward_fused": RING_FUSED,
}
"""Op kind by target of a known call."""

MATMULS: Mapping[str, int] = {
    **{ATTENTION: 2, ATTENTION_BACKWARD: 7, ATTENTION_FUSED: 5},
    **{RING_ATTENTION: 2, RING_BACKWARD: 7, RING_FUSED: 5},
}
"""Number of matmuls over the scores in each attention kernel.

Forward there are two: q k and p v. Separate backward kernels for dk and dv and for dq both recompute the scores and dp:
seven matmuls in total. MaxText configures jax's splash attention like this. A fused backward kernel computes them once:
five matmuls in total.
"""

_QUERY, _KEY, _VALUE, _MIXED, _ROWS = (0, 1, 2, 3, 5), (0, 1, 4, 5), (0, 1, 4, 6), (0, 1, 2, 3, 6), (0, 1, 2, 3)
"""Factors of each tensor's dims, where factors 0 to 6 are b, k, g, s, t, d, e."""
_SEQUENCE = 3
"""Factor of the queries' sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class KnownCall:
    """Rule and work of one known call, over all devices."""

    kind: str
    """Op kind, such as `attention`."""
    rule: Rule
    """Sharding rule of the call."""
    flops: int
    """FLOPs over all devices, a multiply-add counted as two."""
    steps: int
    """Steps of the kernel's grid that compute something."""
    traffic: int = 0
    """Bytes that the call reads and writes; 0 means each operand and result once."""
    triangular: tuple[tuple[int, int], ...] = ()
    """The (factor, blocks) pairs along which the work rises evenly from almost zero."""


def known_call(
    target: str, figures: Mapping[str, float], operands: Sequence[Tensor], results: Sequence[Tensor]
) -> KnownCall | None:
    """Return rule and work of a custom call by its target; None for an unknown target.

    `figures` are the call's own numbers: the share of scores that a mask leaves, steps of the grid, and blocks along
    which work rises. Grouped matmuls have theirs (`_grouped`). Missing figures count as unmasked, or 0.
    """
    kind = _TARGETS.get(target)
    if kind is None:
        return None
    if kind in (GROUPED, GROUPED_GRADIENT):
        return _grouped(kind, figures, operands, results)
    backward, ring = kind not in (ATTENTION, RING_ATTENTION), kind.startswith(RING)
    key, value = ((0, 1, 3, 5), (0, 1, 3, 6)) if ring else (_KEY, _VALUE)
    ins = (_QUERY, key, value, *((_MIXED, _ROWS, _MIXED) if backward else ()))
    outs = (_QUERY, key, value) if backward else (_MIXED, _ROWS)
    query, lead = operands[0].shape, len(operands[0].shape) - len(_QUERY)
    sizes = (*query[-5:-1], operands[1].shape[-2], query[-1], operands[2].shape[-1])
    # If the queries' sequence is split, the keys' gradients are sums over its shards. In a ring each device keeps the
    # gradients of its own keys.
    along = FactorKind.REDUCTION if backward and not ring else FactorKind.PARALLEL
    kinds = (*(FactorKind.PARALLEL,) * 3, along, *(FactorKind.NEED_REPLICATION,) * 3)
    rule = _rule(query[:lead], sizes, kinds, (ins, outs))
    share, steps = figures.get("seen_share", 1.0), figures.get("grid_steps", 0.0)
    whole = math.prod(query[:lead])
    flops = MATMULS[kind] * (sizes[5] + sizes[6]) * whole * math.prod(sizes[:5]) * share
    sloping = int(figures.get("sloping_blocks", 0.0))
    slope = ((lead + _SEQUENCE, sloping),) if sloping else ()
    return KnownCall(kind, rule, int(flops), int(steps) * whole * math.prod(sizes[:3]), triangular=slope)


def _rule(
    lead: Sequence[int], sizes: Sequence[int], kinds: Sequence[FactorKind], sides: Sequence[Sequence[Sequence[int]]]
) -> Rule:
    """Build a rule for a call whose tensors all begin with the dims `lead`.

    - `lead`: sizes of the shared leading dims, one parallel factor each.
    - `sizes`, `kinds`: the other factors.
    - `sides`: for operands and for results, the factors of each tensor's remaining dims, counted after those of `lead`.
    """
    first = range(len(lead))
    mappings = (
        tuple(tuple((f,) for f in (*first, *(len(lead) + own for own in dims))) for dims in side) for side in sides
    )
    return Rule((*lead, *sizes), (*(FactorKind.PARALLEL,) * len(lead), *kinds), *mappings)


_BATCH, _GROUP, _COUNT, _DEEP, _WIDE = range(5)
"""Factors of a grouped matmul: sequences, groups, rows of one group, contracted dim, columns."""


def _grouped(
    kind: str, figures: Mapping[str, float], operands: Sequence[Tensor], results: Sequence[Tensor]
) -> KnownCall:
    """Return rule and work of a grouped matmul or of its weight gradient (`kind`).

    Rows of one group stay on one device. The weight gradient sums over sequences. `figures` may have `turned` (1 for
    matrices `[groups, columns, contracted]`), `computed` (share of the products), `steps` and `traffic` (bytes), for
    one leading index.
    """
    rows, made = (_BATCH, _GROUP, _COUNT, _DEEP), (_BATCH, _GROUP, _COUNT, _WIDE)
    shape = operands[0].shape
    lead = shape[: len(shape) - len(rows)]
    whole, summed = FactorKind.NEED_REPLICATION, FactorKind.REDUCTION
    if kind == GROUPED:
        turned = figures.get("turned", 0.0) > 0
        matrix = (_GROUP, _WIDE, _DEEP) if turned else (_GROUP, _DEEP, _WIDE)
        sizes = (*shape[-4:], results[0].shape[-1])
        kinds = (FactorKind.PARALLEL, FactorKind.PARALLEL, whole, summed, FactorKind.PARALLEL)
        sides = (rows, matrix), (made,)
    else:
        sizes = (*shape[-4:], operands[1].shape[-1])
        kinds = (summed, FactorKind.PARALLEL, whole, FactorKind.PARALLEL, FactorKind.PARALLEL)
        sides = (rows, made), ((_GROUP, _DEEP, _WIDE),)
    rule, whole = _rule(lead, sizes, kinds, sides), math.prod(lead)
    flops = 2.0 * whole * math.prod(sizes) * figures.get("computed", 1.0)
    steps, traffic = (whole * figures.get(name, 0.0) for name in ("steps", "traffic"))
    return KnownCall(kind, rule, int(flops), int(steps), int(traffic))


def op_flops(
    kind: str, rule: Rule | None, operands: Sequence[Tensor], results: Sequence[Tensor], dilation: int = 1
) -> int:
    """Return an op's FLOPs over all devices, a multiply-add counted as two; 0 for ops that only the vector unit runs.

    Dots, convolutions and decompositions have FLOPs; a dot or convolution without `rule` has none. In a convolution one
    input element in `dilation` is real, and the others are inserted zeros (the gradient of a strided convolution).
    Products with these zeros do not count.
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
    """Return True if XLA computes a dot as a product and a sum instead of a matmul.

    XLA does so if nothing is contracted, or if one side has no dim of its own (a matrix times a vector). The rule holds
    with batch dims as well. Dims of size 1 do not count.
    """
    left, right = ({f for dim in dims for f in dim if rule.sizes[f] > 1} for dims in rule.operands[:2])
    contracted = (left & right) - {f for dim in rule.results[0] for f in dim}
    return left <= right or right <= left or not contracted


def _kernel_output_features(rule: Rule, kernel: Tensor) -> int:
    """Return the number of output features: the product of the kernel's dims whose factors are all in the
    result too.
    """
    in_result = {factor for dim in rule.results[0] for factor in dim}
    sizes = [
        size
        for size, factors in zip(kernel.shape, rule.operands[1], strict=True)
        if factors and all(f in in_result for f in factors)
    ]
    return math.prod(sizes)


Count = Callable[[int, int], float]
"""FLOPs as a function of m rows and n columns."""


def _qr(m: int, n: int) -> float:
    """Return the FLOPs of a Householder QR of an m x n matrix."""
    small = min(m, n)
    return 2 * max(m, n) * small**2 - 2 * small**3 / 3


_CALLS: tuple[tuple[tuple[str, ...], Count], ...] = (
    (("geqrf", "geqp3", "Qr"), _qr),
    (("orgqr", "ungqr", "ProductOfElementaryHouseholderReflectors"), _qr),
    (("ormqr", "unmqr"), lambda m, n: 4 * m * n * min(m, n)),
    (("potrf",), lambda m, n: n**3 / 3),
    (("getrf", "LuDecomposition"), lambda m, n: m * n * min(m, n) - min(m, n) ** 3 / 3),
    (("syev", "heev", "Eigh"), lambda m, n: 9 * n**3),
    (("gesdd", "gesvd", "gesvdj", "gesvdp"), lambda m, n: 4 * m * n * min(m, n) + 22 * min(m, n) ** 3),
    (("geev", "gees"), lambda m, n: 25 * n**3),
    (("gehrd",), lambda m, n: 10 * n**3 / 3),
    (("sytrd", "hetrd"), lambda m, n: 4 * n**3 / 3),
)
"""The (parts of target names, FLOPs for one m x n matrix) pairs; the leading terms of the usual operation counts."""
SMALL = ("pivots_to_permutation", "gtsv", "threefry")
"""Parts of target names of calls whose FLOPs do not count, since reading and writing their operands bounds them."""


def call_flops(target: str, operands: Sequence[Tensor]) -> int:
    """Return the FLOPs of a custom call of linear algebra on a batch of matrices, its first operand; 0 for any other
    call. The second operand of a triangular solve has the right-hand sides.
    """
    if "trsm" in target and len(operands) > 1:
        return _solve(*operands[:2])
    for parts, count in _CALLS:
        if any(part in target for part in parts) and operands and len(operands[0].shape) >= 2:
            return _of(operands[0].shape, count)
    return 0


def decomposition_flops(kind: str, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Return the FLOPs of StableHLO's `cholesky` and `triangular_solve`, batch included; 0 for any other op."""
    if kind == "cholesky":
        return _of(operands[0].shape, lambda m, n: n**3 / 3)
    if kind == "triangular_solve":
        return _solve(operands[0], results[0])
    return 0


def _solve(triangle: Tensor, sides: Tensor) -> int:
    """Return the FLOPs of a triangular solve: one row of `triangle` for each element of the right-hand sides."""
    return sides.elements * triangle.shape[-1]


def _of(shape: Sequence[int], count: Count) -> int:
    """Return the FLOPs of one matrix, the last two dims of `shape`, times the number of matrices."""
    return int(math.prod(shape[:-2]) * count(shape[-2], shape[-1]))
