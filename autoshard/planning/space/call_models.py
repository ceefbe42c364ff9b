"""Prices of attention kernels and custom calls, of rings and of ragged exchanges."""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Collectives
from autoshard.graph import MATMULS, RAGGED, RING, Op
from autoshard.planning.space.attention_exchange import is_ring, ring_memory, ring_permutes, ring_seconds, ring_work
from autoshard.planning.space.dim_groups import factor_states
from autoshard.planning.space.op_work import OpModel, OpWork, matrix_seconds
from autoshard.planning.xla.axis_assignments import Seconds, States, local_elements
from autoshard.planning.xla.spatial_splits import Inner


def _called(work: OpWork, size: Seconds) -> Seconds:
    """Return the bytes of memory traffic that a custom call states, those of its busiest shard, [states].

    A call that states none has `size`, the bytes of its operands and results.
    """
    call, rule = work.op.opaque, work.op.rule
    if call is None or rule is None or not call.traffic:
        return size
    even = call.traffic * local_elements(work.states, rule.sizes, work.axes) / math.prod(rule.sizes)
    return even * _busiest(work.op, work.states)


def _busiest(op: Op, states: States) -> Seconds:
    """Return the work of the busiest shard of an opaque call over the mean (`Opaque.imbalance`), [states]."""
    ratio = np.ones(len(states))
    for factor, times in op.opaque.imbalance if op.opaque is not None else ():
        ratio = np.where((states == factor).any(axis=1), ratio * times, ratio)
    return ratio


def _attention_seconds(work: OpWork, size: Seconds, fused: Seconds) -> Seconds:
    """Return the seconds of a known attention kernel on the busiest device, [states].

    - `size`: bytes of its memory traffic.
    - `fused`: further bytes that its fused operands read.
    """
    op, compute, matmuls = work.op, work.compute, MATMULS[work.op.kind]
    assert op.rule is not None
    steps = op.steps * work.share()
    head, value_head = op.rule.sizes[5:7]
    scores = op.flops / (matmuls * (head + value_head)) * work.sloped_share()
    busy = compute.attention_seconds(scores, head, value_head, matmuls, work.dtype, size + fused)
    return busy + compute.step_seconds(steps)


def _call_seconds(work: OpWork, size: Seconds, fused: Seconds) -> Seconds:
    """Return the seconds of a custom call on the busiest device, [states]; `size` and `fused` as above."""
    return _shared_call_seconds(work, size + fused, work.sloped_share(), work.op.steps * work.share())


def _shared_call_seconds(work: OpWork, size: Seconds, share: Seconds, steps: Seconds) -> Seconds:
    """Return the seconds of a custom call on the busiest device, [states].

    - `size`: bytes of its memory traffic.
    - `share`: share of the call's FLOPs on one device if work is even.
    - `steps`: grid steps on one device if work is even.

    A call that states a head size is priced as attention, any other as matrix work.
    """
    op, compute = work.op, work.compute
    assert op.opaque is not None
    busiest = _busiest(op, work.states)
    share, steps = share * busiest, steps * busiest
    if not op.opaque.head:
        return matrix_seconds(work, size, share, steps)
    passes = op.flops / (2.0 * op.opaque.head) * share
    busy = compute.attention_seconds(passes, op.opaque.head, op.opaque.head, 1, work.dtype, size)
    return busy + compute.step_seconds(steps)


def _ring_call_seconds(work: OpWork, size: Seconds, fused: Seconds) -> Seconds:
    """Return the seconds of a custom call in all turns of a ring, and of the accumulation of the turns, [states]."""
    share, steps = ring_work(work.graph, work.op, work.states, work.axes)
    return _shared_call_seconds(work, size + fused, share, steps) + _turns(work)


def _ring_attention_seconds(work: OpWork, size: Seconds, fused: Seconds) -> Seconds:
    """Return the seconds of a known attention kernel in all turns of a ring, and of their accumulation, [states]."""
    return _attention_seconds(work, size, fused) + _turns(work)


def _turns(work: OpWork) -> Seconds:
    """Return the seconds for the accumulation of a ring's turns, [states]; see `ring_seconds`."""
    return ring_seconds(work.graph, work.op, work.states, work.axes, work.compute)


def _ring_memory(work: OpWork) -> NDArray[np.int64]:
    """Return the bytes of a ring's tensors in transit, sums and permuted shards, [states]; see `ring_memory`."""
    return ring_memory(work.graph, work.op, work.states, work.axes)


def _ring_permutes(work: OpWork, busy: Seconds, collectives: Collectives) -> list[Inner]:
    """Return the permutes of a ring whose compute takes `busy` seconds, [states]; see `ring_permutes`."""
    return ring_permutes(work.graph, work.op, work.states, work.axes, busy, collectives)


_EXCHANGED = 1
"""Factor that is sequences on one side and groups on the other (`program/kernels/ragged_exchange.py`)."""
_PASSES = 2.5
"""Passes of a ragged exchange over its operand and result on backends with tiled arrays.

The TPU compiler's schedule copies both to and from a layout of whole rows, and first fills the result with zeros.
"""


def _exchanged(work: OpWork, size: Seconds) -> Seconds:
    """Return the bytes of memory traffic of a ragged exchange, [states].

    On backends with tiled arrays, states that exchange rows make `_PASSES` passes.
    """
    exchanges = (work.states == _EXCHANGED).any(axis=1)
    tiled = work.compute.topology.traits.tiled
    return _called(work, size) * np.where(exchanges & tiled, _PASSES, 1.0)


def _exchanges(work: OpWork, busy: Seconds, collectives: Collectives) -> list[Inner]:
    """Return the all-to-all of a ragged exchange for every state; its duration is that of the busiest device's rows.

    There is one all-to-all for each set of axes that splits the exchanged factor; `busy` is not used. Devices that are
    threads of one machine have no ragged collective and send padded rows.
    """
    graph, op, states, axes = work.graph, work.op, work.states, work.axes
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


_CALL, _RING_CALL = "custom_call", "ring_call"
"""Kinds of custom call other than `RAGGED`."""

CALL_MODELS: Mapping[str, OpModel] = {
    **{
        kind: OpModel(busy=_ring_attention_seconds, memory=_ring_memory, collectives=_ring_permutes)
        if kind.startswith(RING)
        else OpModel(busy=_attention_seconds)
        for kind in MATMULS
    },
    _CALL: OpModel(traffic=_called, busy=_call_seconds),
    _RING_CALL: OpModel(traffic=_called, busy=_ring_call_seconds, memory=_ring_memory, collectives=_ring_permutes),
    RAGGED: OpModel(traffic=_exchanged, busy=_call_seconds, collectives=_exchanges, apart=True),
}
"""Models of known attention kernels by kind of op, and of custom calls by kind of call."""


def call_kind(op: Op) -> str:
    """Return the key of an op in the table of models.

    The key is the op's kind, or for an opaque call `ring_call`, `RAGGED` (an exchange on shards) or `custom_call`.
    """
    if op.opaque is None:
        return op.kind
    if is_ring(op):
        return _RING_CALL
    return RAGGED if op.opaque.on_shards and op.opaque.target.startswith(RAGGED) else _CALL
