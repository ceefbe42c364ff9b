"""Values moved, pooled or summed along a dim that the user's marks or the plan split, in four steps."""

from collections.abc import Sequence
from typing import Any

import pytest


pytest.importorskip("torch_xla")
from tests.exec.torch_xla_hook import torch_xla_modes as modes  # noqa: E402
from tests.exec.torch_xla_hook.torch_xla_moved_cases import CASES, STEPS  # noqa: E402


MODULE = "torch_xla_moved_cases"

QUICK = ("shift_beside_flip", "shorter_beside_flip", "mean_pool", "mask_like_value", "edges")

OF_IMAGES = ("pools", "mean_pool")

WRONG_UPSTREAM = ("largest", "largest_beside_flip")


def check(names: Sequence[str], sizes: str) -> dict[str, dict[str, Any]]:
    rows = modes.run_mode("auto", MODULE, *names, XLA_AUTO_SPMD_MESH=sizes)
    for name, row in rows.items():
        off, where = modes.worst(row["numbers"], modes.eager(MODULE, name))
        assert off < 1e-5, (name, where)
        assert row["warned"] == [] and (row["plans"] >= 1 or name == "edges"), name
    return rows


def test_planned_steps_equal_eager_torch():
    rows = check(QUICK, "8")
    # Moving a value to another tensor's dtype and device does not read that tensor.
    assert rows["mask_like_value"]["compiles"] == 2 and rows["mask_like_value"]["executions"] == STEPS


@pytest.mark.full
def test_all_planned_steps_along_a_split_sequence_equal_eager_torch():
    check([name for name in CASES if name not in (*OF_IMAGES, *WRONG_UPSTREAM)], "8")


@pytest.mark.full
def test_all_planned_steps_of_pools_equal_eager_torch():
    check(OF_IMAGES, "4,2")


@pytest.mark.full
def test_gradients_that_are_wrong_hooked_are_wrong_without():
    """Compare max pools with stride 1 along a dim that the script splits. Forward passes are right."""
    rows = {mode: modes.run_mode(mode, MODULE, *WRONG_UPSTREAM, XLA_AUTO_SPMD_MESH="8") for mode in ("spmd", "auto")}
    for name in WRONG_UPSTREAM:
        right = modes.eager(MODULE, name)
        for row in (rows[mode][name] for mode in rows):
            assert modes.worst(row["numbers"], right)[0] > 1e-3, name
            assert modes.worst(row["numbers"][:2], right[:2])[0] < 1e-5, name
