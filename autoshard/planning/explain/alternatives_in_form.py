"""Prices of a plan within its form if one argument had another spec."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.planning.forms.export_forms import Form, Rest
from autoshard.planning.forms.spec_search import SpecSearch
from autoshard.planning.price.evaluate import Outcome
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import Spec
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.user_constraints import Required
from autoshard.program import Role


COMPLETED = (Rest.XLA, Rest.DTENSOR)
"""Systems that split the rest of a step from any specs of its arguments."""


class WithinForm:
    """Prices of a plan's form with other specs of one argument."""

    def __init__(
        self, form: Form, plan: Plan, model: Model, groups: Groups, required: Required, name: str, seed: int
    ) -> None:
        """Read the specs of the plan's arguments, and the axes that split its batch."""
        self.form, self.model, self.groups, self.required, self.name = form, model, groups, required, name
        self.limits = Limits(plan.memory_limit_bytes, 0.0, seed)
        self.specs = {n: spec.of_rank(len(plan.shapes[n])) for n, spec in plan.arguments.items()}
        self.batch = tuple(list(model.axis_names).index(axis) for axis in plan.batch_axes if axis in model.axis_names)

    def price(self, spec: Spec, node: int, states: NDArray[np.bool_], seconds: float, search: bool) -> Outcome | None:
        """Return the outcome with a spec of the argument; None if the form cannot hold it.

        - `node`, `states`: the argument's node, and the mask of its states that give the spec.
        - `seconds`: processor seconds for the search.
        - `search`: True searches the other arguments' specs too, unless the form gathers parameters; False keeps them.
        """
        # Pins of the argument may hold for its optimizer state too, which is split like it.
        freed = self._state_nodes()
        allowed = {each: mask for each, mask in self.required.allowed.items() if each not in freed} | {node: states}
        required = Required(allowed, self.required.pinned)
        limits = dataclasses.replace(self.limits, seconds=seconds)
        tried = SpecSearch(self.form, self.model, self.groups, required, limits, lambda _: None)
        specs = {name: self.specs[name] for name in tried.tensors} | {self.name: spec}
        if self.form.gathers and self.batch:
            return self._gathered(tried, specs)
        tried.price_specs(specs)
        if search and tried.best is not None:
            tried.local_search()
        return None if tried.best is None else tried.best.outcome

    def _state_nodes(self) -> set[int]:
        """Return the nodes of the optimizer state of the argument."""
        model = self.model
        named = zip(model.program.arguments, model.graph.arguments, strict=True)
        state = [t for a, t in named if a.role is Role.OPTIMIZER_STATE and a.name.endswith(f".{self.name}")]
        clusters = [model.structure.cluster_of[tensor] for tensor in state]
        return {model.cluster_node[cluster] for cluster in clusters if cluster >= 0}

    def _gathered(self, tried: SpecSearch, specs: Mapping[str, Spec]) -> Outcome | None:
        """Return the outcome in which the form gathers parameters over the batch's axes; None if it splits the argument
        otherwise.
        """
        split = tried.split_over(tried.expressed(specs), self.batch)
        own = split[self.name]
        if own is None or own.of_rank(len(specs[self.name].dims)) != specs[self.name]:
            return None
        candidate = tried.gathering(split, self.batch)
        return None if candidate is None else candidate.outcome
