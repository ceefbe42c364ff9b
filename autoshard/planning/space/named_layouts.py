"""Shardings that the author of a run states, as restrictions of the same decisions."""

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
    argument_baseline,
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
    """Purpose of each mesh axis of a run; axes are numbers."""

    copies: Sequence[int]
    """Axes of data parallelism: the batch is split, parameters are whole."""
    spread: Sequence[int]
    """Axes of FSDP: the batch and the parameters are split."""
    tensor: Sequence[int]
    """Axes of Megatron's tensor parallelism, which split heads, ffn, vocabulary, and the residual stream."""
    experts: Sequence[int] = ()
    """Axes of expert parallelism: experts' parameters are split by expert; all else is treated as for `spread`."""
    context: Sequence[int] = ()
    """Axes of context parallelism: sequences and parameters are split."""
    expert_count: int = 0
    """Number of experts in a layer, 0 for a model without."""
    spreads_state: bool = False
    """True if the optimizer state is spread over `copies` alone, whose parameters are whole (ZeRO-1).

    The new parameters are computed in that spec too.
    """
    exchange: str = "auto"
    """Exchange of queries, keys and values over `context`; with `heads`, heads are split in attention."""
    on_width: bool = False
    """True if `tensor` splits the residual stream's width, False if its sequence."""
    holds_head: bool = True
    """True if matmuls outside of layers have their batch split too, which gathers the head's weights.

    Otherwise the head may be computed in parts of its vocabulary from gathered activations, cheaper for few tokens.
    """


def stated(model: Model, groups: Groups, name: str, uses: Uses) -> Baseline | None:
    """Build the sharding that a run's author states; None if the program's sizes do not allow it.

    This is so if `tensor` has no dim to split, if experts or the batch do not divide, or if heads cannot be exchanged.
    A tensor without the stated spec also gives None.

    - `groups`: dim groups of the program.
    - `name`: name of the result.
    - `uses`: purpose of each mesh axis.
    """
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
        spread_axes = (*spread, *uses.context) if own else (*spread, *experts, *uses.context)
        parameters[p] = spread_over(model, p, spread_axes, taken | dict(own)) if spread_axes else taken | dict(own)
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
    baseline = restricted(model, groups, name, parameters, stream, updated)
    if baseline is not None:
        run = _Held(chosen, by_expert, uses, -1 if groups.batch is None else groups.batch, groups.sequence)
        if not _hold_inner(model, groups, baseline.allowed, run):
            return None
    return baseline


def stationary(
    model: Model, groups: Groups, name: str, width: Sequence[int], inner: Sequence[int], *, by_batch: bool
) -> Baseline | None:
    """Build a serving step with stationary weights (Pope et al. 2022); None if the program's sizes do not allow it.

    - `name`: name of the result.
    - `width`: axes that split the model's width.
    - `inner`: axes that split ffn and heads.
    - `by_batch`: if True, both split the cache by sequences. Otherwise `inner` splits the cache by heads if it divides
      them, and else the cache is whole.
    """
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
    return argument_baseline(model, name, parameters)


def _expert_groups(model: Model, groups: Groups, count: int) -> set[int]:
    """Return the dim groups that count experts: those of size `count` in parameters with `.experts.` in their names."""
    expert_groups = set()
    for tensor, argument in zip(model.graph.arguments, model.program.arguments, strict=True):
        if argument.role in WEIGHTS and ".experts." in argument.name:
            dims = tensor_groups(model.structure, groups.of_factor, tensor)
            expert_groups |= {
                g for g, size in zip(dims, argument.shape, strict=True) if g is not None and size == count
            }
    return expert_groups


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """Dim groups of a stated run that are split, and the axes that split them."""

    chosen: set[int]
    """Heads, ffn and vocabulary, which `tensor` splits."""
    by_expert: set[int]
    """Experts, which `experts` splits; these axes split the batch of tensors without experts."""
    uses: Uses
    batch: int
    """Dim group of the batch, -1 without one."""
    sequence: int | None
    """Dim group of the sequence."""

    def spec(self, batch: int, of: Mapping[int, int]) -> dict[int, Sequence[int]] | None:
        """Return the axes that split each factor; None if `tensor` would not split exactly one dim.

        `batch` is the dim group of the batch. `of` maps dim groups to factors of a cluster or op. Without dims that
        `tensor` splits in the run, no dim needs to be split by it.
        """
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
        """Return the axes that split each factor of an attention, as `spec` does; None if `spec` gives None.

        `context` splits the queries' sequence, or the key-value heads if heads are exchanged.
        """
        spec = self.spec(self.batch, {group: factor for group, factor in of.items() if group != self.sequence})
        if spec is None:
            return None
        factor = attention.of_heads if self.uses.exchange == "heads" else attention.of_sequence
        return spec | {factor: (*self.uses.context, *spec.get(factor, ()))}


def _hold_inner(
    model: Model,
    groups: Groups,
    allowed: dict[int, NDArray[np.bool_]],
    run: _Held,
) -> bool:
    """Restrict every matmul and every activation between two to the run's split of batch, heads and ffn.

    Otherwise the solver may prefer a strategy that was not stated. It may gather weights in place of tensor
    parallelism, or gather the activations of few tokens in place of FSDP's weights. The head's matmuls are restricted
    only with `Uses.holds_head`.

    If heads are exchanged for the sequence, attention has its heads split, and tensors around it are free. Masks are
    added to `allowed`; a matmul or cluster without the stated state stays free. Returns False if the heads do not
    divide, else True.
    """
    attentions = {each.op: each for each in find_attentions(model.graph)} if run.uses.context else {}
    exchanged = run.uses.exchange == "heads"
    between = {t for each in attentions.values() for t in each.values} if exchanged else set()
    free = {model.structure.cluster_of[t] for t in between}
    for cluster in model.structure.clusters:
        factor_of = {
            groups.of_factor[(cluster.id, f)]: f for f in range(len(cluster.sizes)) if f not in cluster.blocked
        }
        spec = run.spec(groups.batch, factor_of) if groups.batch in factor_of and cluster.id not in free else None
        if spec is not None:
            allow_factors(model, allowed, cluster.id, spec)
    for op_id, node in model.op_node.items():
        factor_of = groups_of_op(model, groups, op_id)
        restricts = run.uses.holds_head or model.graph.ops[op_id].loop >= 0
        spec = run.spec(groups.batch, factor_of) if restricts and groups.batch in factor_of else None
        if spec is not None and op_id in attentions:
            spec = run.attending(attentions[op_id], factor_of)
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
    """Return the factor of a heavy op for each dim group of its operands and results; empty without a rule.

    Merged dims do not count. The first factor counts if a group has several.
    """
    op, structure = model.graph.ops[op_id], model.structure
    if op.rule is None:
        return {}
    factor_of: dict[int, int] = {}
    for tensor, dims in op.sides:
        for own, factors in zip(structure.dims_of[tensor], dims, strict=False):
            group = groups.of_factor.get((structure.cluster_of[tensor], own))
            if group is not None and len(factors) == 1:
                factor_of.setdefault(group, factors[0])
    return factor_of


# Name of a stack of layers inside the layers of a stage.
_STAGED_STACK = re.compile(r"(?:^|\.)layers(?:\.\d+)?\.(?:\*|\[\d+:\])\.")


def without_axis(model: Model, axis: int) -> Model:
    """Return a copy of the model in which the states show one axis (a number) as splitting nothing.

    Alternatives retain their numbers, so several may have equal states.
    """
    nodes = []
    for node in model.nodes:
        states = node.states.copy()
        states[:, axis] = WHOLE
        nodes.append(dataclasses.replace(node, states=states))
    return dataclasses.replace(model, nodes=tuple(nodes))


def with_stages_held(model: Model, stated: Baseline, axis: int, stack_dim: int) -> Baseline | None:
    """Restrict the stage axis as MaxText does: stages hold their layers' stacks and optimizer state, all else is whole.

    In rounds, the layers of a stage are not consecutive, and any dim of a stack may be split. None if the stated
    sharding of a stage then leaves no alternative.

    - `stated`: the sharding of a stage.
    - `axis`: number of the stage axis.
    - `stack_dim`: the dim of stacks that counts layers.
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
