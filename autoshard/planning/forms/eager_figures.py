"""Figures in eager torch of a plan within a form that gathers parameters, and of its baselines in the same form."""

import dataclasses
from collections.abc import Callable, Mapping

from autoshard.planning.forms.eager_memory import EAGER_SHARE, eager_excess, eager_peak, eager_seconds
from autoshard.planning.forms.export_forms import divides_work
from autoshard.planning.forms.spec_search import SpecSearch
from autoshard.planning.record.plan_parts import Prediction
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.solve.weight_search import Candidate
from autoshard.planning.space.derived_axes import LEAST_GAIN


def with_eager_figures(plan: Plan, search: SpecSearch, baselines: Mapping[str, Candidate]) -> Plan:
    """Return a form's plan with its seconds and bytes in eager torch, and those of its baselines.

    A baseline has the figures of its specs as the form expresses them. It has none if the form cannot hold them. The
    plan is unchanged if its own seconds are not known.

    - `search`: search within the form on the mesh of the baselines.
    - `baselines`: choices of the plan's baselines by name.
    """
    own = _predicted(plan, plan.prediction)
    if own.eager_step_time_s is None:
        return plan
    held = {name: as_held_in(plan, search, baselines[name]) for name in plan.baselines if name in baselines}
    rows = {
        name: row if (like := held.get(name)) is None else _predicted(like, row) for name, row in plan.baselines.items()
    }
    share = EAGER_SHARE * plan.memory_limit_bytes
    rows = {
        name: dataclasses.replace(row, fits=row.fits and (row.eager_peak_bytes or 0) <= share)
        for name, row in rows.items()
    }
    return dataclasses.replace(plan, prediction=own, baselines=rows)


def faster_baseline(
    plan: Plan, search: SpecSearch, baselines: Mapping[str, Candidate], written: Callable[[Candidate], Plan]
) -> Candidate | None:
    """Return the form's choice with the specs of a baseline that is faster in eager torch than the plan.

    None if no baseline of the plan's mesh is faster by `LEAST_GAIN`, or if the best one has no such choice that fits.

    - `written`: writes a choice as a plan.
    """
    own_s = eager_seconds(plan)
    if own_s is None:
        return None
    held = [like for each in baselines.values() if (like := as_held_in(plan, search, each)) is not None]
    priced = [(seconds, like) for like in held if (seconds := eager_seconds(like)) is not None]
    seconds_s, like = min(priced, key=lambda each: each[0], default=(own_s, plan))
    if seconds_s >= (1 - LEAST_GAIN) * own_s:
        return None
    axes = tuple(search.model.axis_names.index(axis) for axis in like.batch_axes)
    choice = search.gathering({name: like.arguments[name] for name in search.tensors}, axes)
    if choice is None or not choice.fits:
        return None
    excess = eager_excess(plan, written(choice))
    return choice if excess is not None and excess > LEAST_GAIN else None


def as_held_in(plan: Plan, search: SpecSearch, choice: Candidate) -> Plan | None:
    """Return a plan whose arguments have the specs of another choice, as the form of `search` expresses them.

    All else is that of `plan`. None if devices would repeat work in the form.
    """
    given = search.expressed(search.specs(choice.choices))
    axes = search.batch_axes(given)
    specs = search.split_over(given, axes)
    mesh = search.model.mesh.axes
    if not divides_work(search.form, specs, search.roles, mesh):
        return None
    known = {name: spec for name, spec in specs.items() if spec is not None and name in plan.arguments}
    roles: dict[str, tuple[str, ...]] = {search.model.axis_names[number]: ("batch",) for number in axes}
    return dataclasses.replace(plan, mesh=dict(mesh), arguments={**plan.arguments, **known}, axis_roles=roles)


def _predicted(plan: Plan, prediction: Prediction) -> Prediction:
    """Return a prediction with the seconds and bytes of a plan in eager torch."""
    return dataclasses.replace(
        prediction, eager_step_time_s=eager_seconds(plan), eager_peak_bytes=eager_peak(plan, prediction)
    )
