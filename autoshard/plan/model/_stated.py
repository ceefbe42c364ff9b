"""The sharding that a run's author states, as a restriction of the same decisions."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.plan.model._groups import Groups
from autoshard.plan.model._model import Model
from autoshard.plan.model._restrict import (
    Baseline,
    allow_factors,
    restricted,
    split_by_group,
    split_parameters,
    spread_over,
    tensor_parallel_groups,
    wide_axes,
)
from autoshard.plan.xla._states import WHOLE


def stated(
    model: Model,
    groups: Groups,
    name: str,
    *,
    copies: Sequence[int],
    spread: Sequence[int],
    tensor: Sequence[int],
    experts: Sequence[int] = (),
    expert_count: int = 0,
    holds_head: bool = True,
) -> Baseline | None:
    """The sharding that a run's author states, by numbers of mesh axes; None if the program's sizes do not allow it.

    The batch is split over `copies` and `spread`, parameters are whole over `copies` (data parallelism), spread over
    `spread` (FSDP) and split over `tensor` (Megatron's choice of dims, the residual stream's sequence split as well).
    Over `experts` the experts' parameters are split by expert, of which there are `expert_count`; for everything else
    these axes are like those of `spread`, so that tokens go to their experts and back (expert parallelism).

    `holds_head`: matmuls outside of layers have their batch split too, so that the head's weights are gathered. Else it
    may be computed in parts of its vocabulary from gathered activations, which is cheaper where tokens are few.
    """
    parts = math.prod(model.axis_sizes[a] for a in tensor)
    chosen = tensor_parallel_groups(model, groups, parts) if parts > 1 else set()
    if parts > 1 and not chosen:
        return None
    by_expert = _expert_group(groups, expert_count) if experts else None
    if experts and (by_expert is None or expert_count % math.prod(model.axis_sizes[a] for a in experts)):
        return None
    parameters = {}
    for p in split_parameters(model):
        taken = split_by_group(model, groups, p, chosen, tensor) if chosen else {}
        own = () if by_expert is None else split_by_group(model, groups, p, {by_expert}, experts)
        over = spread if own else (*spread, *experts)
        parameters[p] = spread_over(model, p, over, taken | dict(own)) if over else taken | dict(own)
    data = (*copies, *spread, *experts)
    found = restricted(model, groups, name, parameters, data, tensor if parts > 1 else ())
    if found is not None:
        held = _Held(chosen, by_expert, (*copies, *spread), tensor, experts)
        _hold_inner(model, groups, found.allowed, held, holds_head)
    return found


def _expert_group(groups: Groups, count: int) -> int | None:
    """The dim group that counts experts."""
    found = (g for g, name in groups.names.items() if name == "experts" and groups.sizes[g] == count)
    return next(found, None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """Which dim groups of a stated run are split, and over what."""

    chosen: set[int]
    """Heads, ffn and vocabulary, over `tensor`."""
    by_expert: int | None
    """The experts, over `experts`, over which the batch is split where there are none."""
    data: Sequence[int]
    tensor: Sequence[int]
    experts: Sequence[int]

    def spec(self, batch: int, of: Mapping[int, int]) -> dict[int, Sequence[int]] | None:
        """Factor -> axes, for dim groups -> factors; None where more than one dim would be split over `tensor`."""
        inner = sorted(self.chosen & set(of))
        if self.chosen and len(inner) != 1:
            return None
        spec = {of[batch]: (*self.data, *self.experts)} | {of[g]: self.tensor for g in inner}
        if self.by_expert is not None and self.by_expert in of:
            spec |= {of[batch]: self.data, of[self.by_expert]: self.experts}
        return spec


def _hold_inner(
    model: Model,
    groups: Groups,
    allowed: dict[int, NDArray[np.bool_]],
    run: _Held,
    holds_head: bool,
) -> None:
    """Every matmul (but the head's) computes, and every activation between two is held, with its batch split as the
    run's is, and its heads or ffn dim split where those are.

    Else another strategy than what was stated may look cheaper to the solver: gathering weights where a run has tensor
    parallelism; where it has FSDP and few tokens, gathering activations instead of the weights.
    """
    for cluster in model.structure.clusters:
        of = {groups.of_factor[(cluster.id, f)]: f for f in range(len(cluster.sizes)) if f not in cluster.blocked}
        spec = run.spec(groups.batch, of) if groups.batch in of else None
        if spec is not None:
            allow_factors(model, allowed, cluster.id, spec)
    for op_id, node in model.op_node.items():
        of = groups_of_op(model, groups, op_id)
        held = holds_head or model.graph.ops[op_id].loop >= 0
        spec = run.spec(groups.batch, of) if held and groups.batch in of else None
        if spec is not None:
            state = np.full(len(model.axis_sizes), WHOLE, dtype=np.int64)
            for factor, axes in spec.items():
                state[list(wide_axes(model, axes))] = factor
            mask = (model.nodes[node].states == state).all(axis=1)
            if mask.any():
                allowed[node] = mask


def groups_of_op(model: Model, groups: Groups, op_id: int) -> dict[int, int]:
    """Groups of a heavy op's factors -> the factor, as its operands and results have them."""
    op, structure = model.graph.ops[op_id], model.structure
    if op.rule is None:
        return {}
    found: dict[int, int] = {}
    for tensor, dims in op.sides:
        for own, factors in zip(structure.dims_of[tensor], dims, strict=False):
            group = groups.of_factor.get((structure.cluster_of[tensor], own))
            if group is not None and len(factors) == 1:
                found.setdefault(group, factors[0])
    return found
