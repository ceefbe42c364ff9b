"""Search over the specs of arguments that an export form can express: local changes, splits by hand, gathers."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.planning.forms.export_forms import (
    Form,
    Rest,
    copied_specs,
    divides_work,
    expressible_specs,
    gathered_specs,
)
from autoshard.planning.forms.gathered_parameters import gathered_candidate
from autoshard.planning.forms.propagated_specs import Propagation, needs_pins
from autoshard.planning.forms.spec_changes import SpecChanges
from autoshard.planning.price.evaluate import evaluate, tensor_spec
from autoshard.planning.record.spec import Spec
from autoshard.planning.solve.weight_search import Candidate, SearchResult, evaluated_candidate
from autoshard.planning.space.baselines import spread_over, wide_axes
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.user_constraints import Required
from autoshard.program import WEIGHTS, Role
from autoshard.solver import processor_seconds


TRIES = 200
"""Most sets of specs that are priced for one plan with DTensor's propagation. The limit counts work, not time, so that
the same input gives the same plan.
"""
HEARD = 60
"""Most sets of specs that are completed by XLA's propagation, which takes longer; it replaces `TRIES` then."""
UNTIED = 30
"""Most sets of specs with optimizer state split otherwise than its parameter that XLA's propagation completes."""
AHEAD = 12
"""Number of best sets from DTensor's propagation that XLA's propagation then completes."""
RUN = 8
"""Most sets of specs that are priced as a form that gathers runs them, once the search is over."""

NEAR = 0.02
"""Share of a certified bound for all plans by which a plan may be slower to end the search.

The rest of the search takes up to a minute, and cannot save more than this share.
"""

SLOW = 1.5
"""Multiple of the certified bound for all plans from which a search is repeated from another start."""


def is_near(candidate: Candidate, found: SearchResult) -> bool:
    """Return True if a candidate fits and is within `NEAR` of the bound that `found` certifies for all plans."""
    return candidate.fits and candidate.expected_s <= found.bound_s * (1 + NEAR)


def rank(candidate: Candidate) -> tuple[bool, float, int]:
    """Return the sort key of a candidate: those that fit come first, by expected seconds and then peak; others by peak
    bytes.
    """
    peak = candidate.outcome.peak_bytes
    return not candidate.fits, round(candidate.expected_s, 12) if candidate.fits else float(peak), peak


class SpecSearch:
    """Local search over specs of arguments: it changes one argument with those of a similar name, or one dim group, at
    a time.
    """

    def __init__(
        self,
        form: Form,
        model: Model,
        groups: Groups,
        required: Required,
        limits: Limits,
        progress: Callable[[str], None],
    ) -> None:
        """Start a search that ends after the processor seconds of `limits`, or after `HEARD` or `TRIES` sets."""
        self.form, self.model, self.groups, self.required = form, model, groups, required
        self.limits, self.progress = limits, progress
        self.until = processor_seconds() + limits.seconds
        self.propagation = Propagation(model, form.rest)
        self.changes = SpecChanges(form, model, groups, required)
        self.roles, self.shapes = self.changes.roles, self.changes.shapes
        self.tensors, self.pinned = self.changes.tensors, self.changes.pinned
        self.allowance = self.tries = HEARD if form.rest is Rest.XLA else TRIES
        self.tried: dict[tuple[tuple[str, Spec | None], ...], Candidate | None] = {}
        self.best: Candidate | None = None

    def run(self, found: SearchResult) -> Candidate | None:
        """Return the best candidate, even if it does not fit; None if no set of specs gives one.

        The search ends with a start or a pass that is near the certified bound of all plans.

        The starts are the specs of all choices in `found`, replication and splits of the batch by hand. Under XLA's
        propagation there are the results of `ahead`, or of the search with state split like its parameter, too.
        """
        starts = [self.specs(start.choices) for start in (found.best, *found.baselines.values())]
        starts += [*self.by_hand(), *(self.specs(start.choices) for start in found.fitting)]
        starts.append({name: Spec.replicated(len(self.shapes[name])) for name in self.tensors})
        self.price_specs(starts[0])
        followed = self.with_state_like_parameters(found)
        for specs in followed:
            self.price_specs(specs)
        for specs in starts[1:]:
            if self.form.gathers or not self.is_near(found):  # `as_run` compares all starts
                self.price_specs(specs)
        if not self.is_near(found):
            if self.form.rest is Rest.XLA and not followed:
                for specs in self.ahead(starts, found):
                    self.price_specs(specs)
            if not self.is_near(found):
                self.local_search(found)
            if self.best is not None and not (self.best.fits and self.best.expected_s < SLOW * found.bound_s):
                self.search_again(found)
        return self.as_run(starts) if self.form.gathers else self.best

    def is_near(self, found: SearchResult | None) -> bool:
        """Return True if the best candidate is near the bound that `found` certifies (`is_near`)."""
        return self.best is not None and found is not None and is_near(self.best, found)

    def with_state_like_parameters(self, found: SearchResult) -> list[dict[str, Spec]]:
        """Return the best specs of a form without specs of optimizer state, whose state is split like its parameter.

        Such a form has far fewer changes to try, and a form with specs of state can express all its plans. The sets
        that it priced count as tried. Empty for forms without specs of state, without state, and near the bound.
        """
        state = [name for name, role in self.roles.items() if role == Role.OPTIMIZER_STATE]
        if self.form.rest is not Rest.XLA or not self.form.state or not state or self.is_near(found):
            return []
        like = dataclasses.replace(self.form, state=False)
        search = SpecSearch(like, self.model, self.groups, self.required, self.limits, self.progress)
        best = search.run(found)
        self.tried |= search.tried
        self.allowance, self.until = UNTIED, processor_seconds() + self.limits.seconds
        self.tries = len(self.tried) + self.allowance
        return [] if best is None else [self.specs(best.choices)]

    def search_again(self, found: SearchResult) -> None:
        """Search once more, from the splits by hand with the least memory, and keep the better result.

        The best of all starts may be far from good sets of specs, as where activations are split in place of the batch.
        """
        before, keys = self.best, [tuple(self.expressed({**each, **self.pinned}).items()) for each in self.by_hand()]
        priced = [each for each in map(self.tried.get, keys) if each is not None]
        if before is None or not priced:
            return
        self.best = min(priced, key=lambda each: each.outcome.peak_bytes)
        self.tries, self.until = self.tries + self.allowance, self.until + self.limits.seconds
        self.local_search(found)
        self.best = min(before, self.best, key=rank)

    def by_hand(self) -> list[dict[str, Spec]]:
        """Return specs that split the batch over all axes, and nothing else, the optimizer's state, or parameters too.

        A mesh whose axes are cut into parts has no baselines to start from.
        """
        model = self.model
        wide = wide_axes(model, range(len(model.axis_sizes)))
        places = {a.name: p for p, a in enumerate(model.program.arguments)}

        def spec_of(name: str, spread: Collection[str]) -> Spec:
            """Return the spec of an argument, over all axes if it is of the batch or its role is in `spread`."""
            dims: list[tuple[str, ...]] = [()] * len(self.shapes[name])
            given = spread_over(model, places[name], wide, {}) if self.roles[name] in spread else {}
            parts = math.prod(model.axis_sizes[a] for a in wide)
            if self.roles[name] == Role.BATCH and dims and self.shapes[name][0] % parts == 0:
                given = {0: wide}
            for dim, axes in given.items():
                dims[dim] = tuple(model.axis_names[a] for a in axes)
            return Spec(tuple(dims))

        stages = ((), (Role.OPTIMIZER_STATE,), (Role.OPTIMIZER_STATE, *WEIGHTS))
        return [{name: spec_of(name, [str(role) for role in spread]) for name in self.tensors} for spread in stages]

    def gathered(self, found: SearchResult, axes: tuple[int, ...] | None = None) -> Candidate | None:
        """Return the best candidate that fits and splits the batch over some axes, and parameters over every axis; None
        without one.

        Parameters are split along dims that a choice in `found` splits. A hybrid form also copies them over one axis.

        - `axes`: numbers of the axes that split the batch; None for every axis.
        """
        axes = wide_axes(self.model, range(len(self.model.axis_sizes)) if axes is None else axes)
        made, tried = [], []
        starts = [self.expressed(self.specs(start.choices)) for start in (found.best, *found.baselines.values())]
        if self.form.hybrid:
            names, args = self.model.axis_names, (self.shapes, self.roles, self.model.mesh.axes)
            for axis in axes if len(axes) > 1 else ():
                starts.append(copied_specs(self.form, starts[0], *args, [names[a] for a in axes], names[axis]))
        for start in starts:
            specs = self.split_over(start, axes)
            if specs not in tried:
                tried.append(specs)
                made.append(self.gathering(specs, axes))
        return min((each for each in made if each is not None and each.fits), key=rank, default=None)

    def as_run(self, starts: Iterable[Mapping[str, Spec]]) -> Candidate | None:
        """Return the best candidate by its price once the form gathers parameters over the batch's axes; None without
        one.

        At most `RUN` sets of specs are priced so: `starts`, and then the best of the search. Sets that split the batch
        and cannot be gathered count only if there is no other.
        """
        found = sorted(((each, key) for key, each in self.tried.items() if each is not None), key=lambda e: rank(e[0]))
        made, alone, tried = [], [], []
        for given in (*map(self.expressed, starts), *(dict(key) for _, key in found)):
            axes = self.batch_axes(given)
            specs = self.split_over(given, axes)
            if specs not in tried and len(tried) < RUN:
                tried.append(specs)
                (alone if axes else made).append(self.tried.get(tuple(given.items())))
                if axes:
                    made.append(self.gathering(specs, axes))
        of = made if any(each is not None for each in made) else alone
        return min((each for each in of if each is not None), key=rank, default=None)

    def batch_axes(self, given: Mapping[str, Spec | None]) -> tuple[int, ...]:
        """Return the numbers of the axes that split the first dim of an input under given specs."""
        batch = {s.dims[0] for name, s in given.items() if self.roles[name] == Role.BATCH and s and s.dims}
        return tuple(a for a, axis in enumerate(self.model.axis_names) if any(axis in names for names in batch))

    def split_over(self, given: Mapping[str, Spec | None], axes: tuple[int, ...]) -> dict[str, Spec | None]:
        """Return specs in which the form splits parameters over some axes, by number."""
        names = [self.model.axis_names[axis] for axis in axes]
        return gathered_specs(self.form, given, self.shapes, self.roles, self.model.mesh.axes, names)

    def gathering(self, specs: Mapping[str, Spec | None], axes: tuple[int, ...]) -> Candidate | None:
        """Return the candidate in which some axes, by number, split the batch and parameters with given specs.

        None if another axis splits no parameter, as the form would repeat all work along it. None too if the form
        needs split parameters and there are none.
        """
        split = {axis for name, spec in specs.items() if spec and self.roles[name] == "parameter" for axis in spec.axes}
        used = split | {self.model.axis_names[axis] for axis in axes}
        several = {axis for axis, size in self.model.mesh.axes.items() if size > 1}
        if not several <= used or (self.form.splits_parameters and several and not several & split):
            return None
        return gathered_candidate(self.form.name, self.model, self.groups, specs, self.limits, self.required, axes)

    def ahead(self, starts: Iterable[Mapping[str, Spec]], found: SearchResult) -> list[dict[str, Spec]]:
        """Return the specs of the `AHEAD` best candidates under DTensor's propagation, which is faster than XLA's.

        The search for them starts from `starts` and may spend half of the remaining time.
        """
        quick = dataclasses.replace(self.form, rest=Rest.DTENSOR)
        half = dataclasses.replace(self.limits, seconds=(self.until - processor_seconds()) / 2)
        search = SpecSearch(quick, self.model, self.groups, self.required, half, self.progress)
        for specs in starts:
            search.price_specs(specs)
        search.local_search(found)
        candidates = sorted((each for each in search.tried.values() if each is not None), key=rank)
        return [self.specs(each.choices) for each in candidates[:AHEAD]]

    def local_search(self, found: SearchResult | None = None) -> None:
        """Apply changes to the best specs until a pass over all changes improves nothing or the search is spent; report
        each pass. A result near the bound of `found` ends it too, if that is given.
        """
        while self.best is not None and not self.spent:
            before = rank(self.best)
            for change in (*self.changes.by_group(), *self.changes.argument_changes()):
                self.price_specs(change(self.specs(self.best.choices)))
            self.progress(f"{len(self.tried)} sets of specs: step {self.best.outcome.step_time_s:.6g} s")
            if rank(self.best) == before or self.is_near(found):
                break

    @property
    def spent(self) -> bool:
        """True once the search has tried `tries` sets or its processor time is over."""
        return len(self.tried) >= self.tries or processor_seconds() > self.until

    def specs(self, choices: NDArray[np.int64]) -> dict[str, Spec]:
        """Return the specs of arguments with a cluster under choices, by name."""
        return {name: tensor_spec(self.model, choices, tensor) for name, tensor in self.tensors.items()}

    def expressed(self, specs: Mapping[str, Spec]) -> dict[str, Spec | None]:
        """Return specs of arguments as the form expresses them.

        A form that gathers splits all inputs along their examples alike, as pinned if any is: each process computes its
        own.
        """
        given = expressible_specs(self.form, specs, self.shapes, self.roles, self.model.mesh.axes)
        if not self.form.gathers:
            return given
        dims = {self.model.program.arguments[position].name: dim for position, dim in self.groups.examples.items()}
        split = {
            name: spec.of_rank(len(self.shapes[name])).dims[dims[name]] for name in dims if (spec := given.get(name))
        }
        fixed = [split[name] for name in split if name in self.pinned]
        axes = max(fixed or split.values(), key=len, default=())
        parts = math.prod(self.model.mesh.axes[axis] for axis in axes)
        for name in self.tensors:
            if self.roles[name] == Role.BATCH and name not in self.pinned:
                own = dims.get(name, -1)
                own = own if own >= 0 and self.shapes[name][own] % parts == 0 else -1
                given[name] = Spec(tuple(axes if dim == own else () for dim in range(len(self.shapes[name]))))
        return given

    def price_specs(self, specs: Mapping[str, Spec] | None) -> None:
        """Price a set of specs once, as the form expresses it, and store it if it is the best so far.

        Specs that constraints fix replace those of the set. None, or a spent search, does nothing.
        """
        if specs is None or self.spent:
            return
        given = self.expressed({**specs, **self.pinned})
        key = tuple(given.items())
        if key not in self.tried:
            self.tried[key] = self.candidate_of(given)
        candidate = self.tried[key]
        if candidate is not None and (self.best is None or rank(candidate) < rank(self.best)):
            self.best = candidate

    def candidate_of(self, given: Mapping[str, Spec | None]) -> Candidate | None:
        """Return the candidate that the given specs complete to; None if there is none.

        It must be what XLA compiles, need no pins and satisfy the constraints. It must divide the work of the form
        (`divides_work`), and join no states that exclude each other.
        """
        completion = self.propagation.complete(given)
        choices = completion.choices
        if completion.disputed or needs_pins(self.model, choices, self.form.rest) or not self.required.holds(choices):
            return None
        if not divides_work(self.form, given, self.roles, self.model.mesh.axes):
            return None
        try:
            outcome = evaluate(self.model, choices)
        except ValueError:  # two alternatives exclude each other
            return None
        return evaluated_candidate(self.model, self.form.name, choices, outcome, self.limits.memory_bytes)
