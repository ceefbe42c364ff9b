"""Measured runs on GPUs next to their predictions, in JSON and in words."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from autoshard.errors import UserError
from autoshard.validation import gpu_pair_figures, gpu_pair_report, validate_gpu_pairs


def test_figures_and_words_say_the_same():
    pairs = validate_gpu_pairs("ultrascale", only=["8B on 1 x 8 H100"])
    figures = json.loads(json.dumps(gpu_pair_figures(pairs), allow_nan=False))
    (problem,) = figures["problems"]
    assert problem["problem"] == "8B on 1 x 8 H100" and len(problem["rows"]) == 60
    assert figures["verdicts"]["rows"] == 60 and figures["errors"][0]["rebuilt"] == 60
    assert figures["regret"]["ours"]["problems"] == 1
    text = io.StringIO()
    Console(file=text, width=200).print(gpu_pair_report(pairs))
    said = text.getvalue()
    assert problem["chosen"] in said and f"regret {problem['regret']:.3f}" in said
    counted = figures["verdicts"]
    assert f"right in {counted['right']} of {counted['counted']} rows" in said
    assert f"{counted['false_fits_not_for_memory']} of which did not fail for memory" in said


def test_rows_that_are_not_rebuilt_are_named():
    pairs = validate_gpu_pairs("ultrascale", only=["1B on 8 x 8 H100"])
    text = io.StringIO()
    Console(file=text, width=200).print(gpu_pair_report(pairs))
    skipped = sum(each.step is None for each in pairs.rows)
    assert skipped and f"{skipped} rows are not rebuilt:" in text.getvalue()
    assert "= 128 sequences, but a step has 256" in text.getvalue()


def test_a_file_without_rows(tmp_path: Path):
    (tmp_path / "empty.json").write_text('{"models": {}, "columns": [], "rows": []}')
    with pytest.raises(UserError, match="empty.json holds no measured runs on GPUs: expected `models`"):
        validate_gpu_pairs(tmp_path / "empty.json")


def test_no_such_problem():
    with pytest.raises(UserError, match="no problem of vtrain is called 70B"):
        validate_gpu_pairs("vtrain", only=["70B"])
