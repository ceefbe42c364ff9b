"""Baselines that a person would write, as restrictions of the same decisions."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import OpGraph
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups, tensor_groups
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.program import WEIGHTS, Role


@dataclasses.dataclass(frozen=True, slots=True)
class Baseline:
    """A name, and which alternatives of which nodes it leaves."""

    name: str
    allowed: dict[int, NDArray[np.bool_]]


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """Mesh axes, by number, that split the dims of the residual stream."""

    batch: Sequence[int] = ()
    sequence: Sequence[int] = ()
    width: Sequence[int] = ()
    context: Sequence[int] = ()
    """Axes of the sequence that split it in the batch's arguments as well; they are among `sequence`."""


Assignment = Mapping[int, Sequence[int]]
"""Dim -> mesh axes (by number) that split it."""


def wide_axes(model: Model, axes: Iterable[int]) -> tuple[int, ...]:
    """Those axes that split anything: larger than 1."""
    return tuple(a for a in axes if model.axis_sizes[a] > 1)


def split_parameters(model: Model) -> list[int]:
    """Parameters that may be split, by number of the argument."""
    return [
        p
        for p, a in enumerate(model.program.arguments)
        if a.role in WEIGHTS and model.structure.cluster_of[model.graph.arguments[p]] >= 0
    ]


def _blocked_dims(model: Model, tensor: int) -> set[int]:
    cluster = model.structure.clusters[model.structure.cluster_of[tensor]]
    return {d for d, f in enumerate(model.structure.dims_of[tensor]) if f < 0 or f in cluster.blocked}


def spread_over(model: Model, position: int, axes: Sequence[int], taken: Assignment) -> dict[int, tuple[int, ...]]:
    """FSDP: the largest dim that the axes divide, one not yet split if there is one."""
    tensor = model.graph.arguments[position]
    shape, blocked = model.graph.tensors[tensor].shape, _blocked_dims(model, tensor)
    result = {d: tuple(a) for d, a in taken.items()}
    for count in range(len(axes), 0, -1):
        parts = math.prod(model.axis_sizes[a] for a in axes[:count])
        options = []
        for dim, size in enumerate(shape):
            inner = math.prod(model.axis_sizes[a] for a in taken.get(dim, ()))
            if dim not in blocked and size % (parts * inner) == 0:
                options.append((dim in taken, -size, dim))
        if options:
            dim = min(options)[2]
            result[dim] = tuple(sorted((*axes[:count], *taken.get(dim, ()))))
            return result
    return result


def tensor_parallel_groups(model: Model, groups: Groups, parts: int) -> set[int]:
    """Megatron's choice: the inner dim of every pair of matmuls (heads, ffn) and the vocabulary, never the hidden one.

    Parameters are taken in order of first use; each is split along the dim its matmul produces unless a dim of it
    is split already, that would split a neighbour twice (Shoeybi et al. 2019, section 3), or a norm is taken along it
    on the way to the next matmul: the narrow vector that latent attention makes its heads from stays whole.
    """
    neighbours: dict[int, set[int]] = {}
    dims: dict[int, list[int]] = {}
    for position in split_parameters(model):
        own = tensor_groups(model.structure, groups.of_factor, model.graph.arguments[position])
        dims[position] = [g for g in own if g is not None]
        for g in dims[position]:
            neighbours.setdefault(g, set()).update(set(dims[position]) - {g})
    chosen: set[int] = set()
    never = {groups.hidden, groups.batch, groups.sequence, *_normed(model, groups, dims.values())}
    for position in _by_first_use(model.graph, dims):
        own = dims[position]
        if len(own) < 2 or chosen & set(own):
            continue
        produced = _produced(model, groups, position)
        order = sorted(own, key=lambda g: (g == groups.hidden, g not in produced, own.index(g)))
        for g in order:
            if g not in never and not neighbours[g] & chosen and groups.sizes[g] % parts == 0:
                chosen.add(g)
                break
    return chosen


def _normed(model: Model, groups: Groups, dims: Iterable[Sequence[int]]) -> set[int]:
    """Groups with a scale of their own between two matmuls, along which something is summed or compared."""
    scales, matmuls = set[int](), Counter[int]()
    for own in dims:
        if len(own) == 1:
            scales.update(own)
        else:
            matmuls.update(set(own))
    reduced: set[int | None] = set()
    for op in model.graph.ops:
        if op.kind == "reduce":
            given, left = (tensor_groups(model.structure, groups.of_factor, t) for t in (op.operands[0], op.results[0]))
            reduced |= set(given) - set(left)
    return {g for g in scales & reduced if matmuls[g] > 1}


def _by_first_use(graph: OpGraph, dims: Mapping[int, object]) -> list[int]:
    first = {}
    wanted = {graph.arguments[p]: p for p in dims}
    for op in graph.ops:
        for tensor in op.operands:
            if tensor in wanted:
                first.setdefault(wanted[tensor], op.id)
    return sorted(dims, key=lambda p: (first.get(p, len(graph.ops)), p))


def _produced(model: Model, groups: Groups, position: int) -> set[int]:
    """Groups of a parameter that stand in the result of the first matmul it takes part in."""
    cluster = model.structure.cluster_of[model.graph.arguments[position]]
    for op_id in model.structure.heavy:
        op = model.graph.ops[op_id]
        if op.kind not in ("dot_general", "convolution") or op.rule is None:
            continue
        for k, tensor in enumerate(op.operands):
            if model.structure.cluster_of[tensor] == cluster:
                out = {f for dim in op.rule.results[0] for f in dim}
                dims = [d for d, factors in enumerate(op.rule.operands[k]) if factors and factors[0] in out]
                own = [model.structure.dims_of[tensor][d] for d in dims]
                return {groups.of_factor[(cluster, f)] for f in own if f >= 0}
    return set()


def split_by_group(
    model: Model, groups: Groups, position: int, chosen: set[int], axes: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """The first dim of a parameter that is of a `chosen` group and that the axes divide, split over them."""
    tensor = model.graph.arguments[position]
    parts = math.prod(model.axis_sizes[a] for a in axes)
    for dim, group in enumerate(tensor_groups(model.structure, groups.of_factor, tensor)):
        if group in chosen and model.graph.tensors[tensor].shape[dim] % parts == 0:
            return {dim: tuple(axes)}
    return {}


def held(model: Model, name: str, arguments: Mapping[int, Assignment]) -> Baseline | None:
    """A baseline from specs of arguments alone, and of the results that replace them; everything else is left to the
    solver. None if one has no such spec."""
    wanted = {model.graph.arguments[p]: spec for p, spec in arguments.items()}
    wanted |= {result: wanted[argument] for result, argument in model.structure.ties if argument in wanted}
    allowed: dict[int, NDArray[np.bool_]] = {}
    good = all(_allow(model, allowed, tensor, asked) for tensor, asked in wanted.items())
    return Baseline(name, allowed) if good else None


def restricted(
    model: Model,
    groups: Groups,
    name: str,
    parameters: Mapping[int, Assignment],
    stream: Stream,
    updated: Mapping[int, Assignment] | None = None,
) -> Baseline | None:
    """A baseline from specs of the parameters and of the residual stream, whose batch is split as the batch is.

    New values are computed as `updated` says (as the arguments that they replace, without it). Everything else is left
    to the solver. None if the batch does not divide.
    """
    data, context = stream.batch, stream.context
    allowed: dict[int, NDArray[np.bool_]] = {}
    structure = model.structure
    wanted = {model.graph.arguments[p]: spec for p, spec in parameters.items()}
    new = wanted if updated is None else {model.graph.arguments[p]: spec for p, spec in updated.items()}
    for result, argument in structure.ties:
        if argument in new:
            wanted[result] = new[argument]
    for position, argument in enumerate(model.program.arguments):
        tensor = model.graph.arguments[position]
        if argument.role is Role.BATCH and structure.cluster_of[tensor] >= 0 and argument.shape:
            parts = math.prod(model.axis_sizes[a] for a in data)
            if argument.shape[0] % parts:
                return None
            spec: dict[int, Sequence[int]] = {0: tuple(data)} if data else {}
            wanted[tensor] = spec | ({1: tuple(context)} if context and len(argument.shape) > 1 else {})
    for tensor, asked in wanted.items():
        if not _allow(model, allowed, tensor, asked):
            return None
    if groups.hidden is not None:
        for cluster in structure.clusters:
            of = {groups.of_factor[(cluster.id, f)]: f for f in range(len(cluster.sizes)) if f not in cluster.blocked}
            if groups.batch is None or not {groups.batch, groups.hidden} <= set(of) or len(of) > 3:
                continue
            split = {of[groups.batch]: data, of[groups.hidden]: stream.width}
            if groups.sequence in of:
                split[of[groups.sequence]] = stream.sequence  # type: ignore[index]
            allow_factors(model, allowed, cluster.id, split)
    return Baseline(name, allowed)


def _allow(model: Model, allowed: dict[int, NDArray[np.bool_]], tensor: int, spec: Assignment) -> bool:
    factors = model.structure.dims_of[tensor]
    by_factor = {factors[d]: axes for d, axes in spec.items() if axes}
    return allow_factors(model, allowed, model.structure.cluster_of[tensor], by_factor)


def allow_factors(model: Model, allowed: dict[int, NDArray[np.bool_]], cluster: int, spec: Assignment) -> bool:
    """Leaves a cluster the one state that splits these factors so, and no other; False where it has none."""
    node = model.cluster_node[cluster]
    state = np.full(len(model.axis_sizes), WHOLE, dtype=np.int64)
    for factor, axes in spec.items():
        state[list(wide_axes(model, axes))] = factor
    mask = (model.nodes[node].states == state).all(axis=1)
    mask = mask & allowed[node] if node in allowed else mask
    if not mask.any():
        return False
    allowed[node] = mask
    return True


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
