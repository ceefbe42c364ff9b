"""What it costs that rows go to the devices of their experts: an all-to-all of those that are real."""

import math
from collections.abc import Sequence

import numpy as np

from autoshard.cost import Collectives
from autoshard.graph import RAGGED, Op, OpGraph
from autoshard.plan.model._factors import factor_states
from autoshard.plan.xla._halos import Inner
from autoshard.plan.xla._states import Seconds, States, local_elements


_EXCHANGED = 1
"""The factor that is sequences on one side and groups on the other (`program/_ragged_exchange.py`)."""


_PASSES = 2.5
"""Passes over what it reads and writes where arrays lie in tiles: TPUs' compiler copies operand and result from and to
a layout of whole rows, and the result is filled with zeros before (seen in its schedule)."""


def is_ragged(op: Op) -> bool:
    """Whether an op exchanges rows of sequences for rows of groups."""
    return op.opaque is not None and op.opaque.on_shards and op.opaque.target.startswith(RAGGED)


def ragged_passes(op: Op, states: States, tiled: bool) -> Seconds:
    """How often the call goes over its operand and result, in every state."""
    exchanges = (states == _EXCHANGED).any(axis=1)
    return np.where(exchanges & tiled, _PASSES, 1.0)


def ragged_exchanges(
    graph: OpGraph, op: Op, states: States, axes: Sequence[int], collectives: Collectives
) -> list[Inner]:
    """The all-to-all in every state. It takes as long as the busiest device has rows for.

    Devices that are threads of one machine have no ragged one, and send what is padded.
    """
    assert op.rule is not None and op.opaque is not None
    rows = graph.tensors[op.operands[0]]
    size = local_elements(factor_states(states, op.rule.operands[0]), rows.shape, axes) * rows.itemsize
    if not collectives.mesh.topology.traits.shares_machine:
        size = size * min(1.0, op.opaque.sent * dict(op.opaque.uneven).get(_EXCHANGED, 1.0))
    over = states == _EXCHANGED
    found = []
    for used in np.unique(over, axis=0):
        group = tuple(np.flatnonzero(used).tolist())
        if math.prod(axes[a] for a in group) > 1:
            found.append(Inner("all-to-all", group, np.where((over == used).all(axis=1), size, 0.0)))
    return found
