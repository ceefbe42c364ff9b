"""Strategies of heavy ops (matmuls, convolutions, gathers, ragged dots) and the seconds of each."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import LANES, Collectives, Compute
from autoshard.graph import IN, MATMULS, OUT, RAGGED, FactorKind, Op, OpGraph, Rule, is_sum
from autoshard.planning.space.attention_exchange import is_ring, ring_seconds, ring_work
from autoshard.planning.space.decision_model import Residency
from autoshard.planning.space.dim_groups import factor_states
from autoshard.planning.xla.array_layouts import SORTS, Padding, cumulative_copies, relaid_bytes
from autoshard.planning.xla.axis_assignments import (
    PARTIAL,
    WHOLE,
    Seconds,
    States,
    enumerate_states,
    local_elements,
    relabel,
)
from autoshard.planning.xla.partitioner_rules import whole_factors
from autoshard.planning.xla.spatial_splits import Inner, even_halos, extended_elements, near_shifts


FOLDED_OPS = frozenset(
    {"slice", "concatenate", "pad", "reverse", "broadcast_in_dim", "reshape", "dynamic_update_slice", IN, OUT}
)
"""Ops that compilers fold into adjacent fusions, and updates; the fusion's memory traffic covers theirs."""


def heavy_strategies(graph: OpGraph, op: Op, axes: Sequence[int], backend: str) -> States:
    """Return the strategies of an op: the factor that each mesh axis splits, [strategies, axes].

    `axes` has the sizes of the mesh axes. An op without a rule has one strategy, in which everything is whole.
    """
    if op.rule is None:
        return np.full((1, len(axes)), WHOLE, dtype=np.int64)
    even = op.opaque is not None and op.opaque.on_shards
    states = enumerate_states(op.rule.sizes, axes, whole_factors(graph, op, backend), even)
    states = states[even_halos(op, states, axes) & near_shifts(graph, op, states, axes)]
    return states[_in_turn(op.rule, states, axes, is_ragged(op))] if even else states


def _in_turn(rule: Rule, states: States, axes: Sequence[int], apart: bool) -> NDArray[np.bool_]:
    """Return a mask of the states in which axes split the factors of a dim from the major factor on.

    A later factor is split only if the earlier factors have local size 1, and by later axes. With `apart` the earlier
    factors may have any local size, since a device may then own any places of the later factor.
    """
    allowed = np.ones(len(states), dtype=bool)
    for dim in {dim for dims in (*rule.operands, *rule.results) for dim in dims if len(dim) > 1}:
        for before, after in itertools.pairwise(dim):
            sizes = [rule.sizes[before]]
            local = local_elements(np.where(states == before, 0, WHOLE), sizes, axes)
            places = np.arange(len(axes))
            last = np.where(states == before, places, -1).max(axis=1)
            first = np.where(states == after, places, len(axes)).min(axis=1)
            allowed &= ~(states == after).any(axis=1) | (((local == 1) | apart) & (last < first))
    return allowed


def heavy_seconds(
    graph: OpGraph,
    op: Op,
    states: States,
    axes: Sequence[int],
    compute: Compute,
    residency: Residency,
    padding: Padding,
) -> Seconds:
    """Return the roofline seconds of one execution in every state: local matrix work against local memory traffic.

    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    - `compute`: prices of work on a device.
    - `residency`: tensors that stay in on-chip memory.
    - `padding`: padding that tiles add to tensors.
    """
    if op.kind in FOLDED_OPS:
        return np.zeros(len(states))
    operands = [(t, op.rule.operands[k] if op.rule else ()) for k, t in enumerate(op.operands)]
    results = [(t, op.rule.results[k] if op.rule else ()) for k, t in enumerate(op.results)]
    if op.kind == "gather":
        operands = results  # a gather reads the gathered rows, not the whole table
    elif op.kind == "scatter":
        operands = operands[2:] * 2
    size, fused = np.zeros(len(states)), np.zeros(len(states))
    for number, (tensor, dims) in enumerate((*operands, *results)):
        record = graph.tensors[tensor]
        if not record.shape:
            continue
        local, ratio = np.full(len(states), float(record.elements)), 1.0
        if dims:
            dim_states = factor_states(states, dims)
            local, ratio = local_elements(dim_states, record.shape, axes), padding.ratio(tensor, dim_states, axes)
        traffic = local * ratio * record.itemsize
        if number < len(operands):
            size = size + residency.streamed(tensor, traffic)
            fused = fused + residency.fused_operand_bytes(tensor, traffic)
        else:
            size = size + residency.stored_bytes(tensor, traffic)
    if op.kind == "gather" and op.rule is not None:
        size = size + _burst_waste(graph, op, states, axes, compute)
    size = size + relaid_bytes(graph, op, states, axes, compute.topology.backend)
    if op.opaque is not None and op.opaque.traffic and op.rule is not None:
        size = op.opaque.traffic * local_elements(states, op.rule.sizes, axes) / math.prod(op.rule.sizes)
        size = size * _busiest(op, states)
    if op.halos and op.rule is not None:
        # A shard is copied into a buffer with its halos: one read and one write.
        first = graph.tensors[op.operands[0]]
        size = size + 2 * extended_elements(graph, op, states, axes) * first.itemsize
    if is_ragged(op):
        size = size * ragged_passes(op, states, compute.topology.traits.tiled)
    if op.kind in SORTS:
        first = graph.tensors[op.operands[0]]
        local = local_elements(factor_states(states, operands[0][1]), first.shape, axes) if op.rule else first.elements
        return compute.sort_seconds(local, _sorted_length(graph, op), len(op.operands), size)
    if op.kind == "fft" and op.rule is not None and compute.topology.traits.rounds_operands:
        return _fft_seconds(graph, op, states, axes, compute, size)
    if op.flops == 0 or op.rule is None:
        # Each copy of a cumulative op is read and written, and is summed in two steps.
        copies = cumulative_copies(graph, op, compute.topology.backend)
        return compute.op_seconds(np.zeros(len(states)), size * (3 * copies if copies else 1))
    dtype = (op.opaque.dtype if op.opaque else "") or graph.tensors[op.operands[0]].dtype
    # A matrix unit that multiplies in bfloat16 needs several passes for a higher precision.
    further = op.passes - 1 if compute.topology.traits.rounds_operands else 0
    if op.kind == "dot_general":
        m, n, k, batch = _matmul_sizes(op.rule, states, axes)
        if is_sum(op.rule) and not compute.topology.traits.packs_blocks:
            return compute.op_seconds(np.zeros(len(states)), size)
        once = compute.dot_seconds(m, n, k, batch, dtype, size, fused)
        if not further:
            return once
        flops = 2.0 * m * n * k * batch * further
        return once + compute.extra_pass_seconds(flops, dtype, compute.matmul_efficiency(m, n, k, batch))
    size = size + fused
    factors = [max(1, n) for n in op.rule.sizes]  # a call may have empty results
    share = local_elements(states, factors, axes) / math.prod(factors)
    steps = op.steps * share
    for factor, blocks in op.triangular:
        share = share * _most_of_slope(states, factor, axes, blocks)
    if op.kind in MATMULS:
        head, value_head = op.rule.sizes[5:7]
        scores = op.flops / (MATMULS[op.kind] * (head + value_head)) * share
        busy = compute.attention_seconds(scores, head, value_head, MATMULS[op.kind], dtype, size)
        added = ring_seconds(graph, op, states, axes, compute) if is_ring(op) else 0.0
        return busy + compute.step_seconds(steps) + added
    if op.opaque is not None:
        if is_ring(op):
            share, steps = ring_work(graph, op, states, axes)
        share, steps = share * _busiest(op, states), steps * _busiest(op, states)
        if op.opaque.head:
            passes = op.flops / (2.0 * op.opaque.head) * share
            busy = compute.attention_seconds(passes, op.opaque.head, op.opaque.head, 1, dtype, size)
            added = ring_seconds(graph, op, states, axes, compute) if is_ring(op) else 0.0
            return busy + compute.step_seconds(steps) + added
    efficiency = _convolution_efficiency(graph, op, states, axes, compute) if op.kind == "convolution" else None
    busy = compute.op_seconds(op.flops * share, size, dtype, efficiency)
    if further:
        busy = busy + compute.extra_pass_seconds(op.flops * share * further, dtype, efficiency)
    return busy + compute.step_seconds(steps) if op.steps else busy


_DIRECT = 256
"""Longest dim that a TPU transforms by one matrix.

Longer multiples of 128 take two matrices, and other lengths one.
"""
_FLOAT32 = 6
"""Number of bfloat16 products in one float32 product."""


def _fft_seconds(
    graph: OpGraph, op: Op, states: States, axes: Sequence[int], compute: Compute, size: Seconds
) -> Seconds:
    """Return the seconds of an fft on a TPU, which multiplies by matrices, one dim after the other.

    Real and imaginary parts are multiplied separately. A complex product takes three real products, a product with real
    input two. Each stage reads and writes all elements, and two stages have layout changes around them.

    Evidence: docs/compiler_behaviour.md, "FFT as matmuls".

    - `states`: factor that each mesh axis splits, [states, axes].
    - `axes`: sizes of the mesh axes.
    - `size`: bytes of the local operand and result, [states].
    """
    assert op.rule is not None
    sides = ((op.operands[0], op.rule.operands[0]), (op.results[0], op.rule.results[0]))
    record, dims = max(((graph.tensors[t], dims) for t, dims in sides), key=lambda side: side[0].itemsize)
    local = local_elements(factor_states(states, dims), record.shape, axes)
    real = not graph.tensors[op.operands[0]].dtype.startswith("complex")
    kinds = zip(op.rule.sizes, op.rule.kinds, strict=True)
    total = compute.op_seconds(np.zeros(len(states)), 0.0)
    for length in (n for n, kind in kinds if kind is FactorKind.NEED_REPLICATION and n > 1):
        one_matrix = length <= _DIRECT or length % LANES
        if not one_matrix:
            total = total + compute.memory_seconds(2.0 * size)
        for stage in (length,) if one_matrix else (LANES, length // LANES):
            products = 2 if real else 3
            busy = compute.matmul_seconds(local / stage, stage, stage) * (_FLOAT32 * products)
            total = total + np.maximum(busy, compute.memory_seconds(2.0 * local * record.itemsize))
            real = False
    return total


def _most_of_slope(states: States, factor: int, axes: Sequence[int], blocks: int) -> Seconds:
    """Return the work of the busiest shard over the mean, where block k of n along the factor has work k, [states]."""
    parts = np.where(states == factor, np.array(axes), 1).prod(axis=1)
    # The last of p shards has n/p blocks of mean work n - (n/p - 1)/2; the mean over all blocks is (n + 1)/2.
    return (2.0 - 1.0 / parts + 1.0 / blocks) / (1.0 + 1.0 / blocks)


def _busiest(op: Op, states: States) -> Seconds:
    """Return the work of the busiest shard of an opaque call over the mean (`Opaque.imbalance`), [states]."""
    ratio = np.ones(len(states))
    for factor, times in op.opaque.imbalance if op.opaque is not None else ():
        ratio = np.where((states == factor).any(axis=1), ratio * times, ratio)
    return ratio


def _burst_waste(graph: OpGraph, op: Op, states: States, axes: Sequence[int], compute: Compute) -> Seconds:
    """Return the bytes that a gather reads in excess, since every slice is read in whole memory bursts, [states]."""
    assert op.rule is not None
    record = graph.tensors[op.results[0]]
    itemsize = record.itemsize
    copied_factors = {f for dim in op.rule.operands[0] for f in dim} & {f for dim in op.rule.results[0] for f in dim}
    sizes = [size if f in copied_factors else 1 for f, size in enumerate(op.rule.sizes)]
    slice_bytes = local_elements(np.where(np.isin(states, list(copied_factors)), states, WHOLE), sizes, axes) * itemsize
    local = local_elements(factor_states(states, op.rule.results[0]), record.shape, axes) * itemsize
    burst = compute.burst_bytes
    return local * (np.ceil(slice_bytes / burst) * burst / np.maximum(slice_bytes, 1.0) - 1.0)


def _sorted_length(graph: OpGraph, op: Op) -> int:
    """Return the size of the sorted dim: the dim that needs replication, else the last."""
    whole = (
        []
        if op.rule is None
        else [
            size for size, kind in zip(op.rule.sizes, op.rule.kinds, strict=True) if kind is FactorKind.NEED_REPLICATION
        ]
    )
    return max(whole, default=graph.tensors[op.operands[0]].shape[-1])


def _convolution_efficiency(
    graph: OpGraph, op: Op, states: States, axes: Sequence[int], compute: Compute
) -> Seconds | None:
    """Return the share of the matrix unit's peak that a local convolution reaches, computed as one matmul, [states].

    Each window is a row of the matmul's left side. The window's elements are contracted together with the features; in
    the gradient of a kernel they are its results. None for grouped convolutions, which have no such form.
    """
    assert op.rule is not None
    m, n, k, batch = _matmul_sizes(op.rule, states, axes)
    if (batch > 1).any():
        return None
    left, right = ({f for dim in dims for f in dim} for dims in op.rule.operands[:2])
    out = {f for dim in op.rule.results[0] for f in dim}
    window, results, apart = (
        math.prod(op.rule.sizes[f] for f in group)
        for group in (right - left - out, out - left - right, left - right - out)
    )
    return compute.matmul_efficiency(m * results / apart, n / window, k * window)


def _matmul_sizes(rule: Rule, states: States, axes: Sequence[int]) -> tuple[Seconds, ...]:
    """Return the local m, n, k and batch of a dot, each [states]."""
    left, right = ({f for dim in dims for f in dim} for dims in rule.operands[:2])
    out = {f for dim in rule.results[0] for f in dim}
    groups = (left - right, right - left, (left & right) - out, left & right & out)
    sizes = []
    for group in groups:
        masked = [size if f in group else 1 for f, size in enumerate(rule.sizes)]
        mapping = [f if f in group else WHOLE for f in range(len(rule.sizes))]
        sizes.append(local_elements(relabel(states, mapping), masked, axes))
    return tuple(sizes)


def result_states(op: Op, states: States, result: int) -> States:
    """Convert an op's strategies to the states of one result before any reduction: over its dims, with partial sums."""
    if op.rule is None:
        return np.full_like(states, WHOLE)
    # A manual region (`mlir.insert_regions`) does all reductions of an op together.
    label = [PARTIAL if op.halos or op.grouped else PARTIAL - f for f in range(len(op.rule.kinds))]
    mapping = [label[f] if kind is FactorKind.REDUCTION else WHOLE for f, kind in enumerate(op.rule.kinds)]
    for dim, factors in enumerate(op.rule.results[result]):
        for factor in factors:
            mapping[factor] = dim
    return relabel(states, mapping)


_EXCHANGED = 1
"""Factor that is sequences on one side and groups on the other (`program/kernels/ragged_exchange.py`)."""


_PASSES = 2.5
"""Passes of a ragged exchange over its operand and result on backends with tiled arrays.

The TPU compiler's schedule copies both to and from a layout of whole rows, and first fills the result with zeros.
"""


def is_ragged(op: Op) -> bool:
    """Return True if an op exchanges rows of sequences for rows of groups."""
    return op.opaque is not None and op.opaque.on_shards and op.opaque.target.startswith(RAGGED)


def ragged_passes(op: Op, states: States, tiled: bool) -> Seconds:
    """Return the number of passes of a ragged exchange over its operand and result, [states]."""
    exchanges = (states == _EXCHANGED).any(axis=1)
    return np.where(exchanges & tiled, _PASSES, 1.0)


def ragged_exchanges(
    graph: OpGraph, op: Op, states: States, axes: Sequence[int], collectives: Collectives
) -> list[Inner]:
    """Return the all-to-all of a ragged exchange for every state; its duration is that of the busiest device's rows.

    Devices that are threads of one machine have no ragged collective and send padded rows.
    """
    assert op.rule is not None and op.opaque is not None
    rows = graph.tensors[op.operands[0]]
    size = local_elements(factor_states(states, op.rule.operands[0]), rows.shape, axes) * rows.itemsize
    if not collectives.mesh.topology.traits.shares_machine:
        size = size * min(1.0, op.opaque.sent_share * dict(op.opaque.imbalance).get(_EXCHANGED, 1.0))
    on_axes = states == _EXCHANGED
    exchanges = []
    for axis_mask in np.unique(on_axes, axis=0):
        group = tuple(np.flatnonzero(axis_mask).tolist())
        if math.prod(axes[a] for a in group) > 1:
            exchanges.append(Inner("all-to-all", group, np.where((on_axes == axis_mask).all(axis=1), size, 0.0)))
    return exchanges
