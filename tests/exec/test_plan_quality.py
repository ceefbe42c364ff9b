"""A slice of the table of plan quality: the TPU compiler judges one row, and a second run resumes after stored rows.

`python experiments/quality/plan_quality.py` makes the whole table.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from autoshard.exec.hlo.schedule_estimate import estimator_error
from experiments.lib import saved_results as kept
from experiments.lib.programs.compile_programs import jax_mlp
from experiments.quality import plan_quality
from experiments.quality.plan_quality import Judgement


def compiled(seconds: float, verdict: str = "fits", vector: float = 0.0) -> dict[str, Any]:
    time = {"by_kind": {"matmul": seconds - vector, "vector": vector}}
    return {"verdict": verdict, "estimated_s": seconds, "time": time, "predicted_s": seconds, "peak_bytes": 1 << 30}


def test_a_plan_is_judged_beyond_the_error_of_pairs_only() -> None:
    pairs = estimator_error().pairs
    near, far = 1.0 + 0.5 * pairs, 1.0 / (1.0 - 1.1 * pairs)
    slow = compiled(9.0)
    for theirs, word in ((near, "undecided"), (far, "better"), (1 / near, "undecided"), (1 / far, "worse")):
        found = Judgement.of({"plan": compiled(1.0), "fsdp*": compiled(theirs), "fsdp": slow})
        assert (found.word, found.best) == (word, "fsdp*") and found.ratio == pytest.approx(theirs)
    unsure = Judgement.of({"plan": compiled(1.0), "fsdp": compiled(far, vector=0.5)})
    assert unsure.word == "undecided" and unsure.error == pytest.approx(pairs + 0.5 / far)


def test_what_does_not_fit_never_wins() -> None:
    over = {"verdict": "does not fit", "estimated_s": None, "time": {}}
    assert Judgement.of({"plan": over, "fsdp": compiled(1.0)}).word == "worse: only a baseline fits"
    assert Judgement.of({"plan": compiled(1.0), "fsdp": over}).word == "only ours fits"
    assert Judgement.of({"plan": over, "fsdp": {"failed": "refused"}}).word == "nothing fits"


def test_the_table_counts_its_rows() -> None:
    rows = {
        "MLP | v5e:4x4": {"plans": {"plan": compiled(1.0), "fsdp*": compiled(2.0)}, "baselines": 6},
        "ViT-L | v5e:4x4": {"plans": {"plan": compiled(1.0), "fsdp*": compiled(0.5)}, "baselines": 6},
    }
    text = plan_quality.table(rows)
    assert "2 rows: better 1, worse 1. Geometric mean of the ratio: 1.000, from 0.500 to 2.000" in text
    assert text.index(f"{estimator_error().pairs:.1%} of the longer") < text.index("| MLP | v5e:4x4 |")
    assert "| fsdp* | 2000.00 | 2.000 |" in text and "| 1 of 1 | 1 of 12 |" in text


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_a_row_is_compiled_once_and_preserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_quality, "PROGRAMS", {"tiny": lambda n: jax_mlp(2, 512, 64 * n)})
    monkeypatch.setattr(plan_quality, "TOPOLOGIES", {"v5e:2x2": {"data": 2, "model": 2}})
    monkeypatch.setattr(kept, "BUILD", tmp_path / "build")
    (name,) = plan_quality.rows()
    row = plan_quality.judge(name, 300.0, 1)
    plans = row["plans"]
    assert {name.rstrip("*") for name in plans} > {"plan"} and any(name.endswith("*") for name in plans)
    for plan in plans.values():
        assert (
            plan["verdict"] == "fits" and plan["estimated_s"] > 0 and plan["peak_bytes"] > 0 and plan["wire_bytes"] > 0
        )
    assert Judgement.of(plans).word in ("better", "undecided")
    assert "| tiny | v5e:2x2 |" in plan_quality.table({name: row})

    def refuse(*_: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("autoshard.exec.ahead.ahead_process.compile_without_devices", refuse)
    assert plan_quality.judge(name, 300.0, 1) == row
