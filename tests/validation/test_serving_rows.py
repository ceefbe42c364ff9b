"""Measured steps of serving: parsed, and rebuilt with weights and caches laid out as stated."""

import pathlib
from typing import Any

import pytest

from autoshard.errors import UserError
from autoshard.planning.price.evaluate import tensor_spec
from autoshard.program import config_program
from autoshard.validation import validate_pairs
from autoshard.validation.pair_rows import read_groups
from autoshard.validation.serving_rows import ServingRun, rebuild_serving
from tests.validation.measured import group, write


MODEL = {
    "family": "llama", "layers": 4, "emb": 512, "mlp": 2048, "heads": 16, "kv_heads": 1, "head_dim": 64, "vocab": 2048,
    "parallel_block": True,
}  # fmt: skip
DECODE = {"ffn": "WS 2D", "attention": "batch", "batch": 32, "phase": "decode 8", "dtype": "bf16"}
PREFILL = {"ffn": "WG XYZ", "attention": "batch", "batch": 32, "phase": "prefill 128", "dtype": "bf16"}


def served(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    given = {"hardware": "TPU v4", "chips": 16, "topology": "2x2x4", "model": MODEL, "fixed": {}} | changes
    return group(*rows, kind="workload", **given)


def run_of(folder: pathlib.Path, plan: dict[str, Any], *others: dict[str, Any]) -> ServingRun:
    (pair_group,) = read_groups(write(folder, served({"plan": plan}, *({"plan": each} for each in others))))
    assert pair_group.rows[0].serving is not None and pair_group.rows[0].run is None, pair_group.rows[0].skipped
    return pair_group.rows[0].serving


def specs(run: ServingRun) -> dict[str, Any]:
    model, choices = rebuild_serving(run)
    arguments = zip(model.program.arguments, model.graph.arguments, strict=True)
    return {each.name: tensor_spec(model, choices, tensor).dims for each, tensor in arguments}


def test_rows_say_phase_layout_and_time(tmp_path: pathlib.Path):
    rows = [{"plan": DECODE, "latency_s": 0.4}, {"plan": PREFILL, "latency_s": 1.5, "mfu": 40}]
    (pair_group,) = read_groups(write(tmp_path, served(*rows)))
    decode, prefill = (row.serving for row in pair_group.rows)
    assert decode is not None and prefill is not None
    assert (decode.steps, decode.seq, decode.context, decode.by_batch, decode.parallel) == (8, 8, 128, True, True)
    assert any("a context of 128 tokens" in said for said in decode.assumed)
    assert (prefill.steps, prefill.seq, prefill.context) == (1, 128, 0)
    assert [row.step_s for row in pair_group.rows] == [0.4, 1.5]
    assert [row.token_s for row in pair_group.rows] == [0.4 / (32 * 8), 1.5 / (32 * 128)]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (DECODE | {"dtype": "int8 weights"}, "dtype 'int8 weights' is not rebuilt: weights of 16 bits are"),
        (DECODE | {"phase": "speculation 4"}, "phase='speculation 4' is neither `prefill TOKENS` nor `decode TOKENS`"),
        (DECODE | {"ffn": "WS 3D"}, "ffn='WS 3D' is no layout of weights"),
        (DECODE | {"attention": "ring"}, "attention='ring' is neither split by heads nor by batch"),
        (DECODE | {"batch": 0}, "batch is 0"),
        (DECODE | {"tp": 4}, "tp=4 is not rebuilt in serving"),
        (DECODE, "the context length of the decoded tokens is not stated"),
    ],
)
def test_what_is_not_rebuilt_says_why(tmp_path: pathlib.Path, plan: dict[str, Any], reason: str):
    others = () if reason.startswith("the context") else ({"plan": PREFILL},)
    (pair_group,) = read_groups(write(tmp_path, served({"plan": plan, "latency_s": 0.4}, *others)))
    assert pair_group.rows[0].serving is None and reason in pair_group.rows[0].skipped


def test_a_family_fills_in_what_its_rows_leave_open(tmp_path: pathlib.Path):
    dims = {key: value for key, value in MODEL.items() if key != "vocab"} | {"family": "PaLM 540B"}
    (pair_group,) = read_groups(write(tmp_path, served({"plan": PREFILL}, model=dims)))
    run = pair_group.rows[0].serving
    assert run is not None and run.decoder.vocabulary == 256_000 and run.decoder.tied
    assert "vocab 256000 of PaLM 540B" in run.assumed


def test_stationary_weights_stand_in_two_dims_and_caches_by_sequence(tmp_path: pathlib.Path):
    specs_by_name = specs(run_of(tmp_path, DECODE, PREFILL))
    # 16 devices: 2 along the width, 8 along ffn and heads.
    assert specs_by_name["model.layers.*.mlp.gate_proj.weight"] == ((), ("yz",), ("x",))
    assert specs_by_name["model.layers.*.mlp.down_proj.weight"] == ((), ("x",), ("yz",))
    assert specs_by_name["cache.model.layers.*.keys"] == ((), ("x", "yz"), (), (), ())
    specs_by_name = specs(run_of(tmp_path, DECODE | {"ffn": "WS 1D", "attention": "heads"}, PREFILL))
    assert specs_by_name["model.layers.*.mlp.gate_proj.weight"] == ((), ("yz",), ())
    assert specs_by_name["cache.model.layers.*.keys"] == ((), (), (), (), ())


def test_gathered_weights_are_spread_and_the_batch_is_split(tmp_path: pathlib.Path):
    specs_by_name = specs(run_of(tmp_path, PREFILL))
    assert specs_by_name["batch.input_ids"] == (("x",), ())
    assert ("x",) in specs_by_name["model.layers.*.mlp.gate_proj.weight"]
    specs_by_name = specs(run_of(tmp_path, PREFILL | {"ffn": "WG X"}))
    assert specs_by_name["batch.input_ids"] == (("x",), ())
    assert sorted(specs_by_name["model.layers.*.mlp.gate_proj.weight"]) == [(), ("x",), ("yz",)]


def test_a_batch_that_does_not_divide_is_skipped(tmp_path: pathlib.Path):
    rows = [{"plan": DECODE | {"batch": 3}, "latency_s": 0.4}, {"plan": DECODE, "latency_s": 0.4}, {"plan": PREFILL}]
    (pair_group,) = validate_pairs(write(tmp_path, served(*rows)))
    assert "do not allow WS 2D" in pair_group.rows[0].skipped
    # The measured time is for 8 steps.
    assert pair_group.rows[1].predicted_s is not None and pair_group.rows[1].tokens == 32 * 8
    one = specs_time(run_of(tmp_path, DECODE, PREFILL))
    assert pair_group.rows[1].predicted_s == pytest.approx(8 * one)


def specs_time(run: ServingRun) -> float:
    from autoshard.planning.price.evaluate import evaluate

    return evaluate(*rebuild_serving(run)).step_time_s


def test_fields_of_a_configuration_make_a_program():
    fields = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512}
    program = config_program(fields, serve="prefill", batch=2, seq=16)
    assert program.name.startswith("llama") and program.tokens == 32
    with pytest.raises(UserError, match="`the configuration`: hidden_size is '0'"):
        config_program(fields | {"hidden_size": 0}, batch=2)
    with pytest.raises(UserError, match="no `model_type`"):
        config_program({"hidden_size": 64})
