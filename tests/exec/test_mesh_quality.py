"""The searched mesh against hand-picked ones: the choice of these, and the verdicts of the table.

The rows need the compiler.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.exec import estimate
from experiments.fidelity import overlap
from experiments.lib.harness import Experiment
from experiments.quality import mesh_quality
from experiments.quality.plan_quality import PROGRAMS, TOPOLOGIES
from tests.planning import programs


def compiled(seconds: float) -> dict[str, Any]:
    time = {"by_kind": {"matmul": seconds}}
    return {"verdict": "fits", "estimated_s": seconds, "time": time, "predicted_s": seconds, "peak_bytes": 1 << 30}


@pytest.mark.parametrize("topology", list(TOPOLOGIES))
def test_hand_picked_meshes_use_every_chip(topology: str) -> None:
    chips = math.prod(TOPOLOGIES[topology].values())
    picked = mesh_quality.hand_picked(topology)
    assert all(math.prod(mesh.values()) == chips for mesh in picked.values())
    assert "model" not in picked["1-D"]
    assert {mesh.get("model", 1) for mesh in picked.values()} == {1, 4, 8, 16}


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


def test_ours_alone_is_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"mesh": {"data": 16}, "code": "abc", "plans": {"plan": compiled(1.0), "fsdp 1-D": compiled(3.0)}}
    file = tmp_path / "mesh_quality.json"
    file.write_text(json.dumps({"MLP | v5e:4x4": known}))
    planned = []

    def figures_of(program: Any, plan: Any, time_limit: float) -> dict[str, Any]:
        planned.append(plan)
        return compiled(0.5)

    monkeypatch.setattr(mesh_quality, "figures_of", figures_of)
    monkeypatch.setitem(PROGRAMS, "MLP", lambda devices: lambda: programs.program("mlp"))
    monkeypatch.setattr(Experiment, "_apart", lambda self, name: self.work(name))
    monkeypatch.setattr(sys, "argv", ["mesh_quality.py", "--ours", "--out", str(tmp_path)])
    assert mesh_quality.main() == 0  # other rows have no stored results
    (row,) = json.loads(file.read_text()).values()
    (plan,) = planned
    assert row["plans"] == {"plan": compiled(0.5), "fsdp 1-D": compiled(3.0)}
    assert "abc |" in mesh_quality.table({"MLP | v5e:4x4": row}, {})
    assert row["mesh"] == dict(plan.mesh) and row["others"] == "abc" != row["code"]


def test_plans_by_hand_of_other_prices_stay_in_the_row() -> None:
    known = {"code": "def", "others": "abc", "plans": {"plan": 1, "fsdp 1-D": 2, "fsdp 1-D, of 000": 3}}
    assert mesh_quality.earlier(known, "fed") == {"fsdp 1-D, of abc": 2, "fsdp 1-D, of 000": 3}
    assert mesh_quality.earlier(known, "abc") == {} == mesh_quality.earlier(None, "abc")


def test_the_table_of_overlaps_tells_slices_apart() -> None:
    text = """HloModule m, is_scheduled=true

ENTRY %main (p: bf16[4096,4096]) -> bf16[4096,4096] {
  %p = bf16[4096,4096] parameter(0)
  ROOT %r = bf16[4096,4096] all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
}
"""
    estimated = estimate(text, make_mesh(Topology.parse("v5e:2x4"), {"data": 2, "model": 4}))
    assert overlap.hidden(estimated, overlap.CLASSES["sums"], far=False).endswith(", 0%")
    assert overlap.hidden(estimated, overlap.CLASSES["gathers"], far=False) == "-"
    assert overlap.hidden(estimated, None, far=True) == "-"
