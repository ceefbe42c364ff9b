"""Attention that one op computes: its factors, its values, and the rules of cuDNN's calls."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard.base.call_rules import CallRule, bind, parse_call_rule
from autoshard.errors import UserError
from autoshard.graph.flops import ATTENTION, MATMULS, RING, RING_ATTENTION
from autoshard.graph.records import FactorKind, Op, OpGraph, Tensor


_FORWARD = re.compile(rf"_fwd|^_flash_attention_kernel|^{RING}_(causal|full)$")
"""Names of kernels that compute the forward pass."""
_PASSED = frozenset(
    {
        "add", "broadcast_in_dim", "concatenate", "convert", "divide", "multiply", "negate", "pad", "reshape", "rotate",
        "select", "slice", "subtract", "transpose",
    }
)  # fmt: skip
"""Ops that may stand between a projection and its attention: layouts, rotary embedding, norms' scales."""


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """One op that computes attention, forward or backward."""

    op: int
    """Id of the op."""
    forward: bool
    """True for a forward pass, False for a backward pass."""
    ring: bool
    """True if the keys and values pass around a ring of devices."""
    queries: frozenset[int]
    """Factors of the op along the queries' sequence."""
    keys: frozenset[int]
    """Factors along the sequence of keys and values; in a ring they equal those of the queries."""
    leading: frozenset[int]
    """Factors of the queries' dims before sequence and channels: batch, heads and groups of heads."""
    heads: tuple[int, int]
    """Heads of keys and values, and query heads that share one of them (1 if the kernel has no separate dim for
    these).
    """
    of_heads: int
    """Factor of the heads of keys and values."""
    of_sequence: int
    """Factor of the queries' sequence that may be split; in kernels with blocks, the factor of the blocks."""
    splits: bool
    """True if a device may compute a part of the queries. Splash attention's kernel for the keys' gradients needs all
    queries, since it looks them up in a table.
    """
    operand: int
    """Tensor of the op's queries."""
    values: Mapping[int, int]
    """Maps tensors between the projections and the op, and between the op and the next projection, to their sequence
    dim.
    """
    of_queries: frozenset[int]
    """Members of `values` that have the queries' sequence and heads; tables of positions are too small to count."""

    @property
    def sequence(self) -> frozenset[int]:
        """Factors along either sequence."""
        return self.queries | self.keys


def find_attentions(graph: OpGraph) -> tuple[Attention, ...]:
    """Return the attention record of every op of a graph that is an attention kernel, in program order."""
    return tuple(attention for op in graph.ops if (attention := _attention(graph, op)) is not None)


def _attention(graph: OpGraph, op: Op) -> Attention | None:
    """Return the attention record of an op; None if it is no attention kernel with a rule.

    It must have at least three float operands of three or more dims. The first two are queries and keys, with dims
    `[..., heads, sequence, channels]`.
    """
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
            connected = _between(graph, tensor, along[0])
            values |= connected
            if splits and queries & set(dims[along[0]]):
                # Half of the queries' elements: excludes tables of positions, which have no heads.
                of_queries |= {t for t in connected if 2 * graph.tensors[t].elements >= record.elements}
    target = op.opaque.target if op.opaque is not None else ""
    forward = op.kind in (ATTENTION, RING_ATTENTION) or bool(_FORWARD.search(target))
    ring = target.startswith(RING) or op.kind.startswith(RING)
    return Attention(
        op.id, forward, ring, queries, keys, leading, heads, of_heads, of_sequence, splits,  # type: ignore[arg-type]
        op.operands[query], values, frozenset(of_queries),
    )  # fmt: skip


def _is_float(tensor: Tensor) -> bool:
    """Return True for a floating-point tensor with more than two dims."""
    return len(tensor.shape) > 2 and tensor.dtype.startswith(("float", "bfloat"))


def _between(graph: OpGraph, tensor: int, dim: int) -> dict[int, int]:
    """Map a tensor, and all tensors connected to it through ops of `_PASSED` in either direction, to their sequence
    dim.

    `dim` is the tensor's own; tensors of one element are left out.
    """
    sequence_dims = {tensor: dim}
    waiting = [tensor]
    while waiting:
        at = waiting.pop()
        maker = graph.maker(at)
        for op in (*(() if maker is None else (maker,)), *graph.users[at]):
            for other, where in _along(op, at, sequence_dims[at]):
                if other not in sequence_dims and graph.tensors[other].elements > 1:
                    sequence_dims[other] = where
                    waiting.append(other)
    return sequence_dims


def _along(op: Op, tensor: int, dim: int) -> Iterator[tuple[int, int]]:
    """Yield each other tensor of an op that shares a factor with dim `dim` of `tensor`, with its first such dim.

    Yield nothing unless the op is one of `_PASSED` and has a rule.
    """
    if op.rule is None or op.kind not in _PASSED:
        return
    factors = {f for t, dims in op.sides if t == tensor for f in dims[dim]}
    for other, dims in op.sides:
        along = [d for d, own in enumerate(dims) if factors & set(own)]
        if other != tensor and along:
            yield other, along[0]


_PREFIX, _BACKWARD, _BIAS, _EIGHT_BITS = "__cudnn$fmha", "Backward", "Bias", "F8"


def is_cudnn_attention(target: str) -> bool:
    """Return True if a call's target is one of cuDNN's attention kernels."""
    return target.startswith(_PREFIX)


def cudnn_rule(target: str, config: str, operands: Sequence[Tensor], results: Sequence[Tensor]) -> CallRule | None:
    """Return the sharding rule of a cuDNN attention call; None if its shards would compute something else.

    - `target`: the call's target.
    - `config`: its backend config, JSON text.
    - `operands`, `results`: its tensors.

    The batch `b`, the heads of keys `k` and the query heads for each of these `g` may be split; all other dims stay
    whole. FLOPs are those of two matmuls over the scores forward and of five backward. The scores never reach memory.
    The result is None in these cases:

    - packed sequences, whose offsets count over batch and heads;
    - paged keys and values, which the batch shares;
    - eight-bit floats, whose maxima are results;
    - a call of another form.
    """
    fmha = _read(config)
    heads = _dim_of_heads(fmha)
    packed = int(fmha.get("max_seg_per_batch") or 1) > 1
    if heads is None or packed or fmha.get("is_paged_attention") or _EIGHT_BITS in target:
        return None
    if len(operands) < 3 or any(len(t.shape) != 4 for t in operands[:3]):
        return None

    def laid(head: str, row: str, channel: str) -> str:
        """Return the factors of a tensor's dims in the call's order of heads and sequence."""
        return f"b {head} {row} {channel}" if heads == 1 else f"b {row} {head} {channel}"

    queries, keys, values = laid("(k g)", "s", "h"), laid("k", "t", "h"), laid("k", "t", "v")
    mixed, sums = "b (k g) s v", "b (k g) s"
    takes = [queries, keys, values]
    bias: list[str] = []
    if target.endswith(_BACKWARD):
        takes += [sums, laid("(k g)", "s", "v")]
        if _BIAS in target and len(operands) > 5:
            bias = [_bias(operands[5].shape)]
        takes += [*bias, laid("(k g)", "s", "v")]
        gives = ["b (k g) s h", "b k t h", "b k t v"]
        gives += bias if len(results) == 5 else []
        flops = "6 b k g s t h + 4 b k g s t v"
    else:
        if _BIAS in target and len(operands) > 3:
            bias = [_bias(operands[3].shape)]
        takes += bias
        gives = [mixed, sums] if len(results) == 3 else [mixed]
        flops = "2 b k g s t h + 2 b k g s t v"
    takes += ["b"] * (len(operands) - len(takes))  # lengths of sequences
    gives += ["workspace"] * (len(results) - len(gives))
    text = ", ".join(takes) + " -> " + ", ".join(gives)
    whole = ["s", "t", "h", "v", "workspace"]
    if bias and len(gives) == 5:  # the bias's gradient is summed over what the bias lacks
        whole += [factor for factor in ("b", "k", "g") if factor not in bias[0]]
    shared = operands[0].shape[heads] // max(1, operands[1].shape[heads])
    words = set(text.replace("(", " ").replace(")", " ").replace(",", " ").split())
    rule = parse_call_rule(
        target, text, need_replication=[w for w in whole if w in words], sizes={"g": shared}, flops=flops
    )
    try:
        bind(rule, [t.shape for t in operands], [t.shape for t in results])
    except UserError:
        return None
    return rule


def _read(config: str) -> dict[str, Any]:
    """Parse the cuDNN part of a call's backend config; return an empty dict for any other text."""
    try:
        read = json.loads(config)
    except json.JSONDecodeError:
        return {}
    return read.get("cudnn_fmha_backend_config", {}) if isinstance(read, dict) else {}


def _dim_of_heads(fmha: dict[str, Any]) -> int | None:
    """Return the dim of heads of queries and keys, 1 or 2: the second batch dim of the right operand of the first
    matmul.

    None if the config names no such dims.
    """
    for matmul in ("bmm1", "bmm1_grad_gemm1"):
        dims = fmha.get(f"{matmul}_dot_dimension_numbers", {}).get("rhs_batch_dimensions", ())
        if [str(d) for d in dims] in (["0", "1"], ["0", "2"]):
            return int(dims[1])
    return None


def _bias(shape: Sequence[int]) -> str:
    """Return the factors of a bias `[b n s t]`; a batch or heads of size one become factors of their own, `alike` and
    `common`.
    """
    if len(shape) != 4:
        return "b (k g) s t"
    return " ".join(["b" if shape[0] > 1 else "alike", "(k g)" if shape[1] > 1 else "common", "s", "t"])
