"""What other compiler flags would gain for a plan that was made."""

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import FLAG_SETS, Calibration, flag_set, with_flags
from autoshard.errors import UserError
from autoshard.plan.model._model import Model
from autoshard.plan.price._predict import evaluate
from autoshard.plan.price._reading import Reading, build_model


WORTH_SAYING = 0.02
"""Share of a step that a set of flags must gain to be proposed; less is within the noise of measured steps."""


def flag_gains(reading: Reading, model: Model, choices: NDArray[np.int64], plain: Calibration) -> dict[str, float]:
    """Seconds of a step by each set of flags that makes a plan's step shorter by `WORTH_SAYING`; empty off TPUs.

    `plain` has the figures without flags. The plan stays as it is; made for those flags it may gain more.
    """
    chip = model.mesh.topology.chip
    now = evaluate(model, choices).step_time_s
    found = {}
    for name in FLAG_SETS if chip.traits.compiles_ahead else ():
        try:
            flagged = with_flags(plain, flag_set(name, chip))
        except UserError:
            continue  # a set that the chip cannot run
        if name == "default" or not flagged.figures:
            continue
        again = build_model(model.program, reading, model.mesh, 1 << 62, flagged.calibration)
        step = evaluate(again, choices).step_time_s
        if step < (1.0 - WORTH_SAYING) * now:
            found[name] = step
    return found
