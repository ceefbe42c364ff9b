"""Program of a plan: opened again from its source, or stored in the disk cache."""

from typing import Any

from autoshard.errors import UserError
from autoshard.planning.price.analysed_program import as_planned
from autoshard.planning.record.plan_origin import Source
from autoshard.planning.record.plan_record import Plan
from autoshard.program import Program, open_source, store_program, stored_program


def reopen(
    plan: Plan,
    program: str | None = None,
    entry: str | None = None,
    *,
    kept: bool = False,
    remat: str | None = None,
) -> Program:
    """Open the program of a plan again, with the options of the source in the plan.

    - `program`: new place of the source; None uses the plan's.
    - `entry`: name of the program in a Python file; None uses the plan's.
    - `kept`: as in `open_source`.
    - `remat`: recomputation of the layers in place of the plan's; None leaves it.

    Raises `UserError` for a plan without the source of its program, or a plan that is no single step. Raises it also as
    `open_source` does.
    """
    plan.check_one_step()
    source = plan.source or Source()
    program = program or source.program
    if not program:
        raise UserError(
            f"the plan of {plan.program_name} does not say where its program is: name it with --program "
            "(in Python, pass the program)."
        )
    recipe = source.recipe
    options: dict[str, Any] = source.options
    if remat is not None and recipe is not None and "remat" in recipe:
        recipe = {**recipe, "remat": remat}
    elif remat is not None:
        options = {**options, "remat": remat}
    return open_source(
        program,
        entry=entry or source.entry,
        kept=kept,
        preferred=source.preferred,
        recipe=recipe,
        **options,
    )


def keep_program(plan: Plan, program: Program) -> None:
    """Store the program of a plan of a Python file in the disk cache, where `kept_program` finds it."""
    if plan.source is not None and plan.source.program.endswith(".py"):
        store_program(_identity(plan), as_planned(program, plan))


def kept_program(plan: Plan) -> Program | None:
    """Return the program of a plan of a Python file as it was planned, without running the file; None if the disk cache
    lacks it.
    """
    return stored_program(_identity(plan))


def _identity(plan: Plan) -> list[Any]:
    """Return the JSON value under which the program of a plan is stored: it tells plans of different programs apart."""
    figures = plan.prediction.step_time_s, plan.prediction.peak_bytes
    return [
        plan.program_fingerprint,
        plan.topology,
        list(plan.roles.items()),
        list(plan.results),
        plan.choices,
        figures,
    ]
