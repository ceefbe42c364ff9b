"""MaxText's shardings: a use for each axis of the mesh, from which MaxText's own rules split every tensor."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.solve.mesh_solve import Terms, solve_within
from autoshard.planning.solve.time_weights import even_weights, normalise
from autoshard.planning.solve.weight_search import Candidate, evaluated_candidate
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups
from autoshard.planning.space.named_layouts import Uses, stated
from autoshard.planning.space.plan_options import Limits


NAME = "maxtext"
"""Name of the form, of its layout, and of its entry in the provenance of a plan."""
USES = ("expert", "data", "fsdp", "tensor", "context")
"""Uses of an axis that the provenance of a plan may record."""
PRICED_USES = ("data", "fsdp", "tensor")
"""Uses of an axis that can be priced."""
SOLVE_S = 20.0
"""Time limit, in processor seconds, to complete one of MaxText's shardings."""


def maxtext_uses(plan: Plan) -> dict[str, str]:
    """Return the use of each axis of a plan by name, in MaxText's words: pipeline, expert, data, fsdp, tensor or
    context.
    """
    return {axis: _use(plan, axis) for axis in plan.mesh}


def _use(plan: Plan, axis: str) -> str:
    """Return the use of one axis: that of the plan's provenance, else the first that fits its specs and axis roles.

    The order is pipeline, expert, batch, tensor (heads, ffn), context. An axis of the batch is `fsdp` if it also splits
    weights or state, else `data`. All else is `tensor`.
    """
    recorded = plan.origin.form_axes.get(axis)
    if recorded in USES:
        return recorded
    batch = [spec for name, spec in plan.arguments.items() if plan.roles[name] == "batch" and spec.dims]
    stored = [
        name for name in plan.arguments
        if (plan.is_weight(name) or plan.roles[name] == "optimizer_state") and axis in plan.arguments[name].axes
    ]  # fmt: skip
    groups = set(plan.axis_roles.get(axis, ()))
    if plan.pipeline is not None and "stage" in groups:
        return "pipeline"
    if "experts" in groups:
        return "expert"
    if "batch" in groups or any(axis in spec.dims[0] for spec in batch):
        return "fsdp" if stored else "data"
    if groups & {"heads", "kv heads", "ffn"}:
        return "tensor"
    if "sequence" in groups or any(axis in dim for spec in batch for dim in spec.dims[1:]):
        return "context"
    return "tensor"


def maxtext_candidate(
    model: Model,
    groups: Groups,
    uses: Mapping[str, str],
    memory_limit: int,
    limit: int | None = None,
    seed: int = 0,
) -> Candidate | None:
    """Return MaxText's sharding with these uses of the axes, completed by the solver; None if it cannot be priced.

    - `model`, `groups`: the priced program and its dim groups.
    - `uses`: use of each axis by its name; others than `PRICED_USES` give None.
    - `memory_limit`: bytes of one device for the verdict `fits`.
    - `limit`: bytes for the solver; None for no limit.
    - `seed`: seed of the solver.

    None also if sizes do not divide, or if the solver completes no choice in `SOLVE_S`.
    """
    if not set(uses.values()) <= set(PRICED_USES):
        return None
    axes = {use: [k for k, axis in enumerate(model.axis_names) if uses[axis] == use] for use in PRICED_USES}
    wanted = stated(model, groups, NAME, Uses(axes["data"], axes["fsdp"], axes["tensor"]))
    if wanted is None:
        return None
    terms = Terms(limit, SOLVE_S, seed, allowed=wanted.allowed)
    choices = solve_within(model, normalise(even_weights(model)), terms).choices
    if len(choices) != len(model.nodes):
        return None
    try:
        outcome = evaluate(model, choices)
    except ValueError:
        return None
    return evaluated_candidate(model, NAME, choices, outcome, memory_limit)


def maxtext_candidates(model: Model, groups: Groups, limits: Limits) -> Iterator[tuple[Candidate, dict[str, Any]]]:
    """Yield MaxText's shardings for every assignment of `PRICED_USES` to the axes that can be priced, each with its
    entry for the provenance.
    """
    for uses in itertools.product(PRICED_USES, repeat=len(model.axis_names)):
        named = dict(zip(model.axis_names, uses, strict=True))
        candidate = maxtext_candidate(model, groups, named, limits.memory_bytes, limits.memory_bytes, limits.seed)
        if candidate is not None:
            yield candidate, {NAME: named}
