"""How decisions are restricted to what a person would write: specs of parameters, the batch, the residual stream."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import OpGraph
from autoshard.plan.model._groups import Groups, tensor_groups
from autoshard.plan.model._model import Model
from autoshard.plan.xla._states import WHOLE
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
