"""Attention that one op computes: its factors by what they are, and the values between it and the projections.

What is known of jax's kernels, and of calls of our own, is that queries, keys and values come first, each with its
sequence and the size of a head as its last dims, and that what leads them (batch, heads, groups of heads) is
independent. Scores that a program computes by matmuls of its own are not found.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from autoshard.graph._calls import ATTENTION, MATMULS, RING, RING_ATTENTION
from autoshard.graph._records import FactorKind, Op, OpGraph, Tensor


_FORWARD = re.compile(rf"_fwd|^_flash_attention_kernel|^{RING}_(causal|full)$")
"""Names of kernels that compute the forward pass."""
_PASSED = frozenset(
    {
        "add", "broadcast_in_dim", "concatenate", "convert", "divide", "multiply", "negate", "pad", "reshape", "rotate",
        "select", "slice", "subtract", "transpose",
    }
)  # fmt: skip
"""Ops that stand between a projection and its attention: layouts, rotary embedding, norms' scales."""


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """One op that computes attention, forward or backward."""

    op: int
    forward: bool
    ring: bool
    queries: frozenset[int]
    """Factors of the op along the sequence of queries."""
    keys: frozenset[int]
    """The factors along the sequence of keys and values; in a ring they are those of the queries."""
    leading: frozenset[int]
    """The factors of batch, heads and groups of heads."""
    heads: tuple[int, int]
    """Heads of keys and values, and query heads that share one (1 where the kernel does not keep them apart)."""
    of_heads: int
    """The factor of the heads of keys and values."""
    of_sequence: int
    """The factor of the queries' sequence that may be split: of blocks, where a kernel has some."""
    splits: bool
    """Whether a device may take a part of the queries; splash attention's kernel of the gradients of keys looks its
    queries up in a table, and takes the whole of them."""
    operand: int
    """The tensor of its queries."""
    values: Mapping[int, int]
    """Tensors from the projections to the op, and from it to the next one -> the dim that is their sequence."""
    of_queries: frozenset[int]
    """The members of `values` whose sequence is the queries', with their heads: no tables of positions."""

    @property
    def sequence(self) -> frozenset[int]:
        """Factors along either sequence."""
        return self.queries | self.keys


def find_attentions(graph: OpGraph) -> tuple[Attention, ...]:
    """Every attention of a graph that one op computes, in program order."""
    uses: dict[int, list[int]] = defaultdict(list)
    for op in graph.ops:
        for tensor in op.operands:
            uses[tensor].append(op.id)
    return tuple(found for op in graph.ops if (found := _attention(graph, op, uses)) is not None)


def _attention(graph: OpGraph, op: Op, uses: Mapping[int, list[int]]) -> Attention | None:
    known = op.kind in MATMULS or (op.opaque is not None and (op.opaque.head or op.opaque.target.startswith(RING)))
    if op.rule is None or not known:
        return None
    floats = [k for k, t in enumerate(op.operands) if _is_float(graph.tensors[t])]
    if len(floats) < 3:
        return None
    query, key = floats[:2]
    rank = len(op.rule.operands[query])
    queries, keys = (frozenset(op.rule.operands[k][-2]) for k in (query, key))
    leading = frozenset(f for dims in op.rule.operands[query][:-2] for f in dims)
    shared = len(op.rule.operands[key]) == rank - 1  # [B, K, G, S, D] over [B, K, T, D]
    shape = graph.tensors[op.operands[query]].shape
    heads = shape[-4:-2] if shared and rank > 3 else (graph.tensors[op.operands[key]].shape[-3], 1)
    sequence = queries | keys
    of_heads, of_sequence = op.rule.operands[key][-3][0], op.rule.operands[query][-2][0]
    splits = op.rule.kinds[of_sequence] is not FactorKind.NEED_REPLICATION
    values: dict[int, int] = {}
    of_queries: set[int] = set()
    for tensor, dims in op.sides:
        record = graph.tensors[tensor]
        along = [d for d, factors in enumerate(dims) if sequence & set(factors)]
        if along and _is_float(record):
            found = _between(graph, tensor, along[0], uses)
            values |= found
            if splits and queries & set(dims[along[0]]):
                of_queries |= {t for t in found if 2 * graph.tensors[t].elements >= record.elements}
    target = op.opaque.target if op.opaque is not None else ""
    forward = op.kind in (ATTENTION, RING_ATTENTION) or bool(_FORWARD.search(target))
    ring = target.startswith(RING) or op.kind.startswith(RING)
    return Attention(
        op.id, forward, ring, queries, keys, leading, heads, of_heads, of_sequence, splits,  # type: ignore[arg-type]
        op.operands[query], values, frozenset(of_queries),
    )  # fmt: skip


def _is_float(tensor: Tensor) -> bool:
    return len(tensor.shape) > 2 and tensor.dtype.startswith(("float", "bfloat"))


def _between(graph: OpGraph, tensor: int, dim: int, uses: Mapping[int, list[int]]) -> dict[int, int]:
    """A tensor, and those that lead to it or that it leads to without a matmul between -> the dim of the sequence."""
    found = {tensor: dim}
    waiting = [tensor]
    while waiting:
        at = waiting.pop()
        producer = graph.tensors[at].producer
        for number in ((producer,) if producer >= 0 else ()) + tuple(uses.get(at, ())):
            for other, where in _along(graph.ops[number], at, found[at]):
                if other not in found and graph.tensors[other].elements > 1:
                    found[other] = where
                    waiting.append(other)
    return found


def _along(op: Op, tensor: int, dim: int) -> Iterator[tuple[int, int]]:
    """Other tensors of an op that is passed, and the dim of each that is the dim of `tensor`."""
    if op.rule is None or op.kind not in _PASSED:
        return
    factors = {f for t, dims in op.sides if t == tensor for f in dims[dim]}
    for other, dims in op.sides:
        along = [d for d, own in enumerate(dims) if factors & set(own)]
        if other != tensor and along:
            yield other, along[0]
