"""Random scripts: every tensor that a script can reach is as in eager torch, and what shares storage still does.

Three scripts, and 26 in full; `experiments/torch_xla/torch_xla_random.py` runs more.
"""

import functools
from typing import Any

import pytest


pytest.importorskip("torch_xla")
from tests.exec.torch_xla_hook import torch_xla_modes as modes  # noqa: E402
from tests.exec.torch_xla_hook.torch_xla_random_scripts import CASES, LEAST  # noqa: E402


MODULE = "torch_xla_random_scripts"

# The last one's evaluation cuts a table that its first step splits.
FEW, FURTHER = tuple(CASES)[:3], (*tuple(CASES)[3:25], "seed61")
SCRIPTS = [*((FEW, name) for name in FEW), *(pytest.param(FURTHER, name, marks=pytest.mark.full) for name in FURTHER)]


@functools.cache
def planned(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Run scripts under auto-sharding, in one process."""
    return modes.run_mode("auto", MODULE, *names)


@pytest.mark.parametrize(("together", "name"), SCRIPTS)
def test_a_random_script_equals_eager_torch(together: tuple[str, ...], name: str):
    row = planned(together)[name]
    off, where = modes.worst(row["numbers"], modes.eager(MODULE, name), LEAST)
    assert off < 1e-5, where
    assert row["warned"] == [] and row["plans"] >= 1


@pytest.mark.full
def test_a_read_of_a_computed_value_runs_nothing_more():
    # Their losses are read before the update and again after it, while views of weights are pending.
    names = ("seed75", "seed90")
    unplanned = modes.run_mode("spmd", MODULE, *names)
    for name, row in modes.run_mode("auto", MODULE, *names).items():
        modes.check_costs(row, unplanned[name])
