"""Sharding rules of custom calls and of the ends of regions that a program splits by hand."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from autoshard import mlir
from autoshard.base.call_rules import bind, registered
from autoshard.graph.extraction.attention_ops import cudnn_rule, is_cudnn_attention
from autoshard.graph.extraction.shardy_rules import sharding_rule
from autoshard.graph.flops import CUDNN, RING, call_flops
from autoshard.graph.records import FactorKind, Opaque, Rule, Tensor


KERNELS = {
    "_flash_attention_kernel": 4,
    "_flash_attention_dkv_kernel": 8,
    "_flash_attention_dq_kernel": 6,
    "splash_mha_fwd": 4,
    "splash_mqa_fwd": 4,
    "splash_mha_dkv": 8,
    "splash_mqa_dkv": 8,
    "splash_mha_dq": 6,
    "splash_mqa_dq": 6,
}
"""FLOPs for each pair of positions and head channel, by name prefix of jax's own TPU attention kernels.

Forward there are two matmuls, for the gradients of keys and values four, for the gradient of queries three.
"""


def read_opaque(op: Any, operands: Sequence[Tensor], results: Sequence[Tensor], where: str) -> Opaque:
    """Return rule and work of a custom call; raises `UserError` if a registered rule does not fit the call.

    The sources of the rule, in order: the user's registered rule, cuDNN's attention, the call's own sharding rule,
    jax's attention kernels. The rule is None if there is none of these. `where` is the call's place in the source, for
    the error; it may be empty.
    """
    target, own = mlir.call_target(op), bool(mlir.call_key(op))
    work = mlir.call_work(op)
    if not own and not work.flops:
        work = dataclasses.replace(work, flops=call_flops(target, operands))
    head = _head(target, operands)
    fixed = mlir.has_fixed_shapes(op)
    given = registered(target)
    if given is None and is_cudnn_attention(target):
        given = cudnn_rule(target, mlir.backend_config(op), operands, results)
    if given is not None:
        shapes = [t.shape for t in operands], [t.shape for t in results]
        bound = bind(given, *shapes, f"of `{target}`" + (f" at {where}" if where else ""))
        kinds = tuple(FactorKind(kind) for kind in bound.kinds)
        rule = Rule(bound.sizes, kinds, bound.operands, bound.results)
        # An all-reduce can be added to a function that runs on shards, but not to a call that receives shards.
        rule = whole_where_untied(rule if own else _without_sums(rule))
        return Opaque(target, rule, bound.flops or work.flops, work.traffic, True, fixed, work.dtype, head)
    stated = sharding_rule(op)
    if stated is not None:
        rule, sloping = whole_where_untied(stated), tuple(work.triangular.items())
        uneven = tuple(work.imbalance.items())
        call = Opaque(target, rule, work.flops, work.traffic, own, fixed, work.dtype, head, sloping, work.steps, uneven)
        return dataclasses.replace(call, sent_share=work.sent_share)
    for beginning, each in KERNELS.items():
        if target.startswith(beginning):
            rule, count = _attention(operands, results, each)
            return Opaque(target, rule, count, 0, True, fixed, head=head)
    return Opaque(target, None, work.flops, work.traffic, own, fixed, work.dtype, head)


def _head(target: str, operands: Sequence[Tensor]) -> int:
    """Return the size of the head dim (the last of the first float operand) of a known attention kernel; 0 for other
    calls.
    """
    floats = float_operands(operands)
    return floats[0].shape[-1] if floats and target.startswith((*KERNELS, RING, CUDNN)) else 0


def float_operands(operands: Sequence[Tensor]) -> list[Tensor]:
    """Return the floating-point operands with more than two dims; queries, keys and values are the first three."""
    return [t for t in operands if len(t.shape) > 2 and t.dtype.startswith(("float", "bfloat"))]


def whole_where_untied(rule: Rule) -> Rule:
    """Return the rule in which parallel factors that appear only in operands, or only in results, need replication.

    An opaque call needs the whole of such operand dims, and computes the whole of such result dims.
    """
    inputs, outputs = ({f for dims in side for dim in dims for f in dim} for side in (rule.operands, rule.results))
    kinds = tuple(
        FactorKind.NEED_REPLICATION if kind is FactorKind.PARALLEL and (f in inputs) != (f in outputs) else kind
        for f, kind in enumerate(rule.kinds)
    )
    return dataclasses.replace(rule, kinds=kinds)


def _without_sums(rule: Rule) -> Rule:
    """Return the rule in which reduction factors need replication."""
    kinds = tuple(FactorKind.NEED_REPLICATION if k is FactorKind.REDUCTION else k for k in rule.kinds)
    return dataclasses.replace(rule, kinds=kinds)


def _attention(operands: Sequence[Tensor], results: Sequence[Tensor], each: int) -> tuple[Rule | None, int]:
    """Return an attention kernel's rule and FLOPs over all devices; (None, 0) with fewer than two float operands.

    `each` is the FLOPs for a pair of positions and head channel. Batch and heads lead the queries' dims, and may be
    split in every tensor that they lead. All other dims stay whole.
    """
    floats = float_operands(operands)
    if len(floats) < 2:
        return None, 0
    queries, keys = floats[:2]
    lead = queries.shape[:-2]
    sizes, kinds = list(lead), [FactorKind.PARALLEL] * len(lead)
    maps = []
    for tensor in (*operands, *results):
        dims = []
        for d, size in enumerate(tensor.shape):
            tied = d < min(len(lead), len(tensor.shape) - 2) and size == lead[d]
            tied = tied and all(dims[i] == (i,) for i in range(d))
            if not tied:
                sizes.append(size)
                kinds.append(FactorKind.NEED_REPLICATION)
            dims.append((d,) if tied else (len(sizes) - 1,))
        maps.append(tuple(dims))
    rule = Rule(tuple(sizes), tuple(kinds), tuple(maps[: len(operands)]), tuple(maps[len(operands) :]))
    return rule, each * queries.elements * keys.shape[-2]


IN, OUT = "shard_map_in", "shard_map_out"
"""Kinds of the ops that stand for the ends of a region: one for every operand, one for every result."""

COLLECTIVES = frozenset(
    {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "collective_broadcast",
    }
)  # fmt: skip
"""Kinds of StableHLO's collectives."""

Fixed = tuple[tuple[int, tuple[str, ...]], ...]
"""The (factor, mesh axes) pairs whose split is given."""


def end_rule(outside: Sequence[int], inside: Sequence[int], sharding: mlir.Sharding, kind: str) -> tuple[Rule, Fixed]:
    """Return the rule of one value at an end of a region, and the (factor, axes) pairs of the dims that the region
    splits.

    - `outside`, `inside`: the value's shapes outside and inside the region.
    - `sharding`: the axes by which the region splits the value.
    - `kind`: `IN` or `OUT`.

    A split dim has one parallel factor outside, and one that needs replication inside. Any other dim has one parallel
    factor on both sides.
    """
    sizes: list[int] = []
    kinds: list[FactorKind] = []
    outer: list[tuple[int, ...]] = []
    inner: list[tuple[int, ...]] = []
    fixed = []
    for large, small, axes in zip(outside, inside, sharding.dims, strict=True):
        outer.append((len(sizes),))
        if axes:
            fixed.append((len(sizes), tuple(axis.name for axis in axes)))
            sizes += [large, small]
            kinds += [FactorKind.PARALLEL, FactorKind.NEED_REPLICATION]
        else:
            sizes.append(large)
            kinds.append(FactorKind.PARALLEL)
        inner.append((len(sizes) - 1,))
    sides = (outer, inner) if kind == IN else (inner, outer)
    return Rule(tuple(sizes), tuple(kinds), (tuple(sides[0]),), (tuple(sides[1]),)), tuple(fixed)


def same_rule(operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> Rule | None:
    """Return the rule of ops whose operands and results have the same dims, such as a constraint or a collective.

    Dim d is factor d in every tensor. A dim whose size differs from the first operand's gets a factor of its own, and
    both stay whole. The result is None if operands and results have different ranks.
    """
    rank = len(operands[0])
    if any(len(shape) != rank for shape in (*operands, *results)):
        return None
    sizes, kinds = list(operands[0]), [FactorKind.PARALLEL] * rank
    sides = []
    for shape in (*operands, *results):
        dims = []
        for dim, size in enumerate(shape):
            if size == operands[0][dim]:
                dims.append((dim,))
                continue
            kinds[dim] = FactorKind.NEED_REPLICATION
            dims.append((len(sizes),))
            sizes.append(size)
            kinds.append(FactorKind.NEED_REPLICATION)
        sides.append(tuple(dims))
    count = len(operands)
    return Rule(tuple(sizes), tuple(kinds), tuple(sides[:count]), tuple(sides[count:]))
