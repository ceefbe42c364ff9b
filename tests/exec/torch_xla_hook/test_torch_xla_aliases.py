"""Aliases that a script uses across planned steps: writes to one are visible in the other, in both directions."""

from typing import Any

import pytest


pytest.importorskip("torch_xla")
from tests.exec.torch_xla_hook import torch_xla_modes as modes  # noqa: E402
from tests.exec.torch_xla_hook.torch_xla_alias_cases import CASES  # noqa: E402


MODULE = "torch_xla_alias_cases"

SETTINGS = ({"XLA_AUTO_USE_GROUP_SHARDING": "0"}, {"XLA_AUTO_PLAN_AHEAD": "1"}, {"XLA_AUTO_SPMD_MESH": "8"})


@pytest.fixture(scope="module")
def planned() -> dict[str, dict[str, Any]]:
    """Run all cases under auto-sharding, in one process."""
    return modes.run_mode("auto", MODULE, *CASES)


def check(name: str, row: dict[str, Any]) -> None:
    off, where = modes.worst(row["numbers"], modes.eager(MODULE, name))
    assert off < 1e-5, where
    assert row["warned"] == [] and row["plans"] >= 1


@pytest.mark.parametrize("name", CASES)
def test_planned_steps_equal_eager_torch(planned: dict[str, Any], name: str):
    check(name, planned[name])


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: next(iter(setting)))
def test_planned_steps_equal_eager_torch_under_other_settings(setting: dict[str, str]):
    for name, row in modes.run_mode("auto", MODULE, *CASES, **setting).items():
        check(name, row)


@pytest.mark.full
def test_aliases_cost_no_execution_and_few_compilations(planned: dict[str, Any]):
    """Allow three compilations for each plan: its own program and the next ones with split data."""
    for name, row in modes.run_mode("spmd", MODULE, *CASES).items():
        assert planned[name]["executions"] <= row["executions"], name
        assert planned[name]["compiles"] <= row["compiles"] + 3 * planned[name]["plans"], name
