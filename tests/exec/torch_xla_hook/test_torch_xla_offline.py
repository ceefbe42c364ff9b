"""Plans made before any tensor is on a device: host memory, nested batches, shards and checkpoints."""

from typing import Any

import pytest

from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook import LiveMesh, inputs_by_shape
from autoshard.planning import Spec
from tests.exec.torch_xla_hook.torch_xla_processes import run_checks


def offline(name: str) -> dict[str, Any]:
    return run_checks("torch_xla_offline_checks", name, JAX_PLATFORMS="cpu")[name]


@pytest.mark.full
def test_a_module_is_made_shard_by_shard():
    row, whole = offline("shard_by_shard"), offline("whole_first")
    assert row["held"] == whole["held"] == ["{devices=[8,1]0,1,2,3,4,5,6,7}"]
    assert row["spread"] == pytest.approx(whole["spread"], rel=0.05)  # initialised by the same reset_parameters
    # The host stores only a few of the model's 16 layers at once: the current one, and those in transfer.
    assert row["peak"] < 0.4 and whole["peak"] > 1


@pytest.mark.full
def test_a_nested_batch_is_sent_as_planned():
    row = offline("nested_batches")
    assert row["sent"] == row["planned"] and len(set(row["sent"])) == 3
    assert row["same"]


def test_inputs_of_one_shape_in_a_nested_batch_need_one_spec():
    inputs = {"0.x": ((8, 8), Spec((("data",), ()))), "0.y": ((8, 8), Spec(((), ())))}
    with pytest.raises(
        UserError, match="the inputs 0.x and 0.y are both of shape \\[8, 8\\], but the plan splits them as"
    ):
        inputs_by_shape(inputs, LiveMesh({"data": 8}, range(8)))


@pytest.mark.full
def test_local_shards_are_the_plans_parts():
    row = offline("shards")
    assert row["wrong"] == [[], []]
    assert row["specs"][0] != row["specs"][1]


@pytest.mark.full
def test_state_that_is_split_in_one_plan_and_whole_in_another_moves_both_ways():
    row = offline("state_between_plans")
    assert row["rows"] == [{"equal": True, "kept": True, "moved": True, "predicted": True}] * 6
    assert row["said"] == [
        "`model.0.bias` is of shape [64], but the checkpoint in FOLDER has it in [256]: load into the model that was "
        "saved.",
        "the checkpoint in FOLDER has no `more`: load into the state that was saved.",
    ]
