"""Custom calls whose meaning is known: what their factors are, and how much they compute.

Kernels for rows in groups take rows [b, e, c, k] and matrices [e, k, n], or the transposes of these, and make
[b, e, c, n]; or they take rows and the gradients of what was made, and make those of the matrices. Attention kernels
take query [b, k, g, s, d], key [b, k, t, d] and value [b, k, t, e]. Batch, key-value heads and groups of query heads
are independent, and queries share nothing but keys; a kernel wants keys and head dims whole. In a ring queries and keys
share their sequence. Scores never reach memory. All of them may have further dims in front (the stages of a pipeline),
which are independent too.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from autoshard.graph._records import FactorKind, Rule, Tensor


ATTENTION = "attention"
ATTENTION_BACKWARD = "attention_backward"
ATTENTION_FUSED = "attention_backward_fused"
GROUPED = "grouped_matmul"
GROUPED_GRADIENT = "grouped_matmul_gradient"
CUDNN = "cudnn_attention"
"""Beginning of the names of calls that cuDNN's attention computes (`program/_cudnn_attention.py`)."""
RING = "ring_attention"
"""Beginning of the names of calls that send keys and values around a ring of devices (`program/_ring.py`)."""
RAGGED = "ragged_exchange"
"""Beginning of the names of calls that send rows to the devices of their experts (`program/_ragged_exchange.py`); the
share of the rows that is real ends them."""
RING_ATTENTION, RING_BACKWARD, RING_FUSED = RING, f"{RING}_backward", f"{RING}_backward_fused"
"""Kinds that these calls have as ops of a graph."""

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

MATMULS: Mapping[str, int] = {
    **{ATTENTION: 2, ATTENTION_BACKWARD: 7, ATTENTION_FUSED: 5},
    **{RING_ATTENTION: 2, RING_BACKWARD: 7, RING_FUSED: 5},
}
"""Matmuls over the scores: q k and p v; backward one kernel for dk and dv and one for dq, each of which computes the
scores and dp again (jax's splash attention, as MaxText sets it), or one for all, which computes them once."""

_QUERY, _KEY, _VALUE, _MIXED, _ROWS = (0, 1, 2, 3, 5), (0, 1, 4, 5), (0, 1, 4, 6), (0, 1, 2, 3, 6), (0, 1, 2, 3)
"""Factors of each tensor's dims, in the order b, k, g, s, t, d, e."""
_SEQUENCE = 3
"""The factor of the queries' sequence."""


@dataclasses.dataclass(frozen=True, slots=True)
class KnownCall:
    """What is known of one call, over all devices."""

    kind: str
    rule: Rule
    flops: int
    steps: int
    """Steps of its grid that compute something."""
    traffic: int = 0
    """Bytes that it reads and writes; 0: each operand and result once."""
    sloping: tuple[tuple[int, int], ...] = ()
    """The (factor, blocks) along which the work grows evenly from next to none."""


def known_call(target: str, attributes: str, operands: Sequence[Tensor], results: Sequence[Tensor]) -> KnownCall | None:
    """A custom call by its target; None for one that is not known."""
    kind = _TARGETS.get(target)
    if kind is None:
        return None
    if kind in (GROUPED, GROUPED_GRADIENT):
        return _grouped(kind, attributes, operands, results)
    backward, ring = kind not in (ATTENTION, RING_ATTENTION), kind.startswith(RING)
    key, value = ((0, 1, 3, 5), (0, 1, 3, 6)) if ring else (_KEY, _VALUE)
    ins = (_QUERY, key, value, *((_MIXED, _ROWS, _MIXED) if backward else ()))
    outs = (_QUERY, key, value) if backward else (_MIXED, _ROWS)
    query, lead = operands[0].shape, len(operands[0].shape) - len(_QUERY)
    sizes = (*query[-5:-1], operands[1].shape[-2], query[-1], operands[2].shape[-1])
    # In parts of the queries' sequence the gradients of keys are sums, but in a ring, where these keep their place.
    along = FactorKind.REDUCTION if backward and not ring else FactorKind.PARALLEL
    kinds = (*(FactorKind.PARALLEL,) * 3, along, *(FactorKind.NEED_REPLICATION,) * 3)
    rule = _rule(query[:lead], sizes, kinds, (ins, outs))
    share, steps = _told(attributes, "seen_share", 1.0), _told(attributes, "grid_steps", 0.0)
    whole = math.prod(query[:lead])
    flops = MATMULS[kind] * (sizes[5] + sizes[6]) * whole * math.prod(sizes[:5]) * share
    sloping = int(_told(attributes, "sloping_blocks", 0.0))
    slope = ((lead + _SEQUENCE, sloping),) if sloping else ()
    return KnownCall(kind, rule, int(flops), int(steps) * whole * math.prod(sizes[:3]), sloping=slope)


def _rule(
    lead: Sequence[int], sizes: Sequence[int], kinds: Sequence[FactorKind], sides: Sequence[Sequence[Sequence[int]]]
) -> Rule:
    """The rule of a call whose tensors all have the dims `lead` in front of those that `sides` gives the factors of."""
    first = range(len(lead))
    found = (
        tuple(tuple((f,) for f in (*first, *(len(lead) + own for own in dims))) for dims in side) for side in sides
    )
    return Rule((*lead, *sizes), (*(FactorKind.PARALLEL,) * len(lead), *kinds), *found)


def _told(attributes: str, name: str, without: float) -> float:
    found = re.search(rf"\b{name}\s*=\s*([0-9.eE+-]+)", attributes)
    return float(found[1]) if found else without


_BATCH, _GROUP, _COUNT, _DEEP, _WIDE = range(5)
"""Factors of a kernel for rows in groups: sequences, groups, rows of one, what is contracted, columns."""


def _grouped(kind: str, attributes: str, operands: Sequence[Tensor], results: Sequence[Tensor]) -> KnownCall:
    """Rows of one group stay together. A gradient of matrices is a sum over sequences."""
    rows, made = (_BATCH, _GROUP, _COUNT, _DEEP), (_BATCH, _GROUP, _COUNT, _WIDE)
    shape = operands[0].shape
    lead = shape[: len(shape) - len(rows)]
    whole, summed = FactorKind.NEED_REPLICATION, FactorKind.REDUCTION
    if kind == GROUPED:
        turned = _told(attributes, "turned", 0.0) > 0
        matrix = (_GROUP, _WIDE, _DEEP) if turned else (_GROUP, _DEEP, _WIDE)
        sizes = (*shape[-4:], results[0].shape[-1])
        kinds = (FactorKind.PARALLEL, FactorKind.PARALLEL, whole, summed, FactorKind.PARALLEL)
        sides = (rows, matrix), (made,)
    else:
        sizes = (*shape[-4:], operands[1].shape[-1])
        kinds = (summed, FactorKind.PARALLEL, whole, FactorKind.PARALLEL, FactorKind.PARALLEL)
        sides = (rows, made), ((_GROUP, _DEEP, _WIDE),)
    rule, whole = _rule(lead, sizes, kinds, sides), math.prod(lead)
    flops = 2.0 * whole * math.prod(sizes) * _told(attributes, "computed", 1.0)
    steps, traffic = (whole * _told(attributes, name, 0.0) for name in ("steps", "traffic"))
    return KnownCall(kind, rule, int(flops), int(steps), int(traffic))
