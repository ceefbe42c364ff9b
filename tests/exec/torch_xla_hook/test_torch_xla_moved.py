"""Values moved, pooled or summed up along a dim that the user's marks or the plan split, in four steps."""

from collections.abc import Sequence
from typing import Any

import pytest


pytest.importorskip("torch_xla")
from tests.exec.torch_xla_hook import torch_xla_modes as modes  # noqa: E402
from tests.exec.torch_xla_hook.torch_xla_moved_cases import CASES, STEPS  # noqa: E402


MODULE = "torch_xla_moved_cases"

QUICK = ("shift_beside_flip", "shorter_beside_flip", "mean_pool", "mask_like_value")


def check(names: Sequence[str], sizes: str) -> dict[str, dict[str, Any]]:
    rows = modes.run_mode("auto", MODULE, *names, XLA_AUTO_SPMD_MESH=sizes)
    for name, row in rows.items():
        off, where = modes.worst(row["numbers"], modes.eager(MODULE, name))
        assert off < 1e-5, (name, where)
        assert row["warned"] == [] and row["plans"] >= 1, name
    return rows


def test_planned_steps_equal_eager_torch():
    rows = check(QUICK, "8")
    # Moving to what another tensor is does not read that one.
    assert rows["mask_like_value"]["compiles"] == 2 and rows["mask_like_value"]["executions"] == STEPS


@pytest.mark.full
@pytest.mark.parametrize("sizes", ("8", "4,2"))
def test_all_planned_steps_equal_eager_torch(sizes: str):
    of_sequences = [name for name in CASES if name not in ("pools", "mean_pool", "mask_like_value")]
    check([name for name in CASES if name not in of_sequences] if sizes == "4,2" else of_sequences, sizes)
