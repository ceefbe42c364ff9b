"""Which ops a plan runs in regions of its own, and how: those split in space, and convolutions of groups."""

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import Op, OpGraph
from autoshard.plan.model._factors import factor_states
from autoshard.plan.model._heavy import result_states
from autoshard.plan.model._model import Model
from autoshard.plan.record._parts import Region
from autoshard.plan.record._spec import Spec
from autoshard.plan.xla._halos import in_region
from autoshard.plan.xla._states import PARTIAL, States


def make_regions(model: Model, choices: NDArray[np.int64]) -> tuple[Region, ...]:
    """One region for every op that the plan does not leave to the partitioner (`in_region`), in program order."""
    found = []
    for op_id, number in model.op_node.items():
        op = model.graph.ops[op_id]
        state = model.nodes[number].states[int(choices[number])][None, :]
        if in_region(op, state)[0]:
            found.append(region_of(model.graph, op, state, model.axis_names))
    return tuple(sorted(found, key=lambda region: region.op))


def region_of(graph: OpGraph, op: Op, state: States, names: list[str]) -> Region:
    """The region of an op in one state (shape [1, axes])."""
    assert op.rule is not None

    def spec(row: NDArray[np.int64], rank: int) -> Spec:
        return Spec(tuple(tuple(names[a] for a in np.flatnonzero(row == dim)) for dim in range(rank)))

    tensors = graph.tensors
    operands = [
        spec(factor_states(state, dims)[0], len(tensors[t].shape))
        for t, dims in zip(op.operands, op.rule.operands, strict=True)
    ]
    left = [result_states(op, state, r)[0] for r in range(len(op.results))]
    results = [spec(row, len(tensors[t].shape)) for row, t in zip(left, op.results, strict=True)]
    summed = tuple(names[a] for a in np.flatnonzero(left[0] <= PARTIAL))
    return Region(op.number, tuple(operands), tuple(results), summed, op.name)
