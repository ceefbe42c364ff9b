"""Plans that a person would write, as restrictions of the same decisions; the solver completes them."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import OpGraph
from autoshard.plan.model._groups import Groups, tensor_groups
from autoshard.plan.model._model import Model
from autoshard.plan.xla._states import WHOLE
from autoshard.program import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Baseline:
    """A name, and which alternatives of which nodes it leaves."""

    name: str
    allowed: dict[int, NDArray[np.bool_]]


Assignment = Mapping[int, Sequence[int]]
"""Dim -> mesh axes (by number) that split it."""


def baselines(model: Model, groups: Groups) -> list[Baseline]:
    """Data parallel, FSDP, spatial, Megatron tensor parallel, FSDP x TP, each TP with and without sequence parallelism.

    Spatial, for programs with convolutions: the batch over all axes but the last, the height of images over that.

    The first mesh axis carries data, the last one tensor parallelism (with one axis, all of it does); axes of size 1
    carry nothing. A baseline that the program's sizes do not allow is left out.
    """
    every = _wide(model, range(len(model.axis_sizes)))
    data, tensor = (every[:-1], every[-1:]) if len(every) > 1 else ((), every)
    split = _tensor_parallel_groups(model, groups, math.prod(model.axis_sizes[a] for a in tensor))
    found = []
    whole = {p: {} for p in _parameters(model)}
    spread = {p: _spread(model, p, every, {}) for p in whole}
    _append(found, _restrict(model, groups, "data_parallel", whole, every, ()))
    if any(spread.values()):
        _append(found, _restrict(model, groups, "fsdp", spread, every, ()))
    _append(found, _spatial(model, groups, data, tensor) or _spatial(model, groups, (), every))
    if not split or not tensor:
        return found
    megatron = {p: _split(model, groups, p, split, tensor) for p in whole}
    _append(found, _restrict(model, groups, "tensor_parallel", megatron, data, ()))
    _append(found, _restrict(model, groups, "tensor_parallel_sp", megatron, data, tensor))
    if data:
        both = {p: _spread(model, p, data, megatron[p]) for p in whole}
        _append(found, _restrict(model, groups, "fsdp_tp", both, data, ()))
        _append(found, _restrict(model, groups, "fsdp_tp_sp", both, data, tensor))
    return found


def left_out(model: Model, found: Sequence[str]) -> list[str]:
    """Sentences about the usual baselines that are not among `found` (names), and why.

    None without parameters, and none on one device, where all of them are one plan.
    """
    wide = _wide(model, range(len(model.axis_sizes)))
    if not _parameters(model) or not wide:
        return []
    batch = [a for a in model.program.arguments if a.role is Role.BATCH and a.shape]
    devices = math.prod(model.axis_sizes)
    why = {}
    for name in ("data_parallel", "fsdp"):
        uneven = next((a for a in batch if a.shape[0] % devices), None)
        if uneven is not None:
            why[name] = f"the batch of {uneven.shape[0]} ({uneven.name}) does not divide by {devices} devices"
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


def _wide(model: Model, axes: Iterable[int]) -> tuple[int, ...]:
    """Those axes that split anything: larger than 1."""
    return tuple(a for a in axes if model.axis_sizes[a] > 1)


def _append(found: list[Baseline], baseline: Baseline | None) -> None:
    if baseline is not None:
        found.append(baseline)


def _parameters(model: Model) -> list[int]:
    return [
        p
        for p, a in enumerate(model.program.arguments)
        if a.role is Role.PARAMETER and model.structure.cluster_of[model.graph.arguments[p]] >= 0
    ]


def _blocked_dims(model: Model, tensor: int) -> set[int]:
    cluster = model.structure.clusters[model.structure.cluster_of[tensor]]
    return {d for d, f in enumerate(model.structure.dims_of[tensor]) if f < 0 or f in cluster.blocked}


def _spread(model: Model, position: int, axes: Sequence[int], taken: Assignment) -> dict[int, tuple[int, ...]]:
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


def _tensor_parallel_groups(model: Model, groups: Groups, parts: int) -> set[int]:
    """Megatron's choice: the inner dim of every pair of matmuls (heads, ffn) and the vocabulary, never the hidden one.

    Parameters are taken in order of first use; each is split along the dim its matmul produces unless a dim of it
    is split already or that would split a neighbour twice (Shoeybi et al. 2019, section 3).
    """
    neighbours: dict[int, set[int]] = {}
    dims: dict[int, list[int]] = {}
    for position in _parameters(model):
        own = tensor_groups(model.structure, groups.of_factor, model.graph.arguments[position])
        dims[position] = [g for g in own if g is not None]
        for g in dims[position]:
            neighbours.setdefault(g, set()).update(set(dims[position]) - {g})
    chosen: set[int] = set()
    for position in _by_first_use(model.graph, dims):
        own = dims[position]
        if len(own) < 2 or chosen & set(own):
            continue
        produced = _produced(model, groups, position)
        order = sorted(own, key=lambda g: (g == groups.hidden, g not in produced, own.index(g)))
        for g in order:
            free = not (neighbours[g] & chosen) and g not in (groups.hidden, groups.batch, groups.sequence)
            if free and groups.sizes[g] % parts == 0:
                chosen.add(g)
                break
    return chosen


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


def _split(
    model: Model, groups: Groups, position: int, chosen: set[int], axes: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    tensor = model.graph.arguments[position]
    parts = math.prod(model.axis_sizes[a] for a in axes)
    for dim, group in enumerate(tensor_groups(model.structure, groups.of_factor, tensor)):
        if group in chosen and model.graph.tensors[tensor].shape[dim] % parts == 0:
            return {dim: tuple(axes)}
    return {}


def _restrict(
    model: Model,
    groups: Groups,
    name: str,
    parameters: Mapping[int, Assignment],
    data: Sequence[int],
    sequence: Sequence[int],
) -> Baseline | None:
    """A baseline from specs of the parameters, the axes of the batch, and those of the residual stream's sequence.

    The residual stream is split as the batch is; everything else is left to the solver. None if the batch does not
    divide.
    """
    allowed: dict[int, NDArray[np.bool_]] = {}
    structure = model.structure
    wanted = {model.graph.arguments[p]: spec for p, spec in parameters.items()}
    for result, argument in structure.ties:
        if argument in wanted:
            wanted[result] = wanted[argument]
    for position, argument in enumerate(model.program.arguments):
        tensor = model.graph.arguments[position]
        if argument.role is Role.BATCH and structure.cluster_of[tensor] >= 0 and argument.shape:
            parts = math.prod(model.axis_sizes[a] for a in data)
            if argument.shape[0] % parts:
                return None
            wanted[tensor] = {0: tuple(data)} if data else {}
    for tensor, spec in wanted.items():
        if not _allow(model, allowed, tensor, spec):
            return None
    if groups.hidden is not None:
        for cluster in structure.clusters:
            of = {groups.of_factor[(cluster.id, f)]: f for f in range(len(cluster.sizes)) if f not in cluster.blocked}
            if groups.batch is None or not {groups.batch, groups.hidden} <= set(of) or len(of) > 3:
                continue
            spec = {of[groups.batch]: data}
            if groups.sequence in of:
                spec[of[groups.sequence]] = sequence  # type: ignore[index]
            _allow_factors(model, allowed, cluster.id, spec)
    return Baseline(name, allowed)


def _spatial(model: Model, groups: Groups, data: Sequence[int], space: Sequence[int]) -> Baseline | None:
    """Images split over the batch and over their first spatial dim, parameters whole."""
    if not groups.space or groups.batch is None or not space:
        return None
    plain = _restrict(model, groups, "spatial", {p: {} for p in _parameters(model)}, data, ())
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
        found |= _allow_factors(model, allowed, cluster.id, {of[groups.batch]: data, of[height]: space})
    for op_id, node in model.op_node.items():
        op = model.graph.ops[op_id]
        own = [h.factor for h in op.halos if _group_of(model, groups, op.operands[0], h.dim.source) == height]
        mask = (model.nodes[node].states[:, list(space)] == own[0]).all(axis=1) if own else np.zeros(0, dtype=bool)
        if mask.any():
            allowed[node] = mask
    return Baseline("spatial", allowed) if found else None


def _group_of(model: Model, groups: Groups, tensor: int, dim: int) -> int | None:
    cluster, factor = model.structure.cluster_of[tensor], model.structure.dims_of[tensor][dim]
    return groups.of_factor[(cluster, factor)] if cluster >= 0 and factor >= 0 else None


def _allow(model: Model, allowed: dict[int, NDArray[np.bool_]], tensor: int, spec: Assignment) -> bool:
    factors = model.structure.dims_of[tensor]
    by_factor = {factors[d]: axes for d, axes in spec.items() if axes}
    return _allow_factors(model, allowed, model.structure.cluster_of[tensor], by_factor)


def _allow_factors(model: Model, allowed: dict[int, NDArray[np.bool_]], cluster: int, spec: Assignment) -> bool:
    node = model.cluster_node[cluster]
    state = np.full(len(model.axis_sizes), WHOLE, dtype=np.int64)
    for factor, axes in spec.items():
        state[list(_wide(model, axes))] = factor
    mask = (model.nodes[node].states == state).all(axis=1)
    mask = mask & allowed[node] if node in allowed else mask
    if not mask.any():
        return False
    allowed[node] = mask
    return True


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
    chosen = _tensor_parallel_groups(model, groups, parts) if parts > 1 else set()
    if parts > 1 and not chosen:
        return None
    by_expert = _expert_group(groups, expert_count) if experts else None
    if experts and (by_expert is None or expert_count % math.prod(model.axis_sizes[a] for a in experts)):
        return None
    parameters = {}
    for p in _parameters(model):
        taken = _split(model, groups, p, chosen, tensor) if chosen else {}
        own = () if by_expert is None else _split(model, groups, p, {by_expert}, experts)
        over = spread if own else (*spread, *experts)
        parameters[p] = _spread(model, p, over, taken | dict(own)) if over else taken | dict(own)
    data = (*copies, *spread, *experts)
    found = _restrict(model, groups, name, parameters, data, tensor if parts > 1 else ())
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
            _allow_factors(model, allowed, cluster.id, spec)
    for op_id, node in model.op_node.items():
        of = _op_groups(model, groups, op_id)
        held = holds_head or model.graph.ops[op_id].loop >= 0
        spec = run.spec(groups.batch, of) if held and groups.batch in of else None
        if spec is not None:
            state = np.full(len(model.axis_sizes), WHOLE, dtype=np.int64)
            for factor, axes in spec.items():
                state[list(_wide(model, axes))] = factor
            mask = (model.nodes[node].states == state).all(axis=1)
            if mask.any():
                allowed[node] = mask


def _op_groups(model: Model, groups: Groups, op_id: int) -> dict[int, int]:
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
