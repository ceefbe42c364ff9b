"""Random scripts: every tensor that a script can reach is as in eager torch, and what shares storage still does."""

from typing import Any

import pytest


pytest.importorskip("torch_xla")
from tests.exec.torch_xla_hook import torch_xla_modes as modes  # noqa: E402
from tests.exec.torch_xla_hook.torch_xla_random_scripts import CASES, LEAST  # noqa: E402


MODULE = "torch_xla_random_scripts"

SCRIPTS = tuple(CASES)[:25]


@pytest.fixture(scope="module")
def planned() -> dict[str, dict[str, Any]]:
    """Run the scripts under auto-sharding, in one process."""
    return modes.run_mode("auto", MODULE, *SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_random_script_equals_eager_torch(planned: dict[str, Any], name: str):
    row = planned[name]
    off, where = modes.worst(row["numbers"], modes.eager(MODULE, name), LEAST)
    assert off < 1e-5, where
    assert row["warned"] == [] and row["plans"] >= 1
