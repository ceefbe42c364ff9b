"""The configuration file for Accelerate is read by Accelerate's own launcher, and refuses what it cannot hold."""

import dataclasses
from pathlib import Path

import pytest


pytest.importorskip("accelerate")

from accelerate.commands.launch import _validate_launch_command, launch_command_parser  # noqa: E402
from accelerate.utils.launch import prepare_multi_gpu_env  # noqa: E402

import autoshard  # noqa: E402
from autoshard.errors import FormError  # noqa: E402
from autoshard.exports import export_plan  # noqa: E402
from autoshard.exports.torch_forms.accelerate_settings import accelerate_text  # noqa: E402
from autoshard.planning import Plan, Spec  # noqa: E402
from autoshard.program import Program, open_source  # noqa: E402


MESH = {"data": 2, "model": 2}


@pytest.fixture(scope="module")
def program() -> Program:
    return open_source("hf:llama-tiny", train=True, batch=8, seq=64, remat="full")


@pytest.fixture(scope="module")
def plan(program: Program) -> Plan:
    return autoshard.plan(program, topology="cpu:4", mesh=MESH, form="accelerate")


def test_the_launcher_reads_the_file(plan: Plan, program: Program, tmp_path: Path) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(export_plan(plan, "accelerate", program))
    given = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    launched = prepare_multi_gpu_env(_validate_launch_command(given)[0])
    assert given.num_processes == 4 and given.use_fsdp
    assert launched["FSDP_VERSION"] == "2" and launched["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "LlamaDecoderLayer"
    assert launched["ACCELERATE_MIXED_PRECISION"] == "bf16"  # the step's dtype, with parameters in float32
    assert launched["FSDP_RESHARD_AFTER_FORWARD"] == launched["FSDP_ACTIVATION_CHECKPOINTING"] == "true"


def test_a_program_from_the_cache_has_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", str(tmp_path))
    options = {"train": True, "batch": 8, "seq": 64, "remat": "full", "kept": True}
    traced, kept = (open_source("hf:llama-tiny", **options) for _ in range(2))
    assert kept.args == () and kept.block_classes == ("LlamaDecoderLayer",)
    made = autoshard.plan(traced, topology="cpu:4", mesh=MESH, form="accelerate")
    assert export_plan(made, "accelerate", kept) == export_plan(made, "accelerate", traced)


def test_a_plan_for_it_splits_the_batch_over_every_axis(plan: Plan) -> None:
    assert plan.batch_axes == ("data", "model")
    assert "intermediates that the plan pins" not in export_plan(plan, "accelerate")


def test_a_plan_with_split_modules_is_refused(plan: Plan, program: Program) -> None:
    rows = {name: Spec((("data",), ())) for name in plan.arguments if name.startswith("batch.")}
    columns = {"model.layers.*.mlp.up_proj.weight": Spec(((), ("model",), ()))}
    whole = {name: Spec.replicated(len(plan.shapes[name])) for name in plan.arguments}
    split = dataclasses.replace(plan, arguments=whole | rows | columns, axis_roles={})
    with pytest.raises(FormError, match="--for accelerate"):
        export_plan(split, "accelerate", program, force=True)


def test_a_program_without_blocks_is_refused(plan: Plan) -> None:
    with pytest.raises(FormError, match="no torch module with a ModuleList"):
        accelerate_text(plan, "", None)
