"""Measured plans judged by the compiler, which is replaced here: the use of its reports."""

import json
import pathlib
import types
from typing import Any

import pytest

from autoshard.errors import UserError
from autoshard.exec import Verdict
from autoshard.validation import compiled_pairs as module


def group(name: str, hardware: str, *rows: dict[str, Any]) -> dict[str, Any]:
    model = {"family": "llama2", "layers": 2, "emb": 256, "mlp": 512, "heads": 2, "kv_heads": 2, "head_dim": 128}
    return {
        "group": name, "source": "a/b@0:c.md", "model": model | {"vocab": 1024}, "hardware": hardware, "chips": 4,
        "topology": "2x2x1", "fixed": {"seq": 256, "per_device_batch": 1, "remat": "full"}, "rows": list(rows),
    }  # fmt: skip


@pytest.fixture
def pairs(tmp_path: pathlib.Path) -> pathlib.Path:
    rows = [
        {"plan": {"fsdp": 4}, "step_time_s": 0.5},
        {"plan": {"tp": 2, "fsdp": 2}, "step_time_s": 0.6},
        {"plan": {"dp": 4}, "oom": True, "needed_gib": 100.0},
        {"plan": {"fsdp": 4, "trainer": "other"}, "step_time_s": 0.51},
        {"plan": {"pp": 4}, "step_time_s": 0.6},
    ]
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps([group("first-v5p", "TPU v5p", *rows), group("other", "H100", *rows)]))
    return file


def test_reports_become_rows(pairs: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    compiled: list[Any] = []

    def fake(program: Any, plan: Any, time_limit: float, quick: bool) -> Any:
        compiled.append(plan)
        if plan.mesh == {"data": 4}:
            return types.SimpleNamespace(estimate=None, peak_compiled=7, verdict=Verdict.DOES_NOT_FIT)
        if "model" in plan.mesh:
            raise UserError("the compiler took longer than 5 s")
        timed = types.SimpleNamespace(step_time_s=0.25)
        return types.SimpleNamespace(estimate=timed, peak_compiled=9, verdict=Verdict.FITS)

    monkeypatch.setattr(module, "compile_plan", fake)
    said: list[str] = []
    (found,) = module.compile_pairs(pairs, said.append, time_limit=5.0)
    first, slow, large, again, staged = found.rows
    assert len(compiled) == 3, "one plan that was measured twice is compiled once"
    assert (first.predicted_s, first.predicted_bytes, first.fits, first.tokens) == (0.25, 9, True, 1024)
    assert again.predicted_s == 0.25 and again.choice == first.choice
    assert slow.skipped == "the compiler took longer than 5 s" and slow.predicted_s is None
    assert (large.fits, large.predicted_bytes, large.measured_fits) == (False, 7, False)
    assert "4 stages are more than the 2 layers" in staged.skipped
    assert said[0] == "first-v5p, row 1 of 5: fsdp=4"


def test_groups_are_chosen_by_name(pairs: pathlib.Path):
    with pytest.raises(UserError, match="none of the groups ran on TPUs"):
        module.compile_pairs(pairs, only=["other"])
    with pytest.raises(UserError, match="no group of .* is called third"):
        module.compile_pairs(pairs, only=["third"])
