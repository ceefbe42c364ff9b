"""A slice of the table of all families: planned equals unplanned, and the predicted bytes equal the compiled ones.

`python experiments/models/families.py` makes the whole table.
"""

import pytest

from experiments.lib.programs import family_programs
from experiments.models import families


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "mode", "mesh"),
    [
        ("hf:llama-tiny", "decode", "4x2"),
        ("jax nnx module", "train", "2x2x2"),
        ("jax equinox module", "train", "4x2"),
        pytest.param("jax graph network", "infer", "4x2", marks=pytest.mark.full),
        pytest.param("jax embedding tables", "infer", "2x2x2", marks=pytest.mark.full),
        ("jax moe einsum", "infer", "4x2"),
        ("jax moe ragged", "infer", "8"),
        pytest.param("jax decode step", "decode", "4x2", marks=pytest.mark.full),
        ("torch cnn", "train", "8"),
        ("torch mlp", "infer", "4x2"),
    ],
)
def test_a_family_runs_as_planned(name: str, mode: str, mesh: str):
    # With the tests' compiler flags, rounding decides which of two values of seed 0 is the largest of a pooled window.
    seed = 1 if name == "torch cnn" else 0
    row = families.row_of(family_programs.make(name, mode), family_programs.MESHES[mesh], seed)
    assert "error" not in row
    # Some processors round convolutions more, at most as much as the unplanned step with its examples reordered.
    assert row["equal"] or families.is_rounding(row), (row["worst"], row["max_rel_diff"], row["rounding"])
    assert max(families.errors_of(row), default=0.0) <= families.OUTLIER, row["wire"]


def test_errors_are_relative_to_what_was_compiled():
    row = {"wire": {"a": [150, 100], "b": [100, 1000], "c": [0, 0], "d": [1000, 0], "e": [2000, 1960]}}
    assert families.errors_of(row) == [pytest.approx(0.0), pytest.approx(0.9), float("inf"), pytest.approx(0.0)]
    assert families.errors_of({}) == []


def test_the_table_names_what_needs_a_reason():
    good = {"equal": True, "max_rel_diff": 1e-7, "worst": "x", "wire": {"data": [4096, 4096]}, "plan_s": 1.0}
    rows = {"a/train/8": good, "b/train/8": good | {"wire": {"data": [8192, 4096]}}, "c/infer/8": {"error": "No."}}
    text = families.table(rows, 4)
    assert "3 rows of 4, 2 equal" in text and "3 rows, 2 equal" in families.table(rows, 3)
    assert "median error 50.0%" in text and "1 without a plan" in text and "1 off by more than 50%" in text
    noisy = {"d/train/8": good | {"equal": False, "max_rel_diff": 2e-3, "rounding": 1.5e-3}}
    wrong = {"d/train/8": good | {"equal": False, "max_rel_diff": 4e-3, "rounding": 1.5e-3}}
    assert "| rounding |" in families.table(noisy, 1) and "| NO: x |" in families.table(wrong, 1)
    remarks = [line.rsplit("|", 2)[1].strip() for line in text.splitlines() if line[:4] in ("| a ", "| b ", "| c ")]
    assert remarks == ["", "unexplained", "No."]
