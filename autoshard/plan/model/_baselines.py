"""Plans that a person would write, as restrictions of the same decisions; the solver completes them."""

import math
from collections.abc import Sequence

import numpy as np

from autoshard.plan.model._groups import Groups
from autoshard.plan.model._model import Model
from autoshard.plan.model._restrict import (
    Baseline,
    Stream,
    allow_factors,
    restricted,
    split_by_group,
    split_parameters,
    spread_over,
    tensor_parallel_groups,
    wide_axes,
)
from autoshard.program import Role


def baselines(model: Model, groups: Groups) -> list[Baseline]:
    """Data parallel, FSDP, spatial, Megatron tensor parallel, FSDP x TP, each TP with and without sequence parallelism.

    Spatial, for programs with convolutions: the batch over all axes but the last, the height of images over that.

    The first mesh axis carries data, the last one tensor parallelism (with one axis, all of it does); axes of size 1
    carry nothing. A baseline that the program's sizes do not allow is left out.
    """
    every = wide_axes(model, range(len(model.axis_sizes)))
    data, tensor = (every[:-1], every[-1:]) if len(every) > 1 else ((), every)
    split = tensor_parallel_groups(model, groups, math.prod(model.axis_sizes[a] for a in tensor))
    found = []
    whole = {p: {} for p in split_parameters(model)}
    spread = {p: spread_over(model, p, every, {}) for p in whole}
    _append(found, restricted(model, groups, "data_parallel", whole, Stream(every)))
    if any(spread.values()):
        _append(found, restricted(model, groups, "fsdp", spread, Stream(every)))
    _append(found, _spatial(model, groups, data, tensor) or _spatial(model, groups, (), every))
    if not split or not tensor:
        return found
    megatron = {p: split_by_group(model, groups, p, split, tensor) for p in whole}
    _append(found, restricted(model, groups, "tensor_parallel", megatron, Stream(data)))
    _append(found, restricted(model, groups, "tensor_parallel_sp", megatron, Stream(data, tensor)))
    if data:
        both = {p: spread_over(model, p, data, megatron[p]) for p in whole}
        _append(found, restricted(model, groups, "fsdp_tp", both, Stream(data)))
        _append(found, restricted(model, groups, "fsdp_tp_sp", both, Stream(data, tensor)))
    return found


def left_out(model: Model, found: Sequence[str]) -> list[str]:
    """Sentences about the usual baselines that are not among `found` (names), and why.

    None without parameters, and none on one device, where all of them are one plan.
    """
    wide = wide_axes(model, range(len(model.axis_sizes)))
    if not split_parameters(model) or not wide:
        return []
    batch = [a for a in model.program.arguments if a.role is Role.BATCH and a.shape]
    devices = math.prod(model.axis_sizes)
    why = {}
    looped = _looped_batch(model)
    for name in ("data_parallel", "fsdp"):
        uneven = next((a for a in batch if a.shape[0] % devices), None)
        if uneven is not None:
            why[name] = f"the batch of {uneven.shape[0]} ({uneven.name}) does not divide by {devices} devices"
        elif looped:
            why[name] = f"the first dim of {looped}, the batch, cannot be split: a loop runs through it, say"
        else:
            why[name] = f"no parameter has a dim that {devices} devices divide"
    last = f"{model.axis_names[wide[-1]]}={model.axis_sizes[wide[-1]]}"
    for name in ("tensor_parallel", "tensor_parallel_sp", "fsdp_tp", "fsdp_tp_sp"):
        if len(wide) > 1 or not name.startswith("fsdp"):
            why[name] = f"heads, ffn, vocabulary, sequence or batch do not divide by the mesh ({last})"
    reasons: dict[str, list[str]] = {}
    for name, reason in why.items():
        if name not in found:
            reasons.setdefault(reason, []).append(name)
    own = ", or the specs that the program fixes exclude it" if model.graph.constraints or model.graph.regions else ""
    return [f"not compared with {', '.join(names)}: {reason}{own}." for reason, names in reasons.items()]


def _looped_batch(model: Model) -> str:
    """Name of a batch argument whose first dim no axis may split, as where a loop takes one slice in each trip."""
    structure = model.structure
    for argument, tensor in zip(model.program.arguments, model.graph.arguments, strict=True):
        if argument.role is Role.BATCH and argument.shape and structure.cluster_of[tensor] >= 0:
            if structure.dims_of[tensor][0] in structure.clusters[structure.cluster_of[tensor]].blocked:
                return argument.name
    return ""


def _append(found: list[Baseline], baseline: Baseline | None) -> None:
    if baseline is not None:
        found.append(baseline)


def _spatial(model: Model, groups: Groups, data: Sequence[int], space: Sequence[int]) -> Baseline | None:
    """Images split over the batch and over their first spatial dim, parameters whole."""
    if not groups.space or groups.batch is None or not space:
        return None
    plain = restricted(model, groups, "spatial", {p: {} for p in split_parameters(model)}, Stream(data))
    height = groups.space[0]
    if plain is None:
        return None
    parts = math.prod(model.axis_sizes[a] for a in space)
    allowed = dict(plain.allowed)
    found = False
    for cluster in model.structure.clusters:
        of = {groups.of_factor[(cluster.id, f)]: f for f in range(len(cluster.sizes)) if f not in cluster.blocked}
        if not {groups.batch, height} <= set(of) or cluster.sizes[of[height]] % parts:
            continue
        node = model.cluster_node[cluster.id]
        allowed.pop(node, None)
        found |= allow_factors(model, allowed, cluster.id, {of[groups.batch]: data, of[height]: space})
    for op_id, node in model.op_node.items():
        op = model.graph.ops[op_id]
        own = [h.factor for h in op.halos if _group_of(model, groups, op.operands[0], h.dim.source) == height]
        mask = (model.nodes[node].states[:, list(space)] == own[0]).all(axis=1) if own else np.zeros(0, dtype=bool)
        if mask.any():
            allowed[node] = mask
    return Baseline("spatial", allowed) if found else None


def _group_of(model: Model, groups: Groups, tensor: int, dim: int) -> int | None:
    """Return the group of a dim; None for a dim of one, and for a generated value, which no cluster has."""
    cluster = model.structure.cluster_of[tensor]
    factor = model.structure.dims_of[tensor][dim] if cluster >= 0 else -1
    return groups.of_factor[(cluster, factor)] if factor >= 0 else None
