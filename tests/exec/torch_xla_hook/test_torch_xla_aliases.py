"""Aliases that a script uses across planned steps: writes to one are visible in the other, in both directions."""

import functools
from typing import Any

import pytest


pytest.importorskip("torch_xla")
from tests.exec.torch_xla_hook import torch_xla_modes as modes  # noqa: E402
from tests.exec.torch_xla_hook.torch_xla_alias_cases import CASES  # noqa: E402


MODULE = "torch_xla_alias_cases"

FEW = ("state_dict", "averages", "table_views", "layer_caches", "turned", "written_after_inference", "optimizer_state")
FEW += ("swapped", "flat_parameters", "planned_again", "loaded", "shifted")
"""Cases of each kind of alias, which every run of the tests includes."""
FURTHER = tuple(name for name in CASES if name not in FEW)

SETTINGS = ({"XLA_AUTO_USE_GROUP_SHARDING": "0"}, {"XLA_AUTO_PLAN_AHEAD": "1"}, {"XLA_AUTO_SPMD_MESH": "8"})


@functools.cache
def planned(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Run cases under auto-sharding, in one process."""
    return modes.run_mode("auto", MODULE, *names)


def check(name: str, row: dict[str, Any]) -> None:
    off, where = modes.worst(row["numbers"], modes.eager(MODULE, name))
    assert off < 1e-5, where
    assert row["warned"] == [] and row["plans"] >= 1


@pytest.mark.parametrize(
    ("together", "name"),
    [*((FEW, name) for name in FEW), *(pytest.param(FURTHER, name, marks=pytest.mark.full) for name in FURTHER)],
)
def test_planned_steps_equal_eager_torch(together: tuple[str, ...], name: str):
    check(name, planned(together)[name])


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: next(iter(setting)))
def test_planned_steps_equal_eager_torch_under_other_settings(setting: dict[str, str]):
    for name, row in modes.run_mode("auto", MODULE, *CASES, **setting).items():
        check(name, row)


@pytest.mark.full
def test_aliases_cost_no_execution_and_few_compilations():
    """Allow three compilations for each plan: its own program and the next ones with split data."""
    for together in (FEW, FURTHER):
        found = planned(together)
        for name, row in modes.run_mode("spmd", MODULE, *together).items():
            assert found[name]["executions"] <= row["executions"], name
            assert found[name]["compiles"] <= row["compiles"] + 3 * found[name]["plans"], name
