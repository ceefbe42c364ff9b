"""What a ring of keys and values costs: work and steps of its kernels at every turn, and what hides behind them.

With n devices that share the sequence there are n turns. Keys and values of a turn travel while those before them are
computed with, so a permute is waited for only as far as it takes longer than the piece; in the gradient those of keys
and values, in fp32, travel with them, and home once more at the end. Under a causal mask a device computes half of its
queries times its keys at every turn, for which parts of the sequence change places before and after.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives, Compute
from autoshard.graph import RING, Op, OpGraph
from autoshard.plan.model._factors import factor_states
from autoshard.plan.xla._halos import Inner
from autoshard.plan.xla._states import Seconds, States, local_elements
from autoshard.program import ring_side


_F32 = 4


def is_ring(op: Op) -> bool:
    """Whether an op sends keys and values around a ring."""
    return (op.opaque.target if op.opaque is not None else op.kind).startswith(RING)


def _is_back(op: Op) -> bool:
    return "_backward" in (op.opaque.target if op.opaque is not None else op.kind)


def _exchanges(op: Op) -> bool:
    """Whether parts change places, so that all devices have the same work under a causal mask."""
    return op.opaque is not None and "_causal" in op.opaque.target


def _sequence(op: Op) -> int:
    """The factor of the sequence."""
    assert op.rule is not None
    return op.rule.operands[0][-2][0]


def ring_parts(op: Op, states: States, axes: Sequence[int]) -> NDArray[np.float64]:
    """Devices of a ring, in every state; 1 where the sequence is whole."""
    return np.where(states == _sequence(op), np.asarray(axes, dtype=np.float64), 1.0).prod(axis=1)


def _local(graph: OpGraph, op: Op, states: States, axes: Sequence[int], operand: int) -> Seconds:
    """Elements of a shard of an operand."""
    assert op.rule is not None
    tensor = graph.tensors[op.operands[operand]]
    return local_elements(factor_states(states, op.rule.operands[operand]), tensor.shape, axes)


def ring_work(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> tuple[Seconds, Seconds]:
    """Share of the call's flops that a device computes in all turns, and steps of its kernels, of a call of our own.

    Halves of a shard that are narrower than the kernel's blocks take smaller ones, and more steps. Without a kernel the
    call on one device computes the scores that are masked too; of n devices each then computes (n + 1) / 2n of that.
    """
    assert op.rule is not None
    factors = [max(1, n) for n in op.rule.sizes]
    share = local_elements(states, factors, axes) / math.prod(factors)
    parts, length = ring_parts(op, states, axes), graph.tensors[op.operands[0]].shape[-2]
    if not op.steps:
        return (share * (parts + 1.0) / (2.0 * parts) if _exchanges(op) else share), share * 0.0
    each = np.array([ring_side(length // int(n) // 2) for n in parts])
    return share, op.steps * share * (ring_side(length // 2) / each) ** 2


def turn_traffic(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> Seconds:
    """Bytes that adding up the turns moves: sums in fp32 read and written, and what is added read."""
    parts = ring_parts(op, states, axes)
    sums = _local(graph, op, states, axes, 0)
    if _is_back(op):
        sums = sums + _local(graph, op, states, axes, 1) + _local(graph, op, states, axes, 2)
    return np.where(parts > 1, parts * 3 * _F32 * sums, 0.0)


def ring_memory(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> NDArray[np.int64]:
    """Bytes that a call holds beside its operands and results: what travels, twice, sums, and parts in their order."""
    item = graph.tensors[op.operands[0]].itemsize
    queries, keys = _local(graph, op, states, axes, 0), _pair(graph, op, states, axes)
    held = 2 * keys * item + queries * _F32
    if _is_back(op):
        held = held + 2 * keys * _F32
    if _exchanges(op):
        held = held + (queries * (3 if _is_back(op) else 1) + keys) * item
    return np.where(ring_parts(op, states, axes) > 1, np.rint(held), 0).astype(np.int64)


def _pair(graph: OpGraph, op: Op, states: States, axes: Sequence[int]) -> Seconds:
    """Elements of a shard of keys and values."""
    return _local(graph, op, states, axes, 1) + _local(graph, op, states, axes, 2)


def ring_permutes(
    graph: OpGraph, op: Op, states: States, axes: Sequence[int], busy: Seconds, collectives: Collectives
) -> list[Inner]:
    """The permutes of a ring in every state; `busy` are the seconds of its compute, a part of which is each turn's."""
    assert op.rule is not None
    found = []
    on_sequence = states == _sequence(op)
    item = graph.tensors[op.operands[0]].itemsize
    pair = _pair(graph, op, states, axes)
    whole = np.zeros(len(states))
    for tensor, dims in op.sides:
        record = graph.tensors[tensor]
        whole = whole + local_elements(factor_states(states, dims), record.shape, axes) * record.itemsize
    for used in np.unique(on_sequence, axis=0):
        group = tuple(np.flatnonzero(used).tolist())
        parts = math.prod(axes[a] for a in group)
        if parts == 1:
            continue
        same = (on_sequence == used).all(axis=1)
        names = tuple(collectives.mesh.names[a] for a in group)
        keys, sums = (np.where(same, pair * each, 0.0) for each in (item, _F32))
        turn = busy / parts
        waits = collectives.time("collective-permute", names, keys)
        back = collectives.time("collective-permute", names, sums) if _is_back(op) else np.zeros(len(states))
        # Both travel at once, on the same links.
        hidden = np.minimum(turn, waits + back)
        share = hidden / np.maximum(waits + back, 1e-30)
        found.append(Inner("collective-permute", group, keys, count=parts - 1, hidden=share))
        if _is_back(op):
            found.append(Inner("collective-permute", group, sums, count=parts - 1, hidden=share))
            found.append(Inner("collective-permute", group, sums))
        if _exchanges(op):
            found.append(Inner("collective-permute", group, np.where(same, whole, 0.0), as_kind="all-to-all"))
    return found


def ring_seconds(graph: OpGraph, op: Op, states: States, axes: Sequence[int], compute: Compute) -> Seconds:
    """What adding up the turns takes."""
    return compute.op_seconds(np.zeros(len(states)), turn_traffic(graph, op, states, axes))
