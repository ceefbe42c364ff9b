"""Scripts of the kinds that people post: numbers of eager torch, planned throughout, at the cost of unplanned ones."""

from typing import Any

import pytest


pytest.importorskip("torch_xla")
from tests.exec.torch_xla_hook import torch_xla_kinds_cases as kinds  # noqa: E402
from tests.exec.torch_xla_hook import torch_xla_loops_cases as loops  # noqa: E402
from tests.exec.torch_xla_hook import torch_xla_modes as modes  # noqa: E402
from tests.exec.torch_xla_hook import torch_xla_networks_cases as networks  # noqa: E402
from tests.exec.torch_xla_hook import torch_xla_posted_cases as posted  # noqa: E402


ENVIRONMENT = {"XLA_AUTO_SPMD_MESH": "8"}

FEW = ("many_lengths", "resumed")
"""Cases that every run of the tests includes."""


ROUGH = {"autocast": 2e-3, "in_bfloat16": 2e-3}
"""Differences that rounding to bfloat16 explains, by case; 1e-5 for the others."""


def name_of(module: Any) -> str:
    return module.__name__.rpartition(".")[2]


def check(module: Any, name: str, row: dict[str, Any]) -> None:
    if name not in module.UNHOOKED_DIFFERS:
        off, where = modes.worst(row["numbers"], modes.eager(name_of(module), name))
        assert off < ROUGH.get(name, 1e-5), (name, where)
    assert row["warned"] == [] and row["plans"] >= 1


def test_some_scripts_equal_eager_torch_in_few_programs():
    rows = modes.run_mode("auto", name_of(posted), *FEW, **ENVIRONMENT)
    for name, row in rows.items():
        check(posted, name, row)
    # Twelve steps of ten lengths: a program for each, one for the planned first step, and one for each plan.
    assert rows["many_lengths"]["plans"] <= 2 and rows["many_lengths"]["compiles"] <= 13


@pytest.mark.full
@pytest.mark.parametrize("module", [posted, kinds, loops, networks], ids=name_of)
def test_all_scripts_equal_eager_torch_and_cost_no_more_than_unplanned(module: Any):
    rows = modes.run_mode("auto", name_of(module), *module.CASES, **ENVIRONMENT)
    unplanned = modes.run_mode("spmd", name_of(module), *module.CASES, **ENVIRONMENT)
    for name, row in rows.items():
        check(module, name, row)
        theirs = unplanned[name]
        assert row["executions"] <= theirs["executions"], name
        assert row["bytes"] <= theirs["bytes"], name
        assert row["reads"] <= theirs["reads"] + module.READS.get(name, 0), name
        assert row["compiles"] <= theirs["compiles"] + row["plans"] + module.CUT.get(name, 0), name
        if name in module.UNHOOKED_DIFFERS:
            assert modes.worst(row["numbers"], theirs["numbers"])[0] < 1e-4, name
