"""Measured plans of one model against the estimator: the rows that count, and the margin.

The rows need the compiler: `python experiments/fidelity/pair_estimates.py` makes the whole table.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from autoshard.validation import read_groups
from experiments.fidelity import pair_estimates


MESHES = "maxtext-llama2-d16-L12-meshes-v5p4"


def results(scale: dict[str, float]) -> dict[str, Any]:
    """Return estimates that equal the measured times, scaled for plans whose text starts with a key of `scale`."""
    estimates = {}
    (group,) = read_groups(only=[MESHES])
    for row, _ in pair_estimates.timed(group):
        assert row.step_s is not None
        factor = next((value for text, value in scale.items() if row.plan.startswith(text)), 1.0)
        estimates[pair_estimates.key_of(group, row)] = {
            "estimated_s": row.step_s * factor,
            "predicted_s": row.step_s,
            "peak_bytes": 1 << 30,
            "compile_s": 1.0,
            "code": "abc",
        }
    return estimates


def test_groups_that_compare_plans_come_first_and_all_ran_on_tpus():
    groups = pair_estimates.groups_asked(())
    kinds = [group.compares_plans for group in groups]
    assert kinds == sorted(kinds, reverse=True) and True in kinds and False in kinds
    assert all(group.on_tpu and len(list(pair_estimates.timed(group))) > 1 for group in groups)


def test_estimates_that_are_all_wrong_alike_leave_no_margin():
    (group,) = pair_estimates.judged(results({"": 1.3}))
    errors = pair_estimates.shares_of_longer([group])
    assert errors and max(errors) < 1e-9
    assert group.tau == 1.0


def test_one_plan_estimated_too_fast_is_in_the_margin_and_in_the_order():
    (group,) = pair_estimates.judged(results({"fsdp=4": 0.5}))
    assert max(pair_estimates.shares_of_longer([group])) == pytest.approx(0.5, abs=0.05)
    assert group.tau is not None and group.tau < 1.0
    text = pair_estimates.table(results({"fsdp=4": 0.5}))
    assert f"| {MESHES} | fsdp=4" in text and "| plans of one model | 1 |" in text


def test_the_margin_is_stored_and_the_rest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "estimator.json"
    file.write_text(json.dumps({"mean": 0.05, "within": 0.1, "source": "s", "pairs": 0.2, "pairs_source": "t"}))
    monkeypatch.setattr(pair_estimates, "ERROR", file)
    pair_estimates.write_margin(pair_estimates.judged(results({"fsdp=4": 0.5})))
    stored = json.loads(file.read_text())
    assert stored["mean"] == 0.05 and 0.2 < stored["pairs"] <= 0.5 and "1 groups" in stored["pairs_source"]
