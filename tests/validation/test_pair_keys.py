"""Measured rows whose sources name options by keys of their own."""

import json
import pathlib
from typing import Any

import pytest

from autoshard.cli import main
from autoshard.cost import Topology
from autoshard.program import KernelBlocks
from autoshard.validation import validate_pairs
from autoshard.validation.pair_rows import MeasuredPlan, read_groups
from tests.validation.measured import MODEL, group, write


BARE = {"remat": "full", "attention": "splash", "optimizer": "adamw"}
STATED = {"seq": 256, "per_device_batch": 1} | BARE
ARGUMENTS = {"remat_policy": "full", "max_target_length": 256, "per_device_batch_size": 1, "opt_type": "adamw"}
ARGUMENTS |= {"attention": "flash"}


def read(folder: pathlib.Path, plan: Any = None, assume: Any = None, **changes: Any) -> MeasuredPlan:
    given = group({"plan": {"fsdp": 4} if plan is None else plan, "step_time_s": 0.5}, **{"fixed": STATED} | changes)
    return read_groups(write(folder, given), assume=assume)[0].rows[0]


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        ({"fsdp": 4, "slices": 1}, {}),
        ({"fsdp": 4, "recipe_version": "v2", "case": 3, "tags": ["a"]}, {}),
        ({"fsdp": 4, "devices": 4}, {}),
        ({"FSDP": "4"}, {}),
        ({"fsdp": 4, "batch": 4}, {"fixed": BARE | {"seq": 256}}),
        ({"fsdp": 4}, {"fixed": BARE | {"sequence_length": 256, "tokens_per_chip": 256}}),
        ({"fsdp": 4}, {"fixed": BARE | {"seq": 256, "tokens_per_step": 1024}}),
        ({"fsdp": 4, "quantization": "", "residual_dtype": None, "tile_mode": "off"}, {}),
        ({"mesh": {"data": 1, "fsdp": 4}}, {}),
        ({"ici_fsdp_parallelism": -1, "ici_tensor_parallelism": 1}, {}),
        (
            {},
            {"fixed": {"base_args": ARGUMENTS | {"steps": 30, "dataset_type": "synthetic"}, "ici_fsdp_parallelism": 4}},
        ),
        ({"fsdp": 4}, {"fixed": {}, "base_args": ARGUMENTS | {"dtype": "bfloat16", "weight_dtype": "float32"}}),
    ],
)
def test_other_names_and_labels_change_no_run(tmp_path: pathlib.Path, plan: dict, changes: dict):
    stated, other = read(tmp_path), read(tmp_path, plan, **changes)
    assert (other.skipped, other.run) == ("", stated.run)


def test_labels_stand_in_the_note_and_distinguish_no_plans(tmp_path: pathlib.Path):
    row = read(tmp_path, {"fsdp": 4, "recipe_version": 2, "trainer": "a"})
    assert (row.note, row.choice) == ("recipe_version=2, trainer=a", "fsdp=4")


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"fsdp": 4, "matmul_kernel": "new"}, "matmul_kernel=new is not rebuilt"),
        ({"fsdp": 4, "cache_dtype": "fp8"}, "cache_dtype=fp8 is not rebuilt"),
        ({"fsdp": 4, "quantization": "fp8"}, "quantised fp8' is not rebuilt"),
        ({"fsdp": 4, "fsdp_size": 2}, "fsdp is stated twice, as 4 and as 2"),
        ({"fsdp": 4, "devices": 16}, "4 chips are stated, and 16 devices"),
        ({"fsdp": 4, "devices": "many"}, "devices is 'many'"),
        ({"fsdp": 4, "xla_flags": 3}, "xla_flags is 3, neither a text nor a list of flags"),
        ({"fsdp": 4, "tokens_per_chip": 100}, "tokens_per_chip=100 is 1.562 sequences of 256 tokens on v5p:2x2x1"),
        ({"ici_fsdp_parallelism": 3}, "the ici degrees make 3, but there are 4"),
        ({"ici_fsdp_parallelism": "all"}, "ici_fsdp_parallelism is 'all', not a whole number above 0 or -1"),
        ({"ici_sequence_parallelism": 4}, "ici_sequence_parallelism=4 is not rebuilt"),
    ],
)
def test_a_key_that_changes_a_price_refuses_the_row(tmp_path: pathlib.Path, plan: dict, said: str):
    assert said in read(tmp_path, plan).skipped


def test_a_quantised_group_is_not_priced_in_16_bits(tmp_path: pathlib.Path):
    assert "quantised fp8" in read(tmp_path, fixed=STATED | {"quantization": "fp8"}).skipped
    whole = read(tmp_path, fixed=STATED | {"quantization": "int8"})
    assert whole.run is not None and whole.run.quantize == "int8"
    assert any("int8 in all three matmuls" in line for line in whole.assumed)


@pytest.mark.parametrize(
    ("remat", "saved"),
    [
        ("save q,k,v,out,ffn2 (all but ffn1)", ("full", ("query", "key", "value", "out", "down"))),
        ("save matmul results (save_dot_except_mlpwi), fused qkv", ("save_dot_except_mlpwi", None)),
    ],
)
def test_lists_of_saved_values_and_policies_in_brackets_are_read(tmp_path: pathlib.Path, remat: str, saved: tuple):
    row = read(tmp_path, {"fsdp": 4, "remat": remat})
    assert row.run is not None and (row.run.remat, row.run.saves) == saved


def test_arguments_of_maxtext_are_those_of_the_run(tmp_path: pathlib.Path):
    arguments = ARGUMENTS | {
        "remat_policy": "custom", "decoder_layer_input": "offload", "query_proj": "device", "out_proj": "remat",
        "sa_block_q": 1024, "sa_block_kv": 1024, "sa_block_q_dkv": 2048, "sa_use_fused_bwd_kernel": True,
    }  # fmt: skip
    row = read(tmp_path, fixed={}, base_args=arguments, base_xla_flags=["--xla_a=1"])
    assert row.run is not None and (row.run.offloads, row.run.saves) == (("input",), ("query",))
    assert row.run.blocks == KernelBlocks((1024, 1024), (2048, 512), (512, 512), True)
    assert row.run.flags == ("--xla_a=1",)
    extended = read(tmp_path, {"fsdp": 4, "xla_flags": "--xla_b=2"}, base_xla_flags="--xla_a=1")
    assert extended.run is not None and extended.run.flags == ("--xla_a=1", "--xla_b=2")


def test_degrees_within_and_between_slices_multiply(tmp_path: pathlib.Path):
    row = read(tmp_path, {"ici_fsdp_parallelism": 4, "dcn_data_parallelism": -1, "slices": 2}, chips=8)
    assert row.run is not None and (row.run.copies, row.run.spread, row.run.network) == (2, 4, (("data", 2),))
    assert row.run.topology.name == "v5p:2x2x1*2"


def test_assumed_options_fill_gaps_alone_and_are_named(tmp_path: pathlib.Path):
    assume = {"seq": 256, "batch": 8, "fsdp": 2}
    full = read(tmp_path, assume=assume)
    assert full.run is not None and full.run.batch == 4 and not full.assumed
    filled = read(tmp_path, fixed=BARE | {"seq": "not said", "per_device_batch": "not said (12?)"}, assume=assume)
    assert filled.run is not None and (filled.run.batch, filled.run.spread) == (8, 4)
    assert filled.assumed == ("seq=256 (--assume)", "global_batch=8 (--assume)")


def test_the_command_says_what_was_assumed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    def called(*arguments: str) -> tuple[int, str, str]:
        return main(["validate", *arguments]), *capsys.readouterr()

    file = write(tmp_path, group({"plan": {"fsdp": 4}, "step_time_s": 0.5}, fixed=BARE | {"seq": 256}))
    code, out, _ = called("--pairs", str(file), "--assume", "batch=4")
    assert code == 0 and "assumed: global_batch=4 (--assume)" in out
    _, out, _ = called("--pairs", str(file), "--assume", "batch=4", "--json")
    assert json.loads(out)["groups"][0]["rows"][0]["assumed"] == ["global_batch=4 (--assume)"]
    code, _, error = called("--pairs", str(file), "--assume", "batch")
    assert code == 2 and "'batch' is not KEY=VALUE" in error
    code, _, error = called("--assume", "batch=4")
    assert code == 2 and "--assume is for measured pairs" in error


GPU = {"hardware": "H100 96GB HBM2e 2.4TB/s", "chips": 16, "topology": "NVLink nodes"}


def test_runs_of_eager_frameworks_have_their_degrees_and_microbatches(tmp_path: pathlib.Path):
    model = MODEL | {"family": "llama3.1-8b"}
    stated = {"framework": "torchtitan", "remat": "selective (every other op)", "seq": 512, "dtype": "float8"}
    plan = {"mesh": "fsdp=4,tp=2,cp=2", "execution": "compile", "global_batch": 8}
    row = read(tmp_path, plan, fixed=stated, model=model, **GPU)
    assert row.skipped == "" and row.gpu is not None
    assert (row.gpu.dp, row.gpu.tp, row.gpu.cp, row.gpu.zero, row.gpu.dtype) == (4, 2, 2, 3, "fp8")
    assert (row.gpu.framework, row.gpu.recompute, row.gpu.micro_batch) == ("torchtitan compiled", "selective", 2)
    assert row.gpu.topology.name == "h100:8*2" and row.gpu.topology.chip.hbm_bytes == 96 << 30
    assert row.gpu.topology.chip.memory_bytes_per_s == 2.4e12
    (priced,) = validate_pairs(write(tmp_path, group({"plan": plan}, fixed=stated, model=model, **GPU)))
    assert priced.rows[0].predicted_s is not None and priced.rows[0].fits


@pytest.mark.parametrize(("power", "clock"), [(", 350 W power limit", 0.7937), (", 700 W", 1.0), ("", 1.0)])
def test_a_limit_of_power_lowers_the_clock_of_gpus(tmp_path: pathlib.Path, power: str, clock: float):
    """Halve the power: the clock is the cube root of a half."""
    stated = {"framework": "torchtitan", "remat": "full", "seq": 512, "global_batch": 16}
    given = GPU | {"hardware": f"H100 SXM{power}"}
    row = read(tmp_path, {"mesh": "fsdp=16"}, fixed=stated, model=MODEL | {"family": "llama3.1-8b"}, **given)
    assert row.gpu is not None
    known, limited = Topology.parse("h100:8*2"), row.gpu.topology
    for dtype in ("bf16", "fp8"):
        assert limited.peak_flops(dtype) == pytest.approx(clock * known.peak_flops(dtype), rel=1e-4)
    assert limited.chip.memory_bytes_per_s == known.chip.memory_bytes_per_s


def test_a_public_model_has_the_dims_of_its_name(tmp_path: pathlib.Path):
    stated = {"framework": "Megatron-LM bf16", "micro_batch": 1, "micro_batches": 4, "seq": 4096}
    row = read(tmp_path, {"tp": 2, "dp": 8}, fixed=stated, model={"family": "llama3_70b", "layers": 12}, **GPU)
    assert row.gpu is not None and (row.gpu.decoder.width, row.gpu.decoder.layers) == (8192, 12)
    assert (row.gpu.batch, row.gpu.zero) == (32, 1) and row.assumed[0] == "dims of llama3.1-70b"
    unknown = read(tmp_path, {"ep": 8}, fixed=stated, model={"family": "deepseekv3", "layers": 4}, **GPU)
    assert unknown.skipped == "the number of dense layers among the 4 of deepseek-v3 is not stated"


def test_published_runs_are_groups_of_workloads(tmp_path: pathlib.Path):
    rows = [
        {
            "id": "a", "model": "llama2-7b", "tpu": "v5p", "chips_per_slice": 64, "slices": 1, "topology": "4x4x4",
            "dims": {"L": 32, "D": 4096, "F": 11008, "N": 32, "K": 32, "H": 128, "V": 32000}, "seq": 4096,
            "per_chip_batch": 4, "sharding": "ICI FSDP=64", "remat": "full", "metric": "MFU %", "value": 50.0,
            "source": "AI-Hypercomputer/maxtext@0:a/b.md",
        },
        {"id": "b", "model": "matmul 8192^3 bf16", "tpu": "v5p", "metric": "TFLOP/s/device", "value": 400.0,
         "source": "AI-Hypercomputer/maxtext@0:a/b.md"},
    ]  # fmt: skip
    file = tmp_path / "runs.json"
    file.write_text(json.dumps(rows))
    (pair_group,) = read_groups(file)
    first, second = pair_group.rows
    assert not pair_group.compares_plans and first.run is not None and first.step_s and first.token_s
    assert (second.run, second.skipped) == (None, "a matmul is no step")


def test_rounds_of_mlperf_on_tpus_are_rebuilt_or_say_why_not(tmp_path: pathlib.Path):
    model = MODEL | {"sequence": 2048, "gated": False}
    row = {
        "id": "r", "chip": "v5p", "chips": 4, "topology": "2x2x1", "slices": 1, "global_batch": 8, "remat": "full",
        "mesh": {"data": 1, "replica": 2, "fsdp": 2}, "matmuls": "int8 (AQT) in linear layers", "step_s_estimate": 2.0,
    }  # fmt: skip
    wide = {key: value for key, value in row.items() if key != "matmuls"}
    unet = {"id": "u", "chip": "v5p", "chips": 8, "global_batch": 256, "step_s_median": 0.4}
    file = tmp_path / "rounds.json"
    file.write_text(json.dumps({"gpt3_model": model, "gpt3": [row, wide], "stable_diffusion": [unet]}))
    first, second, third = (pair_group.rows[0] for pair_group in read_groups(file))
    assert first.run is not None and first.run.quantize == "int8"
    assert second.run is not None and (second.run.copies, second.run.spread, second.run.seq) == (2, 2, 2048)
    assert not second.run.decoder.gated and second.step_s == 2.0
    assert "a U-Net of Stable Diffusion' is not known" in third.skipped
