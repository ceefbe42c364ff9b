"""`hf:` models of images, masked tokens, translation and speech against their eager modules."""

from typing import Any

import pytest
from hf_reference import check_training_step, close, random_batch, real_model

from autoshard.errors import UserError
from autoshard.program import Role, open_source


BATCH, SEQ = 3, 12
TASKS = {
    "vit-tiny": {},
    "bert-tiny": {"seq": SEQ},
    "t5-tiny": {"seq": SEQ},
    "whisper-mini": {"seq": SEQ},
    "resnet-tiny": {"image": 32},
}
STACKED = {
    "vit-tiny": "vit.layers.*.mlp.fc1.weight",
    "bert-tiny": "bert.encoder.layer.*.output.dense.weight",
    "t5-tiny": "decoder.block.[1:].layer.1.EncDecAttention.q.weight",
    "whisper-mini": "model.encoder.layers.*.fc1.weight",
    "resnet-tiny": "resnet.encoder.stages.1.layers.[1:].layer.1.convolution.weight",
}


def slice_of(configs: dict[str, Any], *kept: str) -> list[Any]:
    """Parametrise by all configurations, of which `make test` runs only those in `kept`."""
    return [pytest.param(each, marks=[pytest.mark.full] * (each not in kept)) for each in configs]


@pytest.mark.few(1)
@pytest.mark.parametrize("config", slice_of(TASKS, "vit-tiny", "t5-tiny"))
def test_training_step_equals_eager(config, monkeypatch):
    """Compare a training step: batch norms use batch statistics and update the running ones, frozen parameters stay."""
    check_training_step(config, monkeypatch, batch=BATCH, **TASKS[config])


@pytest.mark.parametrize("config", ["resnet-tiny", "vit-tiny"])
def test_inference_equals_eager(config):
    import jax
    import torch

    from autoshard.program.config_files import read_config
    from autoshard.program.torch.torch_function import TorchFunction

    _, fields = read_config(config)
    model = real_model(fields)
    program = open_source(f"hf:{config}", batch=BATCH, dtype="fp32", **TASKS[config])
    batch = random_batch(program, 1)
    expected = model(pixel_values=torch.tensor(batch["pixel_values"])).logits.detach().numpy()
    function = TorchFunction(model)
    extra = [function.buffer_values()] if function.buffers else []
    close(jax.jit(program.fn)(function.values(), batch, *extra), expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("config", slice_of(TASKS, "vit-tiny", "bert-tiny"))
@pytest.mark.parametrize("remat", ["none", "full"])
def test_training_step_is_scanned_and_tied(config, remat):
    import jax

    program = open_source(f"hf:{config}", train=True, batch=BATCH, remat=remat, **TASKS[config])
    named = {a.name: a for a in program.arguments}
    assert STACKED[config] in named and named[STACKED[config]].role is Role.PARAMETER
    assert all(a.result is not None for a in program.arguments if a.role in (Role.PARAMETER, Role.OPTIMIZER_STATE))
    assert "stablehlo.while" in jax.jit(program.fn).lower(*program.args).as_text()
    assert program.model_flops and program.results[-1].shape == ()


def test_running_statistics_are_donated_state():
    step = open_source("hf:resnet-tiny", train=True, batch=4, image=32)
    moved = [a for a in step.arguments if a.name.endswith(("running_var", "running_mean"))]
    assert moved and all(a.role is Role.OTHER and a.donated and a.result is not None for a in moved)
    assert all(a.dtype == "float32" for a in moved)


def test_statistics_stay_in_fp32_under_bf16_compute():
    program = open_source("hf:resnet-tiny", batch=2, image=32)
    assert {a.dtype for a in program.arguments if "running" in a.name} == {"float32"}
    assert {a.dtype for a in program.arguments if a.role is Role.PARAMETER} == {"bfloat16"}


def test_frozen_parameters_are_not_trained():
    program = open_source("hf:whisper-mini", train=True, batch=2, seq=8)
    frozen = [a for a in program.arguments if a.name == "model.encoder.embed_positions.weight"]
    assert [a.role for a in frozen] == [Role.FROZEN] and frozen[0].result is None


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        ("hf:vit-tiny", {"seq": 8}, "--seq is for models of tokens; `vit-tiny` takes images"),
        ("hf:bert-tiny", {"image": 8}, "--image is for models of images; `bert-tiny` takes `input_ids`"),
        ("hf:vit-tiny", {"image": 64}, "--image 64 does not fit `vit-tiny`, whose positions are for images of 32"),
        ("hf:bert-tiny", {"seq": 100}, "--seq 100 is longer than the 64 positions `bert-tiny` has"),
        ("hf:whisper-mini", {"seq": 100}, "--seq 100 is longer than the 32 positions `whisper-mini` has"),
    ],
)
def test_sizes_a_model_cannot_take(source, options, sentence):
    with pytest.raises(UserError, match=sentence):
        open_source(source, batch=2, **options)


def test_a_headless_model_cannot_be_trained(tmp_path):
    file = tmp_path / "base.json"
    file.write_text(
        '{"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 16, "num_hidden_layers": 2,'
        ' "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}'
    )
    assert open_source(f"hf:{file}", batch=2, seq=8).results
    with pytest.raises(UserError, match="`base` has no `logits` to train on"):
        open_source(f"hf:{file}", batch=2, seq=8, train=True)
