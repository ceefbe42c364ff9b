"""Scripts of the kinds that people post: numbers of eager torch, planned throughout, at the cost of unplanned ones."""

from typing import Any

import pytest


pytest.importorskip("torch_xla")
from tests.exec.torch_xla_hook import torch_xla_modes as modes  # noqa: E402
from tests.exec.torch_xla_hook.torch_xla_posted_cases import CASES, CUT, UNHOOKED_DIFFERS  # noqa: E402


MODULE = "torch_xla_posted_cases"
ENVIRONMENT = {"XLA_AUTO_SPMD_MESH": "8"}

FEW = ("many_lengths", "moved_to_other", "per_sample", "resumed")
"""Cases that every run of the tests includes."""


def check(name: str, row: dict[str, Any]) -> None:
    if name not in UNHOOKED_DIFFERS:
        off, where = modes.worst(row["numbers"], modes.eager(MODULE, name))
        assert off < 1e-5, (name, where)
    assert row["warned"] == [] and row["plans"] >= 1


def test_some_scripts_equal_eager_torch_in_few_programs():
    rows = modes.run_mode("auto", MODULE, *FEW, **ENVIRONMENT)
    for name, row in rows.items():
        check(name, row)
    # Twelve steps of ten lengths: a program for each, one for the planned first step, and one for each plan.
    assert rows["many_lengths"]["plans"] <= 2 and rows["many_lengths"]["compiles"] <= 13


@pytest.mark.full
def test_all_scripts_equal_eager_torch_and_cost_no_more_than_unplanned():
    rows = modes.run_mode("auto", MODULE, *CASES, **ENVIRONMENT)
    unplanned = modes.run_mode("spmd", MODULE, *CASES, **ENVIRONMENT)
    for name, row in rows.items():
        check(name, row)
        theirs = unplanned[name]
        assert row["executions"] <= theirs["executions"], name
        assert row["bytes"] <= theirs["bytes"], name
        # Saved state that is split in part is fetched in two transfers.
        assert row["reads"] <= theirs["reads"] + (name == "resumed"), name
        assert row["compiles"] <= theirs["compiles"] + row["plans"] + CUT.get(name, 0), name
        if name in UNHOOKED_DIFFERS:
            assert modes.worst(row["numbers"], theirs["numbers"])[0] < 1e-4, name
