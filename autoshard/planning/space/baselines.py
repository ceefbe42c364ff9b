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
    """Name of a baseline, and a mask of the alternatives that it leaves at each restricted node."""

    name: str
    allowed: dict[int, NDArray[np.bool_]]
    """Mask of the allowed alternatives by node; nodes without a mask are free."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """Mesh axes, by number, that split the dims of the residual stream."""

    batch: Sequence[int] = ()
    """Axes that split the batch, in activations and in the batch's arguments."""
    sequence: Sequence[int] = ()
    """Axes that split the sequence of the residual stream."""
    width: Sequence[int] = ()
    """Axes that split the hidden dim of the residual stream."""
    context: Sequence[int] = ()
    """Members of `sequence` that also split the sequence in the batch's arguments."""


Assignment = Mapping[int, Sequence[int]]
"""Dim -> mesh axes, by number, that split the dim."""


def wide_axes(model: Model, axes: Iterable[int]) -> tuple[int, ...]:
    """Return those of the axes, by number, that have a size above 1, in their order."""
    return tuple(a for a in axes if model.axis_sizes[a] > 1)


def split_parameters(model: Model) -> list[int]:
    """Return the argument positions of the weights, trained or frozen, that belong to a cluster: no scalars."""
    return [
        p
        for p, a in enumerate(model.program.arguments)
        if a.role in WEIGHTS and model.structure.cluster_of[model.graph.arguments[p]] >= 0
    ]


def _blocked_dims(model: Model, tensor: int) -> set[int]:
    """Return the dims of a tensor that no axis may split: of size 1, or blocked in its cluster."""
    cluster = model.structure.clusters[model.structure.cluster_of[tensor]]
    return {d for d, f in enumerate(model.structure.dims_of[tensor]) if f < 0 or f in cluster.blocked}


def spread_over(model: Model, position: int, axes: Sequence[int], taken: Assignment) -> dict[int, tuple[int, ...]]:
    """Split a parameter as FSDP does: along the largest dim that the axes divide, preferably one that is not yet split.

    Fewer axes, the first of them, are used if no dim divides by all. The result maps dims to axes in mesh order, those
    of `taken` included; it equals `taken` if no dim divides by the first axis.

    - `position`: position of the argument.
    - `axes`: mesh axes by number.
    - `taken`: axes that already split the parameter, by dim.
    """
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
    """Return the dim groups that Megatron splits: the inner dim of every matmul pair (heads, ffn) and the vocabulary.

    Parameters are visited in order of first use. Each is split along the dim that its matmul produces, never along the
    hidden dim. It stays whole in these cases:

    - a dim of the parameter is split already;
    - the split would split a neighbour twice (Shoeybi et al. 2019, section 3);
    - a norm reduces along the dim before the next matmul, as along the narrow vector of latent attention;
    - `parts`, the number of shards, does not divide the group's size.
    """
    neighbours: dict[int, set[int]] = {}
    dims: dict[int, list[int]] = {}
    for position in split_parameters(model):
        own = tensor_groups(model.structure, groups.of_factor, model.graph.arguments[position])
        dims[position] = [g for g in own if g is not None]
        for g in dims[position]:
            neighbours.setdefault(g, set()).update(set(dims[position]) - {g})
    chosen: set[int] = set()
    excluded = {groups.hidden, groups.batch, groups.sequence, *_normed(model, groups, dims.values())}
    for position in _by_first_use(model.graph, dims):
        own = dims[position]
        if len(own) < 2 or chosen & set(own):
            continue
        produced = _produced(model, groups, position)
        order = sorted(own, key=lambda g: (g == groups.hidden, g not in produced, own.index(g)))
        for g in order:
            if g not in excluded and not neighbours[g] & chosen and groups.sizes[g] % parts == 0:
                chosen.add(g)
                break
    return chosen


def _normed(model: Model, groups: Groups, dims: Iterable[Sequence[int]]) -> set[int]:
    """Return the groups between two matmuls that have a scale parameter and along which an op reduces.

    `dims` has the groups of each parameter's dims; a parameter with one dim is a scale, others are matrices.
    """
    scales, matmuls = set[int](), Counter[int]()
    for own in dims:
        if len(own) == 1:
            scales.update(own)
        else:
            matmuls.update(set(own))
    reduced: set[int | None] = set()
    for op in model.graph.ops:
        if op.kind == "reduce":
            given, remaining = (
                tensor_groups(model.structure, groups.of_factor, t) for t in (op.operands[0], op.results[0])
            )
            reduced |= set(given) - set(remaining)
    return {g for g in scales & reduced if matmuls[g] > 1}


def _by_first_use(graph: OpGraph, dims: Mapping[int, object]) -> list[int]:
    """Sort parameters by the first op that consumes them, those without one last, then by position.

    `dims` has the argument positions as keys.
    """
    first = {p: next((op.id for op in graph.users[graph.arguments[p]]), len(graph.ops)) for p in dims}
    return sorted(dims, key=lambda p: (first[p], p))


def _produced(model: Model, groups: Groups, position: int) -> set[int]:
    """Return a parameter's groups that are in the result of the first matmul that consumes the parameter's cluster.

    Empty if no dot or convolution does.
    """
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
    """Split the first dim of a parameter that belongs to a `chosen` group and that the axes divide.

    The result maps that dim to all of `axes`, mesh axes by number; it is empty if there is no such dim. `chosen` has
    numbers of dim groups, `position` is the argument's.
    """
    tensor = model.graph.arguments[position]
    parts = math.prod(model.axis_sizes[a] for a in axes)
    for dim, group in enumerate(tensor_groups(model.structure, groups.of_factor, tensor)):
        if group in chosen and model.graph.tensors[tensor].shape[dim] % parts == 0:
            return {dim: tuple(axes)}
    return {}


def argument_baseline(model: Model, name: str, arguments: Mapping[int, Assignment]) -> Baseline | None:
    """Build a baseline from specs of arguments only; the results that replace them have the same specs.

    The solver decides everything else. None if a tensor has no such spec. `arguments` maps argument positions to specs.
    """
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
    """Build a baseline from specs of the parameters and of the residual stream.

    The solver decides everything else. None if the batch does not divide, or if a tensor has no such spec.

    - `parameters`: spec of each parameter, by argument position.
    - `stream`: mesh axes of the residual stream and of the batch.
    - `updated`: spec of each new parameter; default: that of the argument that the result replaces.
    """
    data, context = stream.batch, stream.context
    allowed: dict[int, NDArray[np.bool_]] = {}
    structure = model.structure
    wanted = {model.graph.arguments[p]: spec for p, spec in parameters.items()}
    new_specs = wanted if updated is None else {model.graph.arguments[p]: spec for p, spec in updated.items()}
    for result, argument in structure.ties:
        if argument in new_specs:
            wanted[result] = new_specs[argument]
    held = {structure.cluster_of[tensor] for tensor in wanted}
    for position, argument in enumerate(model.program.arguments):
        tensor = model.graph.arguments[position]
        if argument.role is Role.BATCH and structure.cluster_of[tensor] >= 0 and argument.shape:
            parts, dim = math.prod(model.axis_sizes[a] for a in data), groups.examples.get(position)
            if dim is not None and argument.shape[dim] % parts:
                return None
            if dim is None and structure.cluster_of[tensor] in held:
                continue  # a mask of a parameter, which lies in the same state
            spec: dict[int, Sequence[int]] = {dim: tuple(data)} if data and dim is not None else {}
            wanted[tensor] = spec | ({1: tuple(context)} if context and dim == 0 and len(argument.shape) > 1 else {})
    for tensor, asked in wanted.items():
        if not _allow(model, allowed, tensor, asked):
            return None
    if groups.hidden is not None:
        for cluster in structure.clusters:
            factor_of = {
                groups.of_factor[(cluster.id, f)]: f for f in range(len(cluster.sizes)) if f not in cluster.blocked
            }
            if groups.batch is None or not {groups.batch, groups.hidden} <= set(factor_of) or len(factor_of) > 3:
                continue
            split = {factor_of[groups.batch]: data, factor_of[groups.hidden]: stream.width}
            if groups.sequence in factor_of:
                split[factor_of[groups.sequence]] = stream.sequence  # type: ignore[index]
            allow_factors(model, allowed, cluster.id, split)
    return Baseline(name, allowed)


def _allow(model: Model, allowed: dict[int, NDArray[np.bool_]], tensor: int, spec: Assignment) -> bool:
    """Restrict a tensor's cluster to one spec; return False if the cluster has no such state.

    Adds the mask to `allowed`, or intersects it with the node's mask there. `spec` maps dims to axes.
    """
    factors = model.structure.dims_of[tensor]
    by_factor = {factors[d]: axes for d, axes in spec.items() if axes}
    return allow_factors(model, allowed, model.structure.cluster_of[tensor], by_factor)


def allow_factors(model: Model, allowed: dict[int, NDArray[np.bool_]], cluster: int, spec: Assignment) -> bool:
    """Restrict a cluster to the one state in which `spec` splits its factors; return False if there is none.

    - `allowed`: masks by node, to which the mask is added; a mask that is there is intersected.
    - `cluster`: id of the cluster.
    - `spec`: axes by factor; axes of size 1 are ignored, and all other axes split nothing.

    Nothing changes if False is returned.
    """
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
    """Return the usual baselines that the program's sizes allow.

    They are data parallel, FSDP, spatial, Megatron tensor parallel and FSDP x TP, each TP with and without sequence
    parallelism. Spatial is for convolutions: the last axis splits the height of images, all others the batch.

    Baselines that a batch or a parameter does not allow are left out. The last mesh axis is for tensor parallelism, all
    axes before it are for data; a single axis is used for both. Axes of size 1 are ignored.
    """
    wide = wide_axes(model, range(len(model.axis_sizes)))
    data, tensor = (wide[:-1], wide[-1:]) if len(wide) > 1 else ((), wide)
    split = tensor_parallel_groups(model, groups, math.prod(model.axis_sizes[a] for a in tensor))
    offered = []
    whole = {p: {} for p in split_parameters(model)}
    spread = {p: spread_over(model, p, wide, {}) for p in whole}
    _append(offered, restricted(model, groups, "data_parallel", whole, Stream(wide)))
    if any(spread.values()):
        _append(offered, restricted(model, groups, "fsdp", spread, Stream(wide)))
    _append(offered, _spatial(model, groups, data, tensor) or _spatial(model, groups, (), wide))
    if not split or not tensor:
        return offered
    megatron = {p: split_by_group(model, groups, p, split, tensor) for p in whole}
    _append(offered, restricted(model, groups, "tensor_parallel", megatron, Stream(data)))
    _append(offered, restricted(model, groups, "tensor_parallel_sp", megatron, Stream(data, tensor)))
    if data:
        both = {p: spread_over(model, p, data, megatron[p]) for p in whole}
        _append(offered, restricted(model, groups, "fsdp_tp", both, Stream(data)))
        _append(offered, restricted(model, groups, "fsdp_tp_sp", both, Stream(data, tensor)))
    return offered


def left_out(model: Model, groups: Groups, found: Sequence[str]) -> list[str]:
    """Return sentences about the usual baselines that are not among `found` (names), and the reasons.

    The list is empty without parameters, and on one device, where all baselines are one plan. Baselines with
    one reason share a sentence.
    """
    wide = wide_axes(model, range(len(model.axis_sizes)))
    if not split_parameters(model) or not wide:
        return []
    names = ["data_parallel", "fsdp", "tensor_parallel", "tensor_parallel_sp"]
    names += ["fsdp_tp", "fsdp_tp_sp"] if len(wide) > 1 else []
    reasons: dict[str, list[str]] = {}
    for name in names:
        if name not in found:
            reasons.setdefault(_why_left_out(model, groups, name, wide), []).append(name)
    return [f"not compared with {', '.join(names)}: {reason}." for reason, names in reasons.items()]


def _why_left_out(model: Model, groups: Groups, name: str, wide: Sequence[int]) -> str:
    """Return the first reason for which a usual baseline on the mesh axes `wide` is missing."""
    by_tensor = "tensor" in name or "_tp" in name
    data, tensor = (wide[:-1], wide[-1]) if by_tensor else (wide, wide[-1])
    shards, parts = math.prod(model.axis_sizes[a] for a in data), model.axis_sizes[tensor]
    last = f"{model.axis_names[tensor]}={parts}"
    batch = [(model.program.arguments[position], dim) for position, dim in groups.examples.items()]
    uneven, rows = next(((a, a.shape[dim]) for a, dim in batch if a.shape[dim] % shards), (None, 0))
    if by_tensor and not tensor_parallel_groups(model, groups, parts):
        return f"no heads, ffn or vocabulary divide by the mesh ({last})"
    if uneven is not None:
        return f"the batch of {rows} ({uneven.name}) does not divide by {shards} devices"
    if data and (looped := _looped_batch(model)):
        return f"the first dim of {looped}, the batch, cannot be split: a loop runs through it, say"
    if name == "fsdp" and not any(spread_over(model, p, wide, {}) for p in split_parameters(model)):
        return f"no parameter has a dim that {math.prod(model.axis_sizes)} devices divide"
    if name.endswith("_sp") and groups.sequence is not None and groups.sizes[groups.sequence] % parts:
        return f"the sequence of {groups.sizes[groups.sequence]} does not divide by the mesh ({last})"
    if model.graph.constraints or model.graph.regions:
        return "the program fixes other specs"
    return "a tensor of the program cannot be split so"


def _looped_batch(model: Model) -> str:
    """Return the name of a batch argument whose first dim no axis may split, "" if there is none.

    A loop that consumes one slice in each trip has this effect.
    """
    structure = model.structure
    for argument, tensor in zip(model.program.arguments, model.graph.arguments, strict=True):
        if argument.role is Role.BATCH and argument.shape and structure.cluster_of[tensor] >= 0:
            if structure.dims_of[tensor][0] in structure.clusters[structure.cluster_of[tensor]].blocked:
                return argument.name
    return ""


def _append(found: list[Baseline], baseline: Baseline | None) -> None:
    """Append a baseline unless it is None."""
    if baseline is not None:
        found.append(baseline)


def _spatial(model: Model, groups: Groups, data: Sequence[int], space: Sequence[int]) -> Baseline | None:
    """Build the baseline that splits images over the batch and their first spatial dim, with whole parameters.

    None if the program has no images or no batch, if `space` is empty, or if no tensor can be split so.

    - `groups`: dim groups of the program.
    - `data`: axes that split the batch.
    - `space`: axes that split the height.
    """
    if not groups.space or groups.batch is None or not space:
        return None
    plain = restricted(model, groups, "spatial", {p: {} for p in split_parameters(model)}, Stream(data))
    height = groups.space[0]
    if plain is None:
        return None
    parts = math.prod(model.axis_sizes[a] for a in space)
    allowed = dict(plain.allowed)
    any_split = False
    for cluster in model.structure.clusters:
        factor_of = {
            groups.of_factor[(cluster.id, f)]: f for f in range(len(cluster.sizes)) if f not in cluster.blocked
        }
        if not {groups.batch, height} <= set(factor_of) or cluster.sizes[factor_of[height]] % parts:
            continue
        node = model.cluster_node[cluster.id]
        allowed.pop(node, None)
        any_split |= allow_factors(
            model, allowed, cluster.id, {factor_of[groups.batch]: data, factor_of[height]: space}
        )
    for op_id, node in model.op_node.items():
        op = model.graph.ops[op_id]
        own = [h.factor for h in op.halos if _group_of(model, groups, op.operands[0], h.dim.source) == height]
        mask = (model.nodes[node].states[:, list(space)] == own[0]).all(axis=1) if own else np.zeros(0, dtype=bool)
        if mask.any():
            allowed[node] = mask
    return Baseline("spatial", allowed) if any_split else None


def _group_of(model: Model, groups: Groups, tensor: int, dim: int) -> int | None:
    """Return the group of a dim; None for a dim of size 1, and for a generated tensor, which belongs to no cluster."""
    cluster = model.structure.cluster_of[tensor]
    factor = model.structure.dims_of[tensor][dim] if cluster >= 0 else -1
    return groups.of_factor[(cluster, factor)] if factor >= 0 else None
