"""Compiled steps of decoding: they store their caches once, and need the predicted bytes and time."""

import importlib.util
import json
from pathlib import Path

import pytest

from autoshard.exec import compile_plan
from autoshard.planning import Options, make_plan
from autoshard.program import Program, open_source
from autoshard.program.kernels.cached_keys import major_to_minor


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def decoding(directory: Path, batch: int, cache: int, dtype: str, attention: str = "plain") -> tuple[Program, int]:
    """Open a step of a small decoder. Return it and the bytes of its cache."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    options = {"serve": "decode", "seq": cache, "dtype": dtype, "attention": attention}
    program = open_source(f"hf:{directory / 'config.json'}", batch=batch, **options)
    return program, 2 * 3 * batch * 4 * cache * 128 * {"fp32": 4, "bf16": 2}[dtype]


def test_on_cpu_devices_no_second_cache_is_stored_and_no_token_is_gathered(tmp_path: Path):
    program, cache = decoding(tmp_path, 8, 1024, "fp32")
    plan = make_plan(program, Options(topology="cpu:8", mesh={"data": 2, "model": 4})).plan
    compiled = plan.lower(program.fn, *program.args, donate_argnums=program.donate_argnums).compile()
    found, local = compiled.memory_analysis(), cache // 8
    assert found.alias_size_in_bytes >= local
    assert found.temp_size_in_bytes < local / 2
    assert "all-gather" not in {c.kind for c in plan.prediction.collectives}
    assert " all-gather(" not in compiled.as_text()


@pytest.mark.parametrize("attention", [pytest.param("plain", marks=pytest.mark.full), "cached"])
def test_for_tpus_the_cache_is_stored_once_and_read_once(tmp_path: Path, attention: str):
    if importlib.util.find_spec("libtpu") is None:  # an optional extra
        pytest.skip("libtpu is not installed")
    program, cache = decoding(tmp_path, 64, 4096, "bf16", attention)
    plan = make_plan(program, Options(topology="v5e:2x2", mesh={"data": 2, "model": 2})).plan
    compilation = compile_plan(program, plan)
    assert compilation.peak_compiled is not None and compilation.estimate is not None
    assert cache // 4 < compilation.peak_compiled < 1.2 * cache // 4
    assert plan.prediction.peak_bytes == pytest.approx(compilation.peak_compiled, rel=0.1)
    assert plan.prediction.step_time_s == pytest.approx(compilation.estimate.step_time_s, rel=0.5)
    assert ("cached_attention" in compilation.hlo) == (attention == "cached")


def test_a_cache_of_narrow_heads_is_laid_out_with_positions_innermost() -> None:
    """Choose the layouts of TPU entry points: heads of 64, as GPT-2's, would be padded to 128 and each cache copied."""
    assert major_to_minor((48, 16, 25, 1024, 64)) == (0, 1, 2, 4, 3)
    assert major_to_minor((32, 16, 8, 8192, 128)) == (0, 1, 2, 3, 4)
    assert major_to_minor((16, 8, 64, 64)) == (0, 1, 2, 3)
