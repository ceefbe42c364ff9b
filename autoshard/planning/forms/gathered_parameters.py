"""Prices of frameworks that gather split parameters before use, while each process computes its part of the batch."""

import math
from collections.abc import Mapping

from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.record.spec import Spec
from autoshard.planning.solve.mesh_solve import Terms, solve_within
from autoshard.planning.solve.time_weights import even_weights, normalise
from autoshard.planning.solve.weight_search import Candidate, evaluated_candidate
from autoshard.planning.space.baselines import Stream, restricted, split_parameters, wide_axes
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.user_constraints import Required


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

    The solver decides what lies between. None if an axis does not divide the batch, or if the solver completes no
    choice in `SOLVE_S`.
    """
    axes = wide_axes(model, range(len(model.axis_sizes)) if axes is None else axes)
    arguments = model.program.arguments
    parameters = {p: _dims(model, specs.get(arguments[p].name)) for p in split_parameters(model)}
    wanted = restricted(model, groups, name, parameters, Stream(axes))
    if wanted is None or groups.batch is None or groups.sizes[groups.batch] % _parts(model, axes):
        return None
    allowed = dict(wanted.allowed)
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


def _parts(model: Model, axes: tuple[int, ...]) -> int:
    """Return the number of devices along some axes, by number."""
    return math.prod(model.axis_sizes[axis] for axis in axes)


def _dims(model: Model, spec: Spec | None) -> dict[int, tuple[int, ...]]:
    """Return the axes, by number, that split each split dim of a spec."""
    order = list(model.axis_names)
    dims = () if spec is None else spec.dims
    return {dim: tuple(sorted(order.index(axis) for axis in names)) for dim, names in enumerate(dims) if names}
