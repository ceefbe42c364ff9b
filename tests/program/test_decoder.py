"""Training steps made from a decoder's dims."""

import dataclasses

import pytest

from autoshard.cost import Decoder
from autoshard.errors import UserError
from autoshard.graph import read_graph
from autoshard.program import SAVED, DecoderDims, Program, Role, decoder_program


DIMS = DecoderDims(4, 64, 160, 4, 2, 16, 128)
CLOSED = Decoder(4, 64, 160, 4, 2, 16, 128)


def step(**options) -> Program:
    return decoder_program(DIMS, batch=2, seq=32, **options)


def matmul_flops(program: Program) -> float:
    """What the dots and attention kernels of the program compute, loops counted."""
    return read_graph(program.module).flops


@pytest.mark.parametrize("changes", [{}, {"gated": False}, {"tied": True}, {"gated": False, "tied": True}])
def test_parameters_and_model_flops_are_those_of_the_closed_form(changes: dict) -> None:
    program = decoder_program(dataclasses.replace(DIMS, **changes), batch=2, seq=32)
    closed = dataclasses.replace(CLOSED, **changes)
    parameters = [a for a in program.arguments if a.role is Role.PARAMETER]
    total = 0
    for argument in parameters:
        count = 1
        for size in argument.shape:
            count *= size
        total += count
    assert total == closed.params
    assert program.model_flops == pytest.approx(closed.train_flops(64, 32))
    assert program.tokens == 64 and program.training
    assert all(a.dtype == "float32" for a in parameters)


def test_what_is_recomputed_follows_from_what_is_saved() -> None:
    flops = {remat: matmul_flops(step(remat=remat)) for remat in ("none", *SAVED)}
    assert flops["none"] < flops["minimal"] < flops["save_dot_except_mlp"] < flops["qkv_proj_offloaded"]
    assert flops["qkv_proj_offloaded"] < flops["full"]
    assert flops["custom"] == flops["save_dot_except_mlp"]
    layers = 4 * (CLOSED.attention_params + CLOSED.mlp_params)
    # Full: every matmul of a layer twice forward, but for the last one, whose result nothing backward needs.
    again = 2.0 * 64 * (layers - 4 * 64 * 160) + 64 * CLOSED.attention_flops_per_token(32)
    assert flops["full"] - flops["none"] == pytest.approx(again)


def test_a_flash_kernel_computes_the_scores_once_more_and_half_of_them() -> None:
    kernel, plain = matmul_flops(step(remat="none")), matmul_flops(step(remat="none", attention="plain"))
    forward = 64 * CLOSED.attention_flops_per_token(32, causal=False)
    assert plain - kernel == pytest.approx(3.0 * forward - 0.5 * (1.0 + 2.5) * forward)
    assert step(attention="plain").model_flops == pytest.approx(CLOSED.train_flops(64, 32))


def test_local_layers_see_a_window() -> None:
    local = decoder_program(dataclasses.replace(DIMS, window=8, global_every=2), batch=2, seq=32)
    everywhere = step()
    assert local.model_flops is not None and everywhere.model_flops is not None
    assert local.model_flops < everywhere.model_flops
    names = [a.name for a in local.arguments if a.role is Role.PARAMETER]
    assert "layers.0.*.attn.q_proj.weight" in names and "layers.1.*.attn.q_proj.weight" in names
    shapes = {a.name: a.shape for a in local.arguments}
    assert shapes["layers.1.*.mlp.up_proj.weight"] == (2, 64, 160)


def test_bad_settings_are_named() -> None:
    with pytest.raises(UserError, match="remat 'some' is not known; known are none, full, minimal"):
        step(remat="some")
    with pytest.raises(UserError, match="4 layers in groups of 3, 4 heads in groups of 2 key-value heads"):
        decoder_program(dataclasses.replace(DIMS, global_every=3), batch=2, seq=32)
