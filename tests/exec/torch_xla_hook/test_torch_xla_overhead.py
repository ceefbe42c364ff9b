"""Overhead of auto-sharding in a step after the first, counted against the same loop sharded by hand."""

from typing import Any

import pytest

from experiments.torch_xla import torch_xla_overhead


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    return torch_xla_overhead.overhead("mlp", rounds=2, steps=2)["said"]


@pytest.mark.full
def test_the_planned_loop_runs_what_is_marked_by_hand(said: dict[str, Any]):
    planned, by_hand = said["planned"], said["all"]
    assert planned["wire"] == by_hand["wire"] and sum(planned["wire"].values()) > 0
    assert planned["compiled"] == by_hand["compiled"] == 2


@pytest.mark.full
def test_the_hooks_work_in_a_step_does_not_grow(said: dict[str, Any]):
    first, *others = said["planned"]["calls"]
    modules, tensors = 4, 4 + 8 + 2  # parameters, AdamW's states, batch
    assert others == [first] * len(others)
    assert 0 < first < 10 * (modules + tensors)


def test_a_ratio_is_of_turns_next_to_each_other():
    assert torch_xla_overhead.ratios([1.1, 4.2], [1.1, 2.1]) == pytest.approx([1.0, 2.0])


def test_the_table_has_median_and_quartiles():
    step, other = [0.010, 0.020], [0.010, 0.010]
    turns = {"planned": [step] * 4, "all": [other] * 4, "arguments": [step] * 4}
    said = {how: {"wire": {"data": 5}, "calls": [7, 7], "compiled": 2} for how in turns}
    rows: dict[str, Any] = {"mlp": {"turns": turns, "said": said, "values": 3, "ops": 1, "date": "today"}}
    times = {"without": [1.0, 1.0], "with": [1.01, 1.01], "own": [0.003, 0.003], "found": [0.001, 0.001]}
    rows["import"] = {"turns": times, "more": ["one", "two"], "date": "today"}
    lines = torch_xla_overhead.table(rows).splitlines()
    (line,) = [line for line in lines if line.startswith("| mlp | all")]
    assert "| 20.0 (20.0 to 20.0) | 10.0 (10.0 to 10.0) | 2.000 (2.000 to 2.000) | 1.000 (1.000 to 1.000) |" in line
    assert lines[-1].endswith("| 10.0 (10.0 to 10.0) | 3.0 (3.0 to 3.0) | 1.0 (1.0 to 1.0) | one, two |")
