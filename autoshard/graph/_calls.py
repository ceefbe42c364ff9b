"""Custom calls whose meaning is known: what their factors are, and how much they compute.

Attention kernels take query [b, k, g, s, d], key [b, k, t, d] and value [b, k, t, e]. Batch, key-value heads and
groups of query heads are independent; a kernel wants sequence and head dims whole. Scores never reach memory.
"""

import math
import re
from collections.abc import Mapping, Sequence

from autoshard.graph._records import FactorKind, Rule, Tensor


ATTENTION = "attention"
ATTENTION_BACKWARD = "attention_backward"
ATTENTION_FUSED = "attention_backward_fused"
"""Kinds that these calls have as ops of a graph."""

_TARGETS = {
    "autoshard_attention": ATTENTION,
    "autoshard_attention_backward": ATTENTION_BACKWARD,
    "autoshard_attention_backward_fused": ATTENTION_FUSED,
}

MATMULS: Mapping[str, int] = {ATTENTION: 2, ATTENTION_BACKWARD: 7, ATTENTION_FUSED: 5}
"""Matmuls over the scores: q k and p v; backward one kernel for dk and dv and one for dq, each of which computes the
scores and dp again (jax's splash attention, as MaxText sets it), or one for all, which computes them once."""

_QUERY, _KEY, _VALUE, _MIXED, _ROWS = (0, 1, 2, 3, 5), (0, 1, 4, 5), (0, 1, 4, 6), (0, 1, 2, 3, 6), (0, 1, 2, 3)
"""Factors of each tensor's dims, in the order b, k, g, s, t, d, e."""


def known_call(
    target: str, attributes: str, operands: Sequence[Tensor], results: Sequence[Tensor]
) -> tuple[str, Rule, int, int] | None:
    """Kind, rule, FLOPs and steps of its grid of a custom call by its target; None for a call that is not known."""
    kind = _TARGETS.get(target)
    if kind is None:
        return None
    backward = kind != ATTENTION
    ins = (_QUERY, _KEY, _VALUE, *((_MIXED, _ROWS, _MIXED) if backward else ()))
    outs = (_QUERY, _KEY, _VALUE) if backward else (_MIXED, _ROWS)
    sizes = (*operands[0].shape[:4], operands[1].shape[2], operands[0].shape[4], operands[2].shape[3])
    kinds = (FactorKind.PARALLEL,) * 3 + (FactorKind.NEED_REPLICATION,) * 4
    rule = Rule(sizes, kinds, *(tuple(tuple((f,) for f in dims) for dims in side) for side in (ins, outs)))
    share, steps = (
        float(match[1]) if (match := re.search(rf"{name}\s*=\s*([0-9.eE+-]+)", attributes)) else without
        for name, without in (("seen_share", 1.0), ("grid_steps", 0.0))
    )
    flops = MATMULS[kind] * (sizes[5] + sizes[6]) * math.prod(sizes[:5]) * share
    return kind, rule, int(flops), int(steps) * math.prod(sizes[:3])
