"""The sharding that a run's author states, as a restriction of the same decisions."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import Attention, find_attentions
from autoshard.planning.space.baselines import (
    Baseline,
    Stream,
    allow_factors,
    held,
    restricted,
    split_by_group,
    split_parameters,
    spread_over,
    tensor_parallel_groups,
    wide_axes,
)
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups, tensor_groups
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.program import WEIGHTS, Role


@dataclasses.dataclass(frozen=True, slots=True)
class Uses:
    """What a run's mesh axes, by number, are used for."""

    copies: Sequence[int]
    """Data parallelism: the batch is split, parameters are whole."""
    spread: Sequence[int]
    """FSDP: the batch is split, parameters are spread."""
    tensor: Sequence[int]
    """Megatron's tensor parallelism: heads, ffn and vocabulary are split, and the residual stream's sequence, or its
    width."""
    experts: Sequence[int] = ()
    """Expert parallelism: experts' parameters are split by expert; for everything else these are as `spread`."""
    context: Sequence[int] = ()
    """Context parallelism: sequences are split, parameters are spread."""
    expert_count: int = 0
    spreads_state: bool = False
    """The optimizer's state is spread over `copies`, whose parameters are whole (ZeRO-1)."""
    exchange: str = "auto"
    """How queries meet keys and values of other devices of `context`: with `heads`, heads are split in attention."""
    on_width: bool = False
    """Over `tensor` the residual stream is split on its width, not on its sequence."""
    holds_head: bool = True
    """Matmuls outside of layers have their batch split too, so that the head's weights are gathered. Else it may be
    computed in parts of its vocabulary from gathered activations, which is cheaper where tokens are few."""


def stated(model: Model, groups: Groups, name: str, uses: Uses) -> Baseline | None:
    """The sharding that a run's author states; None if the program's sizes do not allow it."""
    tensor, experts, spread, copies = uses.tensor, uses.experts, uses.spread, uses.copies
    parts = math.prod(model.axis_sizes[a] for a in tensor)
    chosen = tensor_parallel_groups(model, groups, parts) if parts > 1 else set()
    if parts > 1 and not chosen:
        return None
    by_expert = _expert_groups(model, groups, uses.expert_count) if experts else set()
    if experts and (not by_expert or uses.expert_count % math.prod(model.axis_sizes[a] for a in experts)):
        return None
    parameters = {}
    for p in split_parameters(model):
        taken = split_by_group(model, groups, p, chosen, tensor) if chosen else {}
        own = split_by_group(model, groups, p, by_expert, experts) if by_expert else ()
        over = (*spread, *uses.context) if own else (*spread, *experts, *uses.context)
        parameters[p] = spread_over(model, p, over, taken | dict(own)) if over else taken | dict(own)
    updated = None
    if uses.spreads_state:
        updated = {p: spread_over(model, p, copies, {}) for p in parameters}
        for p, argument in enumerate(model.program.arguments):
            if argument.role is Role.OPTIMIZER_STATE and model.structure.cluster_of[model.graph.arguments[p]] >= 0:
                parameters[p] = updated[p] = spread_over(model, p, copies, {})
    data = (*copies, *spread, *experts)
    inner = tensor if parts > 1 else ()
    along, across = ((), inner) if uses.on_width else (inner, ())
    stream = Stream(data, (*uses.context, *along), across, uses.context)
    found = restricted(model, groups, name, parameters, stream, updated)
    if found is not None:
        run = _Held(chosen, by_expert, uses, -1 if groups.batch is None else groups.batch, groups.sequence)
        if not _hold_inner(model, groups, found.allowed, run):
            return None
    return found


def stationary(
    model: Model, groups: Groups, name: str, width: Sequence[int], inner: Sequence[int], *, by_batch: bool
) -> Baseline | None:
    """A step of serving whose weights stay where they are: ffn and heads split over `inner`, the model's width over
    `width` (Pope et al. 2022). With `by_batch` the cache is split by sequence over both, else by heads where they
    divide. None if the program's sizes do not allow it."""
    parts = math.prod(model.axis_sizes[a] for a in inner)
    chosen = tensor_parallel_groups(model, groups, parts)
    if not chosen:
        return None
    parameters = {}
    for p in split_parameters(model):
        taken = split_by_group(model, groups, p, chosen, inner)
        parameters[p] = spread_over(model, p, width, taken) if width else taken
    for p, argument in enumerate(model.program.arguments):
        if argument.name.startswith("cache."):  # [layers, sequences, heads, tokens, head size], or one layer's
            own = tensor_groups(model.structure, groups.of_factor, model.graph.arguments[p])
            dim = own.index(groups.batch) + (not by_batch)
            axes = sorted((*width, *inner)) if by_batch else inner
            divides = argument.shape[dim] % math.prod(model.axis_sizes[a] for a in axes) == 0
            if by_batch and not divides:
                return None
            parameters[p] = {dim: tuple(axes)} if divides else {}
    return held(model, name, parameters)


def _expert_groups(model: Model, groups: Groups, count: int) -> set[int]:
    """The dim groups that count experts: those of dims of so many in their parameters."""
    found = set()
    for tensor, argument in zip(model.graph.arguments, model.program.arguments, strict=True):
        if argument.role in WEIGHTS and ".experts." in argument.name:
            dims = tensor_groups(model.structure, groups.of_factor, tensor)
            found |= {g for g, size in zip(dims, argument.shape, strict=True) if g is not None and size == count}
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """Which dim groups of a stated run are split, and over what."""

    chosen: set[int]
    """Heads, ffn and vocabulary, over `tensor`."""
    by_expert: set[int]
    """Experts, over `experts`, over which the batch is split where there are none."""
    uses: Uses
    batch: int
    sequence: int | None

    def spec(self, batch: int, of: Mapping[int, int]) -> dict[int, Sequence[int]] | None:
        """Factor -> axes, for dim groups -> factors; None where more than one dim would be split over `tensor`."""
        inner = sorted(self.chosen & set(of))
        if self.chosen and len(inner) != 1:
            return None
        data = (*self.uses.copies, *self.uses.spread)
        spec = {of[batch]: (*data, *self.uses.experts)} | {of[g]: self.uses.tensor for g in inner}
        if self.uses.context and self.sequence in of:
            spec |= {of[self.sequence]: self.uses.context}  # type: ignore[index]
        own = sorted(self.by_expert & set(of))
        if own:
            spec |= {of[batch]: data, of[own[0]]: self.uses.experts}
        return spec

    def attending(self, attention: Attention, of: Mapping[int, int]) -> dict[int, Sequence[int]] | None:
        """The same of an attention: over `context` its queries are split, or its heads of keys instead."""
        found = self.spec(self.batch, {group: factor for group, factor in of.items() if group != self.sequence})
        if found is None:
            return None
        factor = attention.of_heads if self.uses.exchange == "heads" else attention.of_sequence
        return found | {factor: (*self.uses.context, *found.get(factor, ()))}


def _hold_inner(
    model: Model,
    groups: Groups,
    allowed: dict[int, NDArray[np.bool_]],
    run: _Held,
) -> bool:
    """Every matmul (but the head's) computes, and every activation between two is held, with its batch split as the
    run's is, and its heads or ffn dim split where those are.

    Else another strategy than what was stated may look cheaper to the solver: gathering weights where a run has tensor
    parallelism; where it has FSDP and few tokens, gathering activations instead of the weights.
    Where heads are exchanged for the sequence, attention has them split, and what leads to it may change on the way;
    False where they do not divide.
    """
    attentions = {each.op: each for each in find_attentions(model.graph)} if run.uses.context else {}
    exchanged = run.uses.exchange == "heads"
    between = {t for each in attentions.values() for t in each.values} if exchanged else set()
    free = {model.structure.cluster_of[t] for t in between}
    for cluster in model.structure.clusters:
        of = {groups.of_factor[(cluster.id, f)]: f for f in range(len(cluster.sizes)) if f not in cluster.blocked}
        spec = run.spec(groups.batch, of) if groups.batch in of and cluster.id not in free else None
        if spec is not None:
            allow_factors(model, allowed, cluster.id, spec)
    for op_id, node in model.op_node.items():
        of = groups_of_op(model, groups, op_id)
        holds = run.uses.holds_head or model.graph.ops[op_id].loop >= 0
        spec = run.spec(groups.batch, of) if holds and groups.batch in of else None
        if spec is not None and op_id in attentions:
            spec = run.attending(attentions[op_id], of)
        if spec is not None:
            state = np.full(len(model.axis_sizes), WHOLE, dtype=np.int64)
            for factor, axes in spec.items():
                state[list(wide_axes(model, axes))] = factor
            mask = (model.nodes[node].states == state).all(axis=1)
            if mask.any():
                allowed[node] = mask
            elif op_id in attentions and exchanged:
                return False
    return True


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


_STAGED_STACK = re.compile(r"(?:^|\.)layers(?:\.\d+)?\.(?:\*|\[\d+:\])\.")


def without_axis(model: Model, axis: int) -> Model:
    """The same alternatives, none of which shows what it does with one axis."""
    nodes = []
    for node in model.nodes:
        states = node.states.copy()
        states[:, axis] = WHOLE
        nodes.append(dataclasses.replace(node, states=states))
    return dataclasses.replace(model, nodes=tuple(nodes))


def with_stages_held(model: Model, stated: Baseline, axis: int, stack_dim: int) -> Baseline | None:
    """The same with the axis of the stages as MaxText has it: stacks of layers in stages, and their optimizer state,
    lie on their stages' devices, and all other parameters are whole along it.

    `stack_dim` is the dim of stacks that counts layers. In rounds the layers of a stage do not follow one another, and
    which dim is split is left open. None if the sharding of a stage then leaves no alternative.
    """
    allowed = dict(stated.allowed)
    in_order = model.program.pipeline is not None and model.program.pipeline["rounds"] == 1
    for tensor, argument in zip(model.graph.arguments, model.program.arguments, strict=True):
        cluster = model.structure.cluster_of[tensor]
        if argument.role not in (*WEIGHTS, Role.OPTIMIZER_STATE) or cluster < 0:
            continue
        node = model.cluster_node[cluster]
        on_axis = model.nodes[node].states[:, axis]
        mask = allowed.get(node, np.ones(len(on_axis), dtype=bool))
        own = mask & (on_axis == WHOLE)
        if _STAGED_STACK.search(argument.name):
            layers = model.structure.dims_of[tensor][stack_dim]
            by_stage = mask & (on_axis == layers if in_order and layers >= 0 else on_axis != WHOLE)
            own = by_stage if by_stage.any() else own
        if not own.any():
            return None
        allowed[node] = own
    return Baseline(stated.name, allowed)
