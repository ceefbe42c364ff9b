"""The decision which programs of a source are planned, and how; all entry points that plan a source make it here."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from autoshard.errors import InfeasibleError, UserError
from autoshard.planning.forms.export_forms import form_named
from autoshard.planning.forms.held_recipes import check_remat, holds_remat
from autoshard.planning.mesh.portfolio import PlanCandidate
from autoshard.planning.plan_builder import PlanResult, Running, make_plan
from autoshard.planning.recipes.recipe_search import plan_recipes
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.space.plan_options import AUTO, PARTS, REMATS, Options, source_choices, with_open_defaults
from autoshard.planning.stages.stage_programs import StageSearch, is_by_stage
from autoshard.program import Program, choices_of, read_choices


class Opener(Protocol):
    """Function that opens a source."""

    def __call__(self, options: Mapping[str, Any], recipe: Mapping[str, Any], /, *, anew: bool) -> Program:
        """Return the program of one recipe.

        - `options`: options of the source; those that were `auto` have the recipe's values.
        - `recipe`: values of the program's own choices.
        - `anew`: True if the source must be traced, even if its program is stored.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class NamedSource:
    """A source as its user names it, with the function that opens it."""

    text: str
    """A file, or `hf:` and a configuration."""
    options: Mapping[str, Any]
    """Options of the source; those that are `auto` are left to the planner."""
    opened: Opener
    entry: str = "program"
    """Name that a Python file gives the program."""


def plan_any(
    program: Program | NamedSource | Callable[..., Program], options: Options, running: Running | None = None
) -> PlanResult:
    """Return the plan of a program, of a source, or of a function that returns a program.

    - A source is planned as a program for each stage if its options or the form ask for that.
    - A source with options that are `auto`, or with choices of its own, is planned for all recipes that may win.
    - A function with `autoshard.choices` is planned for all of them.
    - Any other function is planned for all remat policies, and receives each as text. In the policy `full:12+dots` the
      first 12 layers use `full` and the rest `dots`.
    - Any other source, and a program, is planned as it is.

    Raises `UserError` for options that no plan can satisfy, and `InfeasibleError` if no plan fits the memory limit.
    """
    running = running or Running()
    if isinstance(program, NamedSource):
        return _plan_source(program, options, running)
    if not callable(program):
        return make_plan(program, options, running)
    if own_choices := choices_of(program):
        return plan_recipes(program, own_choices, options, running)[1]
    return plan_recipes(lambda remat: program(remat), {"remat": REMATS}, options, running, of_source=True)[1]


def _plan_source(source: NamedSource, options: Options, running: Running) -> PlanResult:
    """Return the plan of a source: by stage, of the best recipe, or of its one program.

    Recipes are searched if options of the source are open (`auto`) or the program has choices of its own. If no plan
    fits, the memory levers that nobody set are open too (`with_open_defaults`).
    """
    if is_by_stage(source.options, options.form):
        return _plan_by_stage(source, options, running)
    form = None if options.form is None else form_named(options.form)
    if source.options.get("train") and source.options.get("remat") is None and not holds_remat(form, "none"):
        source = dataclasses.replace(source, options={**source.options, "remat": AUTO})
    if source.options.get("remat") != AUTO:
        check_remat(form, source.options.get("remat"))
    own_choices = read_choices(source.text, source.entry)
    asked = source_choices(source.options, options.topology)
    open_choices = source_choices(with_open_defaults(source.options, options.topology), options.topology)
    plain = None if asked or own_choices else {name: values[0] for name, values in open_choices.items()}

    def make(**recipe: Any) -> Program:
        """Open the source with a recipe: values of open options join the source's options, others go to the program."""
        if recipe == plain:
            return source.opened(source.options, {}, anew=False)
        chosen = {name: value for name, value in recipe.items() if name in open_choices}
        own = {name: value for name, value in recipe.items() if name in own_choices}
        return source.opened({**source.options, **chosen}, own, anew=False)

    if plain == {}:
        return make_plan(make(), options, running)
    kind = {"of_source": not own_choices, "first_if_fits": plain is not None}
    if plain is None:
        try:
            return plan_recipes(make, {**asked, **own_choices}, options, running, **kind)[1]
        except InfeasibleError:
            if open_choices.keys() == asked.keys():
                raise
    return plan_recipes(make, {**open_choices, **own_choices}, options, running, **kind)[1]


def _plan_by_stage(source: NamedSource, options: Options, running: Running) -> PlanResult:
    """Return the fastest cut of a torch module into a program for each stage, see `StageSearch`.

    Raises `UserError` for a program that is no torch module or cannot be cut, and `InfeasibleError` if no cut fits the
    memory limit.
    """
    if running.save_problem is not None:
        raise UserError("--save-problem is for one program; leave it out with a program for each stage.")
    unstaged = {**source.options, **dict.fromkeys(PARTS)}
    results: list[PlanResult] = []
    wall: dict[str, float] = {}

    def opened(**more: Any) -> Program:
        """Open the source without its options of stages, and with `more` options."""
        return source.opened({**unstaged, **more}, {}, anew=True)

    def sharded(program: Program, inner: Options) -> Plan:
        """Plan one program on its part of the devices, add its wall times, and return its plan."""
        results.append(make_plan(program, inner, running))
        for phase, seconds in results[-1].wall_s.items():
            wall[phase] = wall.get(phase, 0.0) + seconds
        return results[-1].plan

    plan = StageSearch(opened, sharded, source.options, options, running.progress or (lambda _: None)).run()
    candidate = PlanCandidate("plan", "the fastest cut into stages", plan)
    return PlanResult(plan, wall, {}, (candidate,), results[-1].weights)
