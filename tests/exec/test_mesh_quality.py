"""The searched mesh beside hand-picked ones: which those are, and how the table judges. The rows need the compiler."""

import math
from typing import Any

import mesh_quality
import pytest
from plan_quality import TOPOLOGIES


def compiled(seconds: float) -> dict[str, Any]:
    time = {"by_kind": {"matmul": seconds}}
    return {"verdict": "fits", "estimated_s": seconds, "time": time, "predicted_s": seconds, "peak_bytes": 1 << 30}


@pytest.mark.parametrize("topology", list(TOPOLOGIES))
def test_hand_picked_meshes_use_every_chip(topology: str) -> None:
    chips = math.prod(TOPOLOGIES[topology].values())
    found = mesh_quality.hand_picked(topology)
    assert all(math.prod(mesh.values()) == chips for mesh in found.values())
    assert "model" not in found["1-D"]
    assert {mesh.get("model", 1) for mesh in found.values()} == {1, 4, 8, 16}


def test_ours_is_judged_against_the_best_of_both_tables() -> None:
    row = {"mesh": {"data": 16}, "code": "abc", "plans": {"plan": compiled(1.0), "fsdp 1-D": compiled(3.0)}}
    shared = {"plan": compiled(9.0), "fsdp*": compiled(2.0), "fsdp": compiled(0.1), "data_parallel*": compiled(0.2)}
    text = mesh_quality.table({"MLP | v5e:4x4": row}, {"MLP | v5e:4x4": {"plans": shared}})
    assert "| MLP | v5e:4x4 | data=16 | 1000.00 | 1000.00 | fsdp on 4x4 | 2000.00 | 2.000 |" in text
    assert "1 rows: better 1. Geometric mean of the ratio: 2.000" in text
    assert "| MLP | v5e:4x4 | fsdp, propagated, on 4x4 | 0.100 |" in text
    assert "1 rows: worse 1. Geometric mean of the ratio: 0.100" in text
    alone = mesh_quality.table({"MLP | v5e:4x4": row}, {})
    assert "| fsdp 1-D | 3000.00 | 3.000 |" in alone
