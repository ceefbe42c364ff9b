"""The choice of a plan's mesh, and the form's plan on it."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from autoshard.cost import Mesh, Topology, candidate_meshes, make_mesh
from autoshard.errors import InfeasibleError, UserError
from autoshard.planning.forms.eager_memory import eager_excess, eager_seconds, needed_by_eager_torch
from autoshard.planning.forms.export_forms import Form
from autoshard.planning.forms.spec_search import NEAR, SpecSearch
from autoshard.planning.forms.within_form import BestWithin, plan_within
from autoshard.planning.mesh.baseline_mesh import with_baselines
from autoshard.planning.mesh.mesh_attempt import Incumbent, MeshAttempt, MeshAttempts, MeshBest
from autoshard.planning.mesh.mesh_search import MeshSearch, PrunedByBound
from autoshard.planning.mesh.mesh_searcher import MeshOutcome, Searcher
from autoshard.planning.price.reshard_paths import PathTables
from autoshard.planning.record.plan_parts import MeshTried
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.solve.weight_search import SearchResult, Start
from autoshard.planning.space.attention_exchange import check_exchange
from autoshard.planning.space.derived_axes import LEAST_GAIN, STAGE, find_axis_parts
from autoshard.planning.space.plan_options import Limits
from autoshard.planning.space.spec_constraints import check_regions, mesh_text


@dataclasses.dataclass(frozen=True, slots=True)
class EarlierRecipes:
    """Results of other recipes of a program, planned with the same options."""

    rival: Incumbent | None
    """Incumbent that a plan must beat; None if there is none."""
    tables: PathTables
    """Path tables of reshards that all recipes share."""
    stages: int = 0
    """Number of stages of a pipeline whose meshes have an axis of stages; 0 for any other program."""
    meshes: tuple[Mesh, ...] | None = None
    """Meshes to search; None for all."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeshResults:
    """The results of the searches."""

    best: MeshOutcome
    """Fastest result; it may be infeasible if all are."""
    compared: MeshOutcome
    """Result with baselines: on the given or chosen mesh, or on another one if that has none."""
    outcomes: tuple[MeshOutcome, ...]
    """Results on the mesh, and on the mesh with an axis cut if there is one."""
    tried: tuple[MeshTried, ...]
    """Rows of all meshes that the search considered; empty for a given mesh."""
    elsewhere: tuple[MeshBest, ...]
    """Best choices on other meshes, if the mesh was searched."""
    unconstrained_bound_s: float
    """Lower bound in seconds of all plans on other meshes, ignoring the memory limit; infinite for a given mesh."""
    notes: tuple[str, ...] = ()
    """Sentences for the plan on the mesh of the baselines."""


def search_meshes(
    search_on: Searcher,
    given: Mesh | None,
    time_limit: float,
    refine_axes: bool,
    before: EarlierRecipes | None,
    first: "OnOneAxis | None" = None,
) -> MeshResults:
    """Search on the given mesh, else on the best one, and also with an axis cut in two if dims need that.

    - `given`: mesh of the user or of the program; None searches for one.
    - `time_limit`: processor seconds of each solve; with a cut axis the two searches get 60 % and 40 % of it.
    - `refine_axes`: True if an axis may be cut. No axis is cut in a program with constraints or manual regions, nor the
      axis of stages.
    - `before`: results of other recipes; None if there are none.
    - `first`: form's plan on one axis of all devices; None if there is none. A mesh replaces it only if it is faster by
      `NEAR` without the form.

    Raises `PrunedByBound` if bounds show that no plan beats the rival in `before`, and `UserError` as `MeshSearch.run`
    does.
    """
    task, phases, topology = search_on.task, search_on.phases, search_on.topology
    rival, meshes = (None, None) if before is None else (before.rival, before.meshes)
    reading = task.reading
    graph = reading.graph
    check_exchange(task.program, graph, given)
    if given is None:
        noun = "device" if topology.num_devices == 1 else "devices"
        phases.start("meshes", f"looking for the mesh of {topology.num_devices} {noun}")
        kept = None
        if first is not None and (rival is None or first.expected_s < rival.step_s):
            rival, kept = first.as_incumbent(), first.as_attempt()
        trials = MeshAttempts(task, time_limit, rival is not None)
        if kept is not None:
            trials.remember(kept)
        mesh_choice = MeshSearch(trials, phases.progress, rival, kept).run(topology, search_on.crew, meshes)
        chosen = mesh_choice.model.mesh
        if kept is not None and chosen == kept.mesh:
            assert first is not None
            own, bound_s = first.outcome, mesh_choice.unconstrained_bound_s
            return MeshResults(own, own, (own,), first.rows(mesh_choice.tried), mesh_choice.others, bound_s)
    else:
        mesh_choice, chosen = None, given
        check_regions(graph, chosen)
    # Axes that the program names itself stay whole.
    axis_parts = None
    if refine_axes and not graph.constraints and not graph.regions:
        axis_parts = find_axis_parts(graph, reading.structure, reading.groups, chosen)
    if axis_parts is not None and task.stages and chosen.names[axis_parts.axis] == STAGE:
        axis_parts = None
    # The search on the cut mesh starts from the first result, so the first search gets more of the time.
    share = 1.0 if axis_parts is None else 0.6
    if mesh_choice is None:
        if rival is not None:
            _check_bound(MeshAttempts(task, time_limit, hopeless=True), chosen, rival, axis_parts is not None)
        start = None if rival is None else Start(None, rival.weights)
        original = search_on.mesh(chosen, share * time_limit, start)
    else:
        start = Start(mesh_choice.choices, mesh_choice.weights)
        original = search_on.priced(mesh_choice.model, mesh_choice.required, start, share * time_limit)
    best, outcomes = original, (original,)
    if axis_parts is not None:
        refined = search_on.with_parts(axis_parts, original, (1 - share) * time_limit)
        best = refined if refined.is_better_than(original) else original
        outcomes = (original, refined)
    if mesh_choice is None:
        return MeshResults(best, original, outcomes, (), (), math.inf)
    compared = with_baselines(search_on, original, mesh_choice.others, time_limit)
    notes = ()
    if compared is not original:
        notes = (f"this mesh has no baseline; those that are compared are on {mesh_text(compared.model.mesh)}",)
    return MeshResults(
        best, compared, outcomes, mesh_choice.tried, mesh_choice.others, mesh_choice.unconstrained_bound_s, notes
    )


MOST_SAVED = 0.25
"""Share of a step that plans on parts of an axis are assumed to save at most over plans on the whole axis."""


def _check_bound(attempts: MeshAttempts, mesh: Mesh, rival: Incumbent, has_parts: bool) -> None:
    """Raise `PrunedByBound` if a lower bound of the plans on a given mesh shows that none beats the rival.

    - `has_parts`: True if an axis of the mesh may be cut in two; the bound is that of the uncut mesh.
    """
    aim = dataclasses.replace(rival, step_s=rival.step_s / (1 - MOST_SAVED)) if has_parts else rival
    tried = attempts.bound(mesh, aim)
    if tried is not None and not tried.excluded and tried.bound_s is not None:
        raise PrunedByBound((1 - MOST_SAVED) * tried.bound_s if has_parts else tried.bound_s)


@dataclasses.dataclass(frozen=True, slots=True)
class OnOneAxis:
    """The plan of a form that gathers parameters, on a mesh with all devices in one axis."""

    outcome: MeshOutcome
    """Result of the search on the mesh without the form."""
    within: BestWithin
    """The form's plan."""

    @property
    def found(self) -> SearchResult:
        """The plans on the mesh without the form; the form has a plan only if there are some."""
        assert isinstance(self.outcome.found, SearchResult)
        return self.outcome.found

    @property
    def expected_s(self) -> float:
        """Seconds of the form's step, with the expected cost of nearly full memory."""
        return self.within.best.expected_s

    def as_incumbent(self) -> Incumbent:
        """Return the incumbent that another mesh must beat by `NEAR`, which the form may not reach there."""
        return Incumbent((1 - NEAR) * self.expected_s, 1, self.found.weights)

    def as_attempt(self) -> MeshAttempt:
        """Return the form's plan as the trial of its mesh."""
        found, best, model = self.found, self.within.best, self.outcome.model
        on_mesh = MeshBest(
            model.mesh, best.choices, best.outcome, best.tight_s, found.solution, found.bound_s, found.rounds
        )
        return MeshAttempt(
            model.mesh,
            bound_s=found.bound_s,
            best=on_mesh,
            weights=found.weights,
            unconstrained_bound_s=found.unconstrained_bound_s,
            model=model,
            required=self.outcome.required,
        )

    def rows(self, tried: Sequence[MeshTried]) -> tuple[MeshTried, ...]:
        """Return rows of meshes, with the step without the form for this mesh as for all others."""
        own, free_s = mesh_text(self.outcome.model.mesh), self.found.best.outcome.step_time_s
        return tuple(dataclasses.replace(r, step_time_s=free_s) if r.mesh == own else r for r in tried)


def on_one_axis(
    form: Form, search_on: Searcher, limits: Limits, before: EarlierRecipes | None, progress: Callable[[str], None]
) -> OnOneAxis | None:
    """Return the plan of a form that gathers parameters with all devices in one axis, as its users write it.

    None if a bound shows that the recipe's rival is not beaten there, for pipelines, and if the form has no such plan.
    """
    mesh = candidate_meshes(search_on.topology)[0]
    rival = None if before is None else before.rival
    if len(mesh.sizes) != 1 or search_on.task.stages:
        return None
    if rival is not None and MeshAttempts(search_on.task, limits.seconds, True).bound(mesh, rival) is not None:
        return None
    try:
        outcome = search_on.mesh(mesh, limits.seconds)
        if not isinstance(outcome.found, SearchResult):
            return None
        search_on.phases.start("form", f"planning within what the {form.name} form can hold on {mesh_text(mesh)}")
        groups = search_on.task.reading.groups
        within = plan_within(form, outcome.model, groups, outcome.found, outcome.required, limits, progress)
    except UserError:  # the constraints suit another mesh, or the form holds no plan on this one
        return None
    return OnOneAxis(outcome, within)


def better_within(
    first: OnOneAxis | None,
    searched: MeshResults,
    within: Callable[[], BestWithin],
    written: Callable[[MeshOutcome, BestWithin], Plan],
) -> tuple[MeshResults, BestWithin]:
    """Return the results of the meshes with the form's plan on the chosen one, or with `first` if that is as good.

    The plans are compared by their steps in eager torch if these are known and differ by `LEAST_GAIN`, else by those of
    compiled ops.

    - `within`: plans in the form on the chosen mesh.
    - `written`: writes the form's plan on a mesh.

    Raises `InfeasibleError` if the form has a plan on neither.
    """
    if first is None:
        return searched, within()
    if searched.best is first.outcome:
        return searched, first.within
    try:
        found = within()
        eager = eager_excess(written(searched.best, found), written(first.outcome, first.within))
        if eager is None or abs(eager) <= LEAST_GAIN:
            excess, by = found.best.expected_s / first.expected_s - 1, ""
        else:
            excess, by = eager, " in eager torch"
        if excess < -LEAST_GAIN:
            return searched, found
        verdict = f"within the form {excess:.1%} slower{by}" if excess < math.inf else "too large for eager torch"
    except InfeasibleError:
        verdict = "the form can hold no plan on it"
    results = planned_instead(dataclasses.replace(searched, tried=first.rows(searched.tried)), first.outcome, verdict)
    return results, first.within


def planned_instead(searched: MeshResults, outcome: MeshOutcome, verdict: str) -> MeshResults:
    """Return results in which a mesh is chosen in place of another one.

    - `outcome`: result of the search on the mesh, which has plans.
    - `verdict`: reason for which the mesh that was chosen is not.
    """
    assert isinstance(outcome.found, SearchResult)
    mesh, own = outcome.model.mesh, mesh_text(outcome.model.mesh)
    rows, found = list(searched.tried), outcome.found
    if rows and own not in [row.mesh for row in rows]:
        rows.append(MeshTried(own, mesh.describe(), found.best.outcome.step_time_s, found.bound_s, "chosen"))
    for number, row in enumerate(rows):
        said = verdict if row.verdict == "chosen" else row.verdict
        # The search compared the rest with the mesh that the form slows down.
        said = "not tried within the form" if "slower" in row.verdict else said
        rows[number] = dataclasses.replace(row, verdict="chosen" if row.mesh == own else said)
    rows.sort(key=lambda each: each.mesh != own)
    return dataclasses.replace(searched, best=outcome, compared=outcome, outcomes=(outcome,), tried=tuple(rows))


def faster_in_eager_torch(
    form: Form,
    search_on: Searcher,
    limits: Limits,
    chosen: tuple[MeshResults, BestWithin],
    written: Callable[[MeshOutcome, BestWithin], Plan],
    rival_s: float,
) -> tuple[MeshResults, BestWithin]:
    """Return results on a mesh of two axes whose second one is tensor parallelism if they are faster in eager torch.

    The closed form of eager steps ranks these meshes before they are planned. The best one is planned if it beats the
    rival and the chosen plan by `LEAST_GAIN`. A chosen plan that exceeds the memory of eager torch does not count.
    Otherwise, and for programs without times in eager torch, the result is `chosen`.

    - `chosen`: results of the search, with the form's plan on their best mesh.
    - `written`: writes the form's plan on a mesh.
    - `rival_s`: seconds of the best plan of other recipes; infinite without one.
    """
    searched, within = chosen
    plan = written(searched.best, within)
    own_s = eager_seconds(plan)
    if own_s is None or not form.tensor:
        return chosen
    fits = not needed_by_eager_torch(plan, plan.memory_limit_bytes)
    beaten_by_s = (1 - LEAST_GAIN) * min(rival_s, own_s if fits else math.inf)
    seconds_s, sizes = min(_priced(plan, search_on.topology), key=lambda each: each[0], default=(math.inf, {}))
    if seconds_s >= beaten_by_s:
        return chosen
    try:
        mesh = make_mesh(search_on.topology, sizes)
        outcome = search_on.mesh(mesh, limits.seconds)
        if not isinstance(outcome.found, SearchResult):
            return chosen
        search_on.phases.start("form", f"planning within what the {form.name} form can hold on {mesh_text(mesh)}")
        groups, progress = search_on.task.reading.groups, search_on.phases.progress
        search = SpecSearch(form, outcome.model, groups, outcome.required, limits, progress)
        candidate = search.gathered(outcome.found, (0,))
    except UserError:  # the constraints suit another mesh
        return chosen
    if candidate is None:
        return chosen
    other = BestWithin(candidate, {"for": form.name})
    excess = eager_excess(plan, written(outcome, other))
    if excess is None or excess <= LEAST_GAIN:
        return chosen
    slower = f"within the form {excess:.1%} slower in eager torch"
    return planned_instead(searched, outcome, slower if excess < math.inf else "too large for eager torch"), other


def _priced(plan: Plan, topology: Topology) -> Iterator[tuple[float, dict[str, int]]]:
    """Yield the seconds in eager torch of other meshes with tensor parallelism inside of an island, and their sizes.

    - `plan`: a plan of the step, whose recipe they have.
    """
    devices, parts = topology.num_devices, 2
    while parts <= min(topology.shape[0], devices // 2):
        sizes = {"data": devices // parts, "model": parts}
        if devices % parts == 0 and (dict(plan.mesh), plan.batch_axes) != (sizes, ("data",)):
            seconds = eager_seconds(dataclasses.replace(plan, mesh=sizes, axis_roles={"data": ("batch",)}))
            if seconds is not None:
                yield seconds, sizes
        parts *= 2
