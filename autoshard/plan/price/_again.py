"""A plan's choices on its program, priced once more as they were priced when it was made."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Bill, Topology, make_mesh, said_calibration
from autoshard.errors import UserError
from autoshard.plan.model._model import Model
from autoshard.plan.price._bill import bill_of
from autoshard.plan.price._predict import evaluate
from autoshard.plan.price._reading import Reading, build_model, read_program
from autoshard.plan.record._plan import Plan
from autoshard.program import Program


def price_again(plan: Plan, program: Program, reading: Reading) -> tuple[Model, NDArray[np.int64]]:
    """The plan's model and choices, with the figures that it was made with.

    Raises `UserError` for a plan that does not hold its choices (made before they were kept, or by another version),
    and for one that they do not price as it says.
    """
    mesh = make_mesh(Topology.parse(plan.topology), plan.mesh)
    figures = said_calibration(
        mesh.topology.chip.name, plan.provenance.get("learned"), plan.provenance.get("xla_flags")
    )
    staged = "stage_axis" in plan.provenance
    model = build_model(program, reading, mesh, plan.memory_limit_bytes, figures, staged=staged)
    said = [int(word) if word.isdecimal() and len(word) < 10 else -1 for word in plan.choices.split()]
    choices = np.array(said, dtype=np.int64)
    again = "plan it again with this version of autoshard."
    if len(said) != len(model.nodes) or not all(0 <= c < len(n.states) for c, n in zip(said, model.nodes, strict=True)):
        raise UserError(f"the plan of {plan.program_name} does not hold the choices that explain it; {again}")
    step = evaluate(model, choices).step_time_s
    if mesh.topology.traits.shares_machine and "@" not in plan.topology:
        cores = mesh.topology.host_cores
        again = (
            f"it may have been made where there are not {cores} cores, as here; plan for {plan.topology}@{cores}, say."
        )
    if abs(step - plan.prediction.step_time_s) > 1e-6 * step:
        raise UserError(
            f"the plan of {plan.program_name} predicts {plan.prediction.step_time_s:.6g} s a step, but its choices are "
            f"priced at {step:.6g} s now; {again}"
        )
    return model, choices


def plan_bills(program: Program, plans: Sequence[Plan]) -> list[Bill]:
    """What a step of each plan of one program does. Raises as `price_again` does."""
    if not plans:
        return []
    reading = read_program(program, Topology.parse(plans[0].topology).backend)
    return [bill_of(*price_again(plan, program, reading)) for plan in plans]
