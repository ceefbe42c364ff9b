"""What other compiler flags would gain for a plan that was made."""

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import FLAG_SETS, Calibration, flag_set, with_flags
from autoshard.errors import UserError
from autoshard.plan.model._model import Model
from autoshard.plan.price._bill import bill_of


WORTH_SAYING = 0.02
"""Share of a step that a set of flags must gain to be proposed; less is within the noise of measured steps."""


def flag_gains(model: Model, choices: NDArray[np.int64], plain: Calibration) -> dict[str, float]:
    """Seconds of a step by each set of flags that makes a plan's step shorter by `WORTH_SAYING`; empty off TPUs.

    `plain` has the figures without flags. The plan stays as it is; made for those flags it may gain more.
    """
    chip = model.mesh.topology.chip
    if not chip.traits.compiles_ahead:
        return {}
    bill, now = None, 0.0
    found = {}
    for name in FLAG_SETS:
        try:
            flagged = with_flags(plain, flag_set(name, chip))
        except UserError:
            continue  # a set that the chip cannot run
        if name == "default" or not flagged.figures:
            continue
        if bill is None:
            bill = bill_of(model, choices)
            now = bill.seconds(model.compute.calibration)
        step = bill.seconds(flagged.calibration)
        if step < (1.0 - WORTH_SAYING) * now:
            found[name] = step
    return found
