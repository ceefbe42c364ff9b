"""`hf:` decoders: the canonical program computes the values of the eager transformers module."""

import re

import numpy as np
import pytest
from hf_reference import check_training_step, close, random_batch, real_model

from autoshard.program import Role, open_source


BATCH, SEQ = 3, 14
CONFIGS = ["gpt2-tiny", "llama-tiny"]


@pytest.mark.parametrize(
    ("config", "remat"),
    [("gpt2-tiny", "none"), pytest.param("gpt2-tiny", "full", marks=pytest.mark.full), ("llama-tiny", "dots")],
)
def test_loss_gradients_and_update_equal_eager(config, remat, monkeypatch):
    check_training_step(config, monkeypatch, batch=BATCH, seq=SEQ, remat=remat)


@pytest.mark.parametrize("config", CONFIGS)
def test_logits_equal_eager(config):
    import jax
    import torch

    from autoshard.program.config_files import read_config
    from autoshard.program.torch.torch_function import TorchFunction

    _, fields = read_config(config)
    model = real_model(fields)
    program = open_source(f"hf:{config}", batch=BATCH, seq=SEQ, dtype="fp32")
    batch = random_batch(program, 1)
    expected = model(input_ids=torch.tensor(batch["input_ids"]).long(), use_cache=False).logits
    close(jax.jit(program.fn)(TorchFunction(model).values(), batch), expected.detach().numpy())


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("train", [True, False])
def test_no_dim_merges_batch_with_anything(config, train):
    import jax

    program = open_source(f"hf:{config}", train=train, batch=11, seq=26)
    text = jax.jit(program.fn).lower(*program.args).as_text()
    sizes = {int(size) for dims in re.findall(r"tensor<((?:\d+x)+)", text) for size in dims.split("x") if size}
    heads = {2, 4, 8}
    merged = {11 * 26} | {11 * h for h in heads} | {26 * h for h in heads if 26 * h != 208} | {26 * 26}
    assert 11 in sizes and 26 in sizes
    assert not sizes & merged
    assert "stablehlo.while" in text


def test_layers_are_stacked_arguments_with_roles_and_ties():
    program = open_source("hf:llama-tiny", train=True, batch=4, seq=16, remat="full")
    named = {argument.name: argument for argument in program.arguments}
    up = named["model.layers.*.mlp.up_proj.weight"]
    assert up.shape == (4, 128, 64) and up.dtype == "float32" and up.role is Role.PARAMETER and up.donated
    assert program.results[up.result].name == up.name and program.results[up.result].argument is not None
    moment = named["optimizer.mu.model.layers.*.mlp.up_proj.weight"]
    assert moment.role is Role.OPTIMIZER_STATE and moment.shape == up.shape and moment.donated
    assert named["batch.input_ids"].role is Role.BATCH and named["batch.labels"].dtype == "int32"
    assert all(a.result is not None for a in program.arguments if a.role is not Role.BATCH)
    assert program.training and program.tokens == 64
    assert program.results[-1].shape == () and program.results[-1].argument is None


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("options", "dtypes"),
    [
        ({"train": True}, {"parameter": "float32", "optimizer_state": "float32"}),
        ({"train": True, "state_dtype": "bf16"}, {"parameter": "float32", "optimizer_state": "bfloat16"}),
        (
            {"train": True, "param_dtype": "bf16", "state_dtype": "bf16"},
            {"parameter": "bfloat16", "optimizer_state": "bfloat16"},
        ),
        (
            {"train": True, "param_dtype": "bf16", "state_dtype": "fp32"},
            {"parameter": "bfloat16", "optimizer_state": "float32"},
        ),
        ({"train": True, "param_dtype": "bf16"}, {"parameter": "bfloat16", "optimizer_state": "float32"}),
        ({"train": False}, {"parameter": "bfloat16"}),
        ({"train": False, "dtype": "fp32"}, {"parameter": "float32"}),
    ],
)
def test_dtypes_of_parameters_and_state(options, dtypes):
    program = open_source("hf:gpt2-tiny", batch=2, seq=8, **options)
    for role, dtype in dtypes.items():
        found = {a.dtype for a in program.arguments if a.role.value == role and a.shape}
        assert found == {dtype}
    if not options["train"]:
        assert program.results[0].dtype == dtypes["parameter"]


@pytest.mark.parametrize(
    ("config", "layer"), [("llama-tiny", 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128), ("gpt2-tiny", 12 * 64 * 64)]
)
def test_model_flops_are_six_n_t_plus_causal_attention(config, layer):
    batch, seq = 2, 16
    program = open_source(f"hf:{config}", train=True, batch=batch, seq=seq, remat="full")
    matmul = 4 * layer + 64 * 256
    attention = 4 * (2 * 2 * batch * seq * seq * 64) / 2
    assert program.model_flops == pytest.approx(6 * matmul * batch * seq + 3 * attention)
    forward = open_source(f"hf:{config}", batch=batch, seq=seq)
    assert forward.model_flops == pytest.approx(program.model_flops / 3)


def test_bf16_compute_stays_bf16_and_close_to_fp32():
    import jax

    program = open_source("hf:llama-tiny", train=True, batch=2, seq=16)
    text = jax.jit(program.fn).lower(*program.args).as_text()
    dots = re.findall(r"stablehlo.dot_general.*: \((.*?)\)", text)
    assert dots and all("bf16" in types and "f32" not in types.replace("bf16", "") for types in dots)
    narrow = open_source("hf:llama-tiny", batch=2, seq=16)
    wide = open_source("hf:llama-tiny", batch=2, seq=16, dtype="fp32")
    params, batch = narrow.make_args(3)
    close(jax.jit(narrow.fn)(params, batch), jax.jit(wide.fn)(params, batch), 3e-2)


def test_equal_programs_have_equal_fingerprints():
    first = open_source("hf:gpt2-tiny", train=True, batch=2, seq=8)
    again = open_source("hf:gpt2-tiny", train=True, batch=2, seq=8)
    other = open_source("hf:gpt2-tiny", train=True, batch=4, seq=8)
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_made_arguments_are_plausible():
    import jax

    from autoshard.program.jax.train_step import token_loss

    program = open_source("hf:gpt2-tiny", batch=2, seq=8)
    params, batch = program.make_args(0)
    assert np.all(params["transformer.h.*.ln_1.weight"] == 1) and np.any(params["transformer.h.*.mlp.c_fc.bias"] != 0)
    assert 0.01 < params["transformer.wte.weight"].astype(np.float32).std() < 0.03
    assert batch["input_ids"].max() < 256 and batch["input_ids"].std() > 10
    loss = token_loss(jax.jit(program.fn)(params, batch), batch["input_ids"][::-1])
    assert abs(float(loss) - np.log(256)) < 0.3
    state = open_source("hf:gpt2-tiny", train=True, batch=2, seq=8).make_args(0)[1]
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state))
