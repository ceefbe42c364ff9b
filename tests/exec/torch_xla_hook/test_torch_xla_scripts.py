"""Ordinary scripts under auto-sharding that do more than train one model in a loop."""

from typing import Any

import pytest

from tests.exec.torch_xla_hook.torch_xla_processes import run_checks


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Run all scripts in one process. The last of them breaks the watcher on purpose."""
    names = ("inferred", "evaluated_first", "known_steps", "copied", "freed", "compiled_own", "scanned", "read")
    names += (
        "compiled_in_place",
        "averaged",
        "evaluated",
        "marked_batches",
        "mask_inside",
        "checked_masks",
        "failing_watch",
    )
    return run_checks("torch_xla_scripts_checks", *names, AUTOSHARD_STRICT="1", XLA_AUTO_SPMD_MESH="4,2")


def test_a_compiled_module_of_the_scripts_own_infers(found: dict[str, Any]):
    row = found["compiled_own"]
    assert row["difference"] < 1e-5 and any(row["split"])
    assert row["compiles"] == [1, 2, 2, 2]
    assert found["compiled_in_place"]["difference"] < 1e-5 and any(found["compiled_in_place"]["split"])


def test_layers_that_are_scanned_are_planned(found: dict[str, Any]):
    row = found["scanned"]
    assert row["difference"] < 1e-5 and any(row["split"]) and row["compiles"] == 2


def test_what_fails_in_the_watcher_costs_its_steps_and_ends_it_after_three(found: dict[str, Any]):
    row = found["failing_watch"]
    assert max(row["differences"]) < 1e-5
    assert row["armed"] == [False] * 4 and row["plans"] == [0, 0, 0, 1]
    cause = "since watching this script failed: RuntimeError: there is no telling"
    first, last = (
        f"autoshard: {what}, {cause}" for what in ("this step runs as it is", "auto-sharding is off from here on")
    )
    assert row["said"] == [[first, last]] * 3 + [[first]]
    assert row["current"][:3] == [None] * 3 and row["current"][3] is not None  # one failed step, then its plan again


def test_a_planned_model_is_copied_saved_and_averaged(found: dict[str, Any]):
    row = found["copied"]
    assert max(row["differences"].values()) < 1e-5
    assert not row["mentions"]  # the checkpoint loads without autoshard


def test_models_that_are_trained_in_turn_are_freed(found: dict[str, Any]):
    row = found["freed"]
    assert row["alive"] == [[False, False]] * 3 and row["split"] == [True] * 3
    assert not row["armed"]
    assert row["compiles"][2] == 0  # a batch like the last one has the same program, even if it is planned again


def test_inference_is_planned_where_gradients_are_preserved_and_after_a_call_on_the_host(found: dict[str, Any]):
    row = found["inferred"]
    assert row["difference"] < 1e-5 and row["trained"] < 1e-5
    assert row["plans"] == 1 and row["split"]
    # The first call may be the first half of a step; the second shows that it was not.
    assert row["armed"] == [True, False, False, False]
    assert not row["moved again"]


def test_known_steps_are_not_watched_for_ever(found: dict[str, Any]):
    row = found["known_steps"]
    assert row["armed"] == [True, False] and row["plans"] >= 1
    assert row["difference"] < 1e-5 and any(row["split"])


def test_evaluating_first_costs_a_training_plan_nothing(found: dict[str, Any]):
    row = found["evaluated_first"]
    after, alone = row["step"]
    assert row["difference"] < 1e-5
    assert after == pytest.approx(alone, rel=0.01)
    assert [all(kept) for kept in row["again"]] == [
        True
    ]  # the evaluation after it is planned again, with the tensors that training has split
    assert not any("your own mark" in note for notes in row["notes"] for note in notes)


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["4,2", "2,4"])
def test_a_vision_transformer_with_averages_and_short_batches(mesh: str):
    check_averages(run_checks("torch_xla_scripts_checks", "averaged_vit", XLA_AUTO_SPMD_MESH=mesh)["averaged_vit"])


def test_averages_and_short_batches_are_planned(found: dict[str, Any]):
    check_averages(found["averaged"])


def check_averages(row: dict[str, Any]) -> None:
    assert row["difference"] < 1e-5 and row["averages"] < 1e-5
    assert row["warned"] == [] and row["plans"] == 2
    assert not any("your own mark" in note for notes in row["notes"] for note in notes)
    assert row["unknown"] <= 1  # averages are state, not data; labels are data


def test_a_model_is_evaluated_as_planned_between_its_training_steps(found: dict[str, Any]):
    row = found["evaluated"]
    assert row["difference"] < 1e-5 and any(row["split"])
    assert row["warned"] == [] and row["plans"] == 2
    assert row["compiles"] == [1, 1, 0, 0]  # planning the evaluation moves no tensor that the training steps know


@pytest.mark.full
def test_a_model_with_a_split_embedding_is_evaluated_as_planned():
    row = run_checks("torch_xla_scripts_checks", "evaluated_gpt2", XLA_AUTO_SPMD_MESH="4,2")["evaluated_gpt2"]
    assert row["difference"] < 1e-5 and row["embedding"] == [True]
    assert row["warned"] == [] and row["plans"] == 2


def test_a_script_may_mark_its_batches_itself_in_every_step(found: dict[str, Any]):
    row = found["marked_batches"]
    over_data = "{devices=[4,1,2]0,1,2,3,4,5,6,7 last_tile_dim_replicate}"
    assert row["difference"] < 1e-5
    assert row["held"][1] == [over_data, over_data]  # targets like the inputs get the inputs' split
    assert row["held"][2][0].startswith("{devices=[2,1,4]0,2,4,6,1,3,5,7")
    assert any("your own mark on batch.0.0, 64/data x 96, stays." in note for note in row["notes"][0])


def test_what_a_module_writes_to_slices_of_what_it_makes_is_not_lost(found: dict[str, Any]):
    row = found["mask_inside"]
    assert row["difference"] < 1e-5 and any(row["split"])


def test_what_a_module_reads_in_the_middle_of_its_call_cuts_no_plan_and_is_compiled_once(found: dict[str, Any]):
    row = found["checked_masks"]
    assert row["difference"] < 1e-5 and any(row["split"])
    assert row["plans"] == [4, 4]  # whole steps, with all parameters
    assert row["compiles"] == [2, 3, 3, 4, 5]  # the check, and each step planned and pinned


def test_nothing_is_compiled_to_read_what_is_split(found: dict[str, Any]):
    row = found["read"]
    assert row["difference"] < 1e-5 and row["split"] == [True]
    assert len(set(row["compiles"][1:])) == 1 and row["to read"] == 0
