"""Steps with a part that PyTorch/XLA alone cannot be given a plan for: they cost themselves, and no step after them."""

from typing import Any

import pytest


pytest.importorskip("torch_xla")
from tests.exec.torch_xla_hook import torch_xla_modes as modes  # noqa: E402
from tests.exec.torch_xla_hook.torch_xla_staying_cases import CASES, UNHOOKED_FAILS  # noqa: E402


MODULE = "torch_xla_staying_cases"


@pytest.fixture(scope="module")
def planned() -> dict[str, dict[str, Any]]:
    """Run all cases under auto-sharding, in one process."""
    return modes.run_mode("auto", MODULE, *CASES)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_planned_and_equal_eager_torch(planned: dict[str, Any], name: str):
    row = planned[name]
    off, where = modes.worst(row["numbers"], modes.eager(MODULE, name))
    assert off < 1e-5, where
    assert row["warned"] == [] and row["plans"] >= 1


@pytest.mark.full
def test_they_cost_no_execution_or_read_and_one_program_for_each_plan(planned: dict[str, Any]):
    names = [name for name in CASES if name not in UNHOOKED_FAILS]
    for name, row in modes.run_mode("spmd", MODULE, *names).items():
        modes.check_costs(planned[name], row)
