"""Share of an op's FLOPs that the model needs: attention without masked scores and without recomputed ones.

Attention needs 4 b h s t d FLOPs forward and twice as many backward. It has b sequences, h heads, s queries, t keys
and the head size d. A causal mask halves them. Kernels compute more: their backward pass computes the scores again,
and their blocks at the mask's edge are whole. Matmuls of a softmax in memory multiply masked scores too.
"""

import math
from collections import defaultdict

from autoshard.graph.extraction.attention_ops import is_cudnn_attention
from autoshard.graph.extraction.attention_scores import (
    Scores,
    attention_kernel,
    attention_scores,
    is_summed,
    scores_of,
    sorted_sizes,
)
from autoshard.graph.flops import (
    ATTENTION,
    ATTENTION_BACKWARD,
    ATTENTION_FUSED,
    MATMULS,
    RING_ATTENTION,
    RING_BACKWARD,
    RING_FUSED,
)
from autoshard.graph.records import Op, OpClass, OpGraph, is_batched


_NEEDED = {
    **dict.fromkeys((ATTENTION, RING_ATTENTION), 2),
    **dict.fromkeys((ATTENTION_BACKWARD, ATTENTION_FUSED, RING_BACKWARD, RING_FUSED), 4),
}
"""Matmuls that the model needs of those in `MATMULS`."""


def model_shares(graph: OpGraph) -> dict[int, float]:
    """Return the share of their FLOPs that the model needs, by id, of ops that need less than all.

    Causal masks and windows count if the program makes them of positions (`Op.kept_share`), and causal masks of jax's
    kernels if they skip blocks. All other scores count whole.
    """
    shares = {op.id: share for op in graph.ops if (share := _share_of_call(graph, op)) < 1.0}
    masked: dict[tuple[str, tuple[int, ...]], set[float]] = defaultdict(set)
    for op in graph.ops:
        scores = scores_of(graph, op) if op.kind == "exponential" and is_summed(graph, op) else None
        if scores is not None:
            shape, kept = sorted_sizes(scores.shape), _kept_share(graph, op)
            for line in {graph.ops[scores.producer].line, *_lines_of_users(graph, op)}:
                masked[line, shape].add(kept)
    # Backward matmuls have the lines of the forward ones. Attentions that differ at one line count whole.
    kept_at = {place: kept.pop() for place, kept in masked.items() if len(kept) == 1}
    for op in graph.ops:
        if is_batched(op):
            sides = (graph.tensors[tensor] for tensor in (*op.operands, *op.results))
            kept = min((kept_at.get((op.line, sorted_sizes(side.shape)), 1.0) for side in sides), default=1.0)
            if kept < 1.0:
                shares[op.id] = kept
    return shares


def _kept_share(graph: OpGraph, exponential: Op) -> float:
    """Return the share of scores that masks of positions keep between their matmul and an exponential."""
    kept, waiting, seen = 1.0, list(exponential.operands), set[int]()
    elements = graph.tensors[exponential.results[0]].elements
    while waiting:
        tensor = waiting.pop()
        op = graph.maker(tensor)
        if op is None or tensor in seen or graph.tensors[tensor].elements != elements or op.op_class is OpClass.HEAVY:
            continue
        seen.add(tensor)
        kept = min(kept, op.kept_share)
        waiting += op.operands
    return kept


def _lines_of_users(graph: OpGraph, exponential: Op) -> set[str]:
    """Return the lines of the batched matmuls that consume an exponential through ops that keep its elements."""
    lines, waiting, seen = set[str](), list(exponential.results), set[int]()
    elements = graph.tensors[exponential.results[0]].elements
    while waiting:
        tensor = waiting.pop()
        if tensor in seen or graph.tensors[tensor].elements != elements:
            continue
        seen.add(tensor)
        for user in graph.users[tensor]:
            if is_batched(user):
                lines.add(user.line)
            elif user.op_class is not OpClass.HEAVY:
                waiting += user.results
    return lines


def _share_of_call(graph: OpGraph, op: Op) -> float:
    """Return the share of a call's FLOPs that the model needs; 1 for ops that are no kernel of attention."""
    if op.kind in MATMULS:
        return _NEEDED[op.kind] / MATMULS[op.kind]
    target = op.opaque.target if op.opaque is not None else ""
    if is_cudnn_attention(target):
        return 4 / 5 if target.endswith("Backward") else 1.0
    kernel = attention_kernel(graph, op)
    if kernel is None or not op.flops:
        return 1.0
    whole = 2 * kernel.queries.elements * kernel.keys.shape[-2]
    seen = computed = op.flops / (whole * kernel.computed)
    scores = attention_scores(graph, op)
    if scores is not None and _is_causal(scores, computed):
        seen = 0.5
    return min(1.0, whole * kernel.needed * seen / op.flops)


def _is_causal(scores: Scores, computed: float) -> bool:
    """Return True if a kernel that computes the share `computed` of the scores skips the blocks that a causal mask
    hides.

    It is False for a mask whose shares are those of no block, and where one block has all scores.
    """
    if scores.queries != scores.keys or computed >= 1.0:
        return False
    sides = [side for side in range(_LANES, scores.queries + 1, _LANES) if scores.block % side == 0]
    for high, wide in ((side, scores.block // side) for side in sides):
        rows, columns = -(-scores.queries // high), -(-scores.keys // wide)
        seen = sum(min(columns, -(-min((row + 1) * high, scores.queries) // wide)) for row in range(rows))
        if math.isclose(seen / (rows * columns), computed, rel_tol=0.005):
            return True
    return False


_LANES = 128
"""Elements of a row of a TPU's register; blocks of scores are multiples of it."""
