"""Prices of frameworks that gather split parameters before use, while each process computes its part of the batch."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.planning.forms.independent_examples import own_examples
from autoshard.planning.price.analysed_program import analyse_program
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec
from autoshard.planning.solve.mesh_solve import Terms, solve_within
from autoshard.planning.solve.time_weights import even_weights, normalise
from autoshard.planning.solve.weight_search import Candidate, evaluated_candidate
from autoshard.planning.space.baselines import Stream, restricted, split_parameters, wide_axes
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups
from autoshard.planning.space.named_layouts import groups_of_op
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.user_constraints import Required
from autoshard.program import Program, Role


SOLVE_S = 20.0
"""Processor seconds of the solve that completes one set of specs."""


def gathered_candidate(
    name: str,
    model: Model,
    groups: Groups,
    specs: Mapping[str, Spec | None],
    limits: Limits,
    required: Required,
    axes: tuple[int, ...] | None = None,
) -> Candidate | None:
    """Return the choice in which axes split the batch and parameters have the given specs; None without one.

    - `name`: name of the candidate.
    - `model`, `groups`: the priced program and its dim groups.
    - `specs`: spec of each argument by name; None stands for whole.
    - `limits`: memory for the verdict `fits`, and the seed of the solver.
    - `required`: the user's constraints.
    - `axes`: numbers of the axes that split the batch, while others split parameters alone; None for every axis.

    Each of these axes splits every activation, and every op on one, along the batch alone, since the framework gathers
    parameters whole. The solver decides the other axes, and values without the batch. None if an axis does not divide
    the batch, or if the solver completes no choice in `SOLVE_S`.
    """
    axes = wide_axes(model, range(len(model.axis_sizes)) if axes is None else axes)
    arguments = model.program.arguments
    parameters = {p: _dims(model, specs.get(arguments[p].name)) for p in split_parameters(model)}
    wanted = restricted(model, groups, name, parameters, Stream(axes))
    if wanted is None or groups.batch is None or groups.sizes[groups.batch] % _parts(model, axes):
        return None
    allowed = dict(wanted.allowed)
    _hold_batch(model, groups, allowed, axes)
    for node, mask in required.allowed.items():
        allowed[node] = mask & allowed[node] if node in allowed else mask
        if not allowed[node].any():
            return None
    terms = Terms(None, SOLVE_S, limits.seed, allowed=allowed)
    choices = solve_within(model, normalise(even_weights(model)), terms).choices
    if len(choices) != len(model.nodes):
        return None
    try:
        outcome = evaluate(model, choices)
    except ValueError:  # two alternatives exclude each other
        return None
    return evaluated_candidate(model, name, choices, outcome, limits.memory_bytes)


def _hold_batch(model: Model, groups: Groups, allowed: dict[int, NDArray[np.bool_]], axes: Sequence[int]) -> None:
    """Restrict tensors and ops that have the batch's dim to states in which `axes`, by number, split that dim.

    Otherwise the solver may exchange activations and multiply by split parameters, as tensor parallelism does. Masks
    are added to `allowed`; a tensor or op without such a state stays free.
    """
    factors = {
        model.cluster_node[cluster.id]: f
        for cluster in model.structure.clusters
        for f in range(len(cluster.sizes))
        if f not in cluster.blocked and groups.of_factor[(cluster.id, f)] == groups.batch
    }
    for op_id, node in model.op_node.items():
        own = groups_of_op(model, groups, op_id)
        factors |= {node: own[groups.batch]} if groups.batch in own else {}
    for node, factor in factors.items():
        mask = (model.nodes[node].states[:, list(axes)] == factor).all(axis=1)
        mask = mask & allowed[node] if node in allowed else mask
        if mask.any():
            allowed[node] = mask


def _parts(model: Model, axes: tuple[int, ...]) -> int:
    """Return the number of devices along some axes, by number."""
    return math.prod(model.axis_sizes[axis] for axis in axes)


def _dims(model: Model, spec: Spec | None) -> dict[int, tuple[int, ...]]:
    """Return the axes, by number, that split each split dim of a spec."""
    order = list(model.axis_names)
    dims = () if spec is None else spec.dims
    return {dim: tuple(sorted(order.index(axis) for axis in names)) for dim, names in enumerate(dims) if names}


def with_split_batch(plan: Plan, program: Program, apart: bool) -> Plan:
    """Return the plan with batch arguments split along their dim of examples by all of the plan's `batch_axes`.

    A plan may leave token ids whole, because every device looks all tokens up in some of the columns. A form without
    pins cannot express that: from whole ids every device would compute the whole batch. Arguments that the user
    pinned, that the axes do not divide, or whose other dims they split, stay as they are.

    - `apart`: True for a form whose processes compute their own examples. No other dim of an input is split there, and
      inputs without examples are whole.
    """
    examples = own_examples(program).dims if apart else analyse_program(program, "cpu").groups.examples
    specs = [plan.arguments[a.name].of_rank(len(a.shape)) for a in program.arguments]
    axes = plan.batch_axes or max(
        (specs[position].dims[dim] for position, dim in examples.items()), key=len, default=()
    )
    parts = math.prod(plan.mesh[axis] for axis in axes)
    arguments = dict(plan.arguments)
    for position, (argument, spec) in enumerate(zip(program.arguments, specs, strict=True)):
        dim = examples.get(position)
        divides = dim is not None and argument.shape[dim] % max(parts, 1) == 0
        if argument.role is Role.BATCH and apart:
            own = {dim: axes} if divides else {}
            arguments[argument.name] = Spec(tuple(own.get(each, ()) for each in range(len(argument.shape))))
        elif dim is not None and divides and argument.name not in plan.origin.pinned:
            elsewhere = {axis for other, names in enumerate(spec.dims) if other != dim for axis in names}
            if set(spec.dims[dim]) < set(axes) and elsewhere.isdisjoint(axes):
                arguments[argument.name] = Spec((*spec.dims[:dim], axes, *spec.dims[dim + 1 :]))
    return dataclasses.replace(plan, arguments=arguments)
