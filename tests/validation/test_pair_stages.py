"""Measured plans in stages: parsed by MaxText's names, rebuilt as a program in stages, and priced."""

import pathlib
from typing import Any

import pytest

from autoshard.planning.price.evaluate import evaluate
from autoshard.program import Pipeline
from autoshard.validation import validate_pairs
from autoshard.validation.pair_rows import read_groups
from autoshard.validation.published_runs import Run
from autoshard.validation.rebuilt_runs import rebuild, stated_plan, unseen_seconds
from tests.validation.measured import MODEL, group, write


FIXED = {"framework": "MaxText", "seq": 128, "per_device_batch": 2, "remat": "full", "attention": "splash"}
DEEP = MODEL | {"layers": 4}


def run_of(folder: pathlib.Path, plan: dict[str, Any], **changes: Any) -> tuple[Run | None, str]:
    fixed = FIXED | changes.pop("fixed", {})
    (pair_group,) = read_groups(write(folder, group({"plan": plan}, **({"model": DEEP} | changes), fixed=fixed)))
    return pair_group.rows[0].run, pair_group.rows[0].skipped


@pytest.mark.parametrize(
    ("plan", "schedule", "microbatches"),
    [
        ({"num_layers_per_pipeline_stage": 2}, "gpipe", 2),
        ({"num_layers_per_pipeline_stage": 2, "num_pipeline_microbatches": 4}, "gpipe", 4),
        ({}, "circular:2", 2),
        ({"num_pipeline_repeats": 2, "num_pipeline_microbatches": 4}, "circular:2", 4),
        ({"num_pipeline_repeats": 1, "microbatches": 8}, "gpipe", 8),
        ({"schedule": "circular", "microbatches": 4}, "circular", 4),
    ],
)
def test_stages_are_read_as_maxtext_has_them(
    tmp_path: pathlib.Path, plan: dict[str, Any], schedule: str, microbatches: int
) -> None:
    run, skipped = run_of(tmp_path, {"pp": 2, "fsdp": 2} | plan)
    assert run is not None, skipped
    assert run.pipeline == Pipeline(2, microbatches, schedule)


def test_where_no_framework_is_named_a_pipeline_goes_through_its_stages_once(tmp_path: pathlib.Path) -> None:
    run, _ = run_of(tmp_path, {"pp": 2, "fsdp": 2}, fixed={"framework": ""})
    assert run is not None and run.pipeline is not None and run.pipeline.schedule == "circular:2"
    bare = {key: value for key, value in FIXED.items() if key != "framework"}
    (pair_group,) = read_groups(write(tmp_path, group({"plan": {"pp": 2, "fsdp": 2}}, model=DEEP, fixed=bare)))
    assert pair_group.rows[0].run is not None and pair_group.rows[0].run.pipeline == Pipeline(2, 2, "gpipe")


@pytest.mark.parametrize(
    ("plan", "changes", "said"),
    [
        ({"pp": 2, "fsdp": 4}, {}, "fsdp=4, pp=2 make 8 devices"),
        ({"pp": 4, "num_layers_per_pipeline_stage": 2}, {}, "=2 in 4 stages are more than 4 layers"),
        ({"pp": 2, "dp": 2, "num_pipeline_repeats": 4}, {}, "stages with 4 chunks each"),
        ({"pp": 2, "dp": 2, "num_pipeline_repeats": 2, "num_layers_per_pipeline_stage": 2}, {}, "are more than 4"),
        ({"pp": 2, "dp": 2, "num_pipeline_microbatches": 3}, {}, "2 stages need 2 microbatches or a multiple"),
        ({"pp": 2, "dp": 2, "schedule": "gpipe", "microbatches": 3}, {}, "3 microbatches do not divide 8 sequences"),
        ({"pp": 2, "dp": 2, "microbatches": 4, "num_pipeline_microbatches": 2}, {}, "stated differently, 2 and 4"),
        ({"pp": 2, "dp": 2, "schedule": "1f1b"}, {}, "schedule `1f1b` is not known"),
        ({"pp": 2, "dp": 2}, {"fixed": {"framework": "torchtitan"}}, "how torchtitan runs stages is not stated"),
        ({"pp": 2, "dp": 2, "dcn_pp": 2}, {}, "dcn_pp=2 make 2 slices, but v5p:2x2x1 has 1"),
        ({"pp": 2, "dp": 2}, {"slices": 3}, "4 chips do not make 3 slices"),
    ],
)
def test_what_cannot_be_rebuilt_says_why(
    tmp_path: pathlib.Path, plan: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    run, skipped = run_of(tmp_path, plan, **changes)
    if run is not None:  # sizes that do not fit the model are only detected when the row is rebuilt
        (pair_group,) = validate_pairs(write(tmp_path, group({"plan": plan}, model=DEEP, fixed=FIXED, **changes)))
        skipped = pair_group.rows[0].skipped
    assert said in skipped


def test_the_layers_of_a_stage_stand_on_its_devices_and_all_else_on_all(tmp_path: pathlib.Path) -> None:
    plan = {"pp": 2, "fsdp": 2, "num_layers_per_pipeline_stage": 2, "num_pipeline_microbatches": 4}
    run, _ = run_of(tmp_path, plan, model=DEEP | {"layers": 5})
    assert run is not None and run.pipeline is not None
    assert run.assumed[-1] == "1 of 5 layers before the stages"
    program, made = stated_plan(run)
    assert program.pipeline is not None and program.pipeline["stages"] == 2
    for name, spec in made.arguments.items():
        axes = {axis for dim in spec.dims for axis in dim}
        if not name.startswith("batch"):
            assert ("stage" in axes) == (".[1:]." in name or "layers.[1:]" in name), name
    assert made.arguments["layers.[1:].mlp.up_proj.weight"].dims[run.stack_axis] == ("stage",)
    assert "fsdp" in {axis for dim in made.arguments["layers.[1:].mlp.up_proj.weight"].dims for axis in dim}
    assert made.prediction.wire_bytes["stage"] > 0
    assert list(made.mesh) == ["stage", "fsdp"]


def test_a_row_between_slices_is_priced_with_one_without_stages(tmp_path: pathlib.Path) -> None:
    plans = [
        {"dp": 2, "fsdp": 4},
        {"pp": 2, "fsdp": 4, "dcn_pp": 2, "num_layers_per_pipeline_stage": 2},
        {"pp": 2, "fsdp": 4, "dcn_pp": 2, "num_layers_per_pipeline_stage": 2, "num_pipeline_microbatches": 4},
    ]
    rows = [{"plan": plan, "step_time_s": 0.01} for plan in plans]
    given = group(*rows, model=DEEP, fixed=FIXED, chips=8, slices=2, topology="2x2x1")
    (pair_group,) = validate_pairs(write(tmp_path, given))
    assert [row.skipped for row in pair_group.rows] == ["", "", ""]
    plain, few, many = (row.predicted_s for row in pair_group.rows)
    assert plain is not None and few is not None and many is not None
    assert 0 < many < 2 * plain and few > 0
    (read,) = read_groups(tmp_path / "pairs.json")
    run = read.rows[1].run
    assert run is not None and run.network == (("stage", 2),) and run.topology.slices == 2
    model, choices = rebuild(run)
    assert evaluate(model, choices).step_time_s == few
    assert unseen_seconds(model, choices, run, "a source") == pytest.approx(few)
