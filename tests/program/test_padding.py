"""Models whose vocabulary, heads or widths are padded compute the steps of the models that they were."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autoshard
from autoshard.errors import FormError, UserError
from autoshard.exec import measure
from autoshard.exports import export_plan
from autoshard.program import Program, open_source, parse_padding
from autoshard.program.hf.hf_padding import PaddedSizes
from autoshard.program.hf.hf_program import from_config
from autoshard.report.figures import recipe_line


QWEN3 = {"model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
QWEN3 |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
OPTIONS: dict[str, Any] = {"train": True, "batch": 8, "seq": 32, "dtype": "float32"}


def steps(program: Program, weights: dict[str, Any], batch: Any) -> tuple[dict[str, Any], float]:
    """Run two steps on given weights, with zeros up to the program's shapes; return parameters and the last loss."""
    state = program.make_args(0)[1]
    params = {}
    for name, value in weights.items():
        shape = program.args[0][name].shape
        params[name] = np.pad(value, [(0, new - old) for new, old in zip(shape, value.shape, strict=True)])
    step = jax.jit(program.fn)
    for _ in range(2):
        params, state, loss = step(params, state, batch)
    return params, float(loss)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "pad", "more"),
    [
        ("gpt2-tiny", "vocabulary=100", {}),  # tied embeddings
        pytest.param("llama-tiny", "vocabulary=100,heads=3,width=96", {}, marks=pytest.mark.full),
        ("llama-tiny", "vocabulary=96", {"loss_chunks": "3", "optimizer": "muon"}),
        pytest.param(
            "gemma2-tiny", "vocabulary=100,heads=3", {"optimizer": "lion"}, marks=pytest.mark.full
        ),  # its logits are capped by tanh
        (QWEN3, "heads=3,width=96", {}),  # norms of queries and keys by head
    ],
)
def test_a_padded_model_has_the_steps_of_the_model(model: Any, pad: str, more: dict[str, Any]) -> None:
    given = OPTIONS | {key: value for key, value in more.items() if key != "loss_chunks"}
    whole = from_config(model, **given)
    padded = from_config(model, pad=pad, **(OPTIONS | more))
    assert padded.unpadded
    assert padded.model_flops == pytest.approx(whole.model_flops, rel=1e-6)
    weights, _, batch = whole.make_args(0)
    (expected, loss), (got, other) = (steps(program, weights, batch) for program in (whole, padded))
    assert other == pytest.approx(loss, rel=1e-6)
    for name, value in expected.items():
        inside = tuple(slice(0, size) for size in value.shape)
        np.testing.assert_allclose(got[name][inside], value, rtol=1e-4, atol=5e-5, err_msg=name)
        assert np.count_nonzero(got[name]) == np.count_nonzero(got[name][inside]), f"{name}: zeros have changed"


def test_a_padded_plan_runs_and_its_weights_are_padded_and_cut(tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file

    from autoshard.program import read_config

    fields = read_config("gpt2-tiny")[1] | {"vocab_size": 509}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**fields))
    model.save_pretrained(tmp_path / "model")
    program = from_config(fields, pad="128", **OPTIONS)
    plan = autoshard.plan(program, topology="cpu:8", mesh="data=2,model=4")
    check = measure(program, plan, steps=1, warmup=0, check=True).check
    assert check is not None and check.passed, check
    params = plan.load_weights(str(tmp_path / "model"), program)
    table = next(name for name in params if "wte" in name)
    assert params[table].shape[0] == 512 and not np.asarray(params[table])[509:].any()
    plan.save_weights(params, str(tmp_path / "saved"), program)
    saved = load_file(str(next((tmp_path / "saved").glob("*.safetensors"))))
    assert {tuple(value.shape)[0] for name, value in saved.items() if "wte" in name} == {509}


def test_padding_is_read_from_text() -> None:
    assert parse_padding("128") == PaddedSizes(vocabulary=128)
    assert parse_padding("heads=4, width=256") == PaddedSizes(heads=4, width=256)
    assert parse_padding(None) is parse_padding("none") is parse_padding("1") is None
    for wrong in ("0", "rows=2", "heads=2,heads=4", "width=-1", ""):
        with pytest.raises(UserError, match="--pad"):
            parse_padding(wrong)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("gpt2-tiny", {"pad": "heads=3"}, "has no `head_dim`, so its heads stay"),
        ("vit-tiny", {"pad": "128", "seq": None}, "has no `vocab_size`"),
        ("llama-tiny", {"pad": "heads=3", "optimizer": "muon"}, "would change the updates of --optimizer muon"),
        ("llama-tiny", {"pad": "100", "optimizer": "adafactor"}, "would change the updates of --optimizer adafactor"),
        ("llama-tiny", {"pad": "100", "train": None}, "--pad is for training steps"),
        ("mixtral-tiny", {"pad": "width=80"}, "zeros at the end of `model.layers.0"),
    ],
)
def test_what_zeros_would_change_is_refused(model: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_config(model, **(OPTIONS | options))


def test_exports_with_code_of_the_model_itself_refuse_padding() -> None:
    program = open_source("hf:gpt2-tiny", pad="100", **OPTIONS)
    plan = autoshard.plan(program, topology="cpu:8", mesh="data=4,model=2")
    with pytest.raises(FormError, match="cannot say --pad 100"):
        export_plan(plan, "dtensor", program)


def test_padding_is_chosen_where_it_pays(tmp_path: Path) -> None:
    """Pad an odd vocabulary that a small batch leaves whole on most devices; none of the other recipes is faster."""
    file = tmp_path / "odd.json"
    sizes = {"vocab_size": 50257, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    file.write_text(json.dumps({"model_type": "llama", "num_attention_heads": 4} | sizes))
    options = {"train": True, "batch": 2, "seq": 512, "attention": "plain", "pad": "auto"}
    plan = autoshard.plan(f"hf:{file}", topology="v5e:2x4", mesh="data=2,model=4", program_options=options)
    assert plan.recipe is not None and str(plan.recipe.chosen["pad"]).startswith("vocabulary=128")
    tried = {str(each["choices"]["pad"]): each["step_time_s"] for each in plan.recipe.tried}
    assert set(tried) == {"none", "vocabulary=128", "vocabulary=128,heads=8"}
    assert all(each is None or each >= plan.prediction.step_time_s for each in tried.values())
    assert (tried["none"] or 0.0) > 1.05 * plan.prediction.step_time_s
    assert "padded to multiples of vocabulary=128" in recipe_line(plan)
