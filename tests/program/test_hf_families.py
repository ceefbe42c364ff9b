"""Further `hf:` decoder families against their eager modules: output and gradients, scan and roles."""

import re

import pytest
from hf_reference import check_training_step

from autoshard.program import open_source


BATCH, SEQ = 3, 14
DECODERS = {
    "gemma2-tiny": ["model.layers.[0::2].mlp.up_proj.weight", "model.layers.[1::2].self_attn.q_proj.weight"],
    "mixtral-tiny": ["model.layers.*.mlp.experts.gate_up_proj", "model.layers.*.mlp.gate.weight"],
    "deepseek-v3-tiny": ["model.layers.[1:].mlp.experts.down_proj", "model.layers.0.mlp.up_proj.weight"],
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config", [pytest.param(each, marks=[pytest.mark.full] * each.startswith("deepseek")) for each in DECODERS]
)
def test_training_step_equals_eager(config, monkeypatch):
    all_slots = {} if config == "gemma2-tiny" else {"capacity_factor": 100.0}
    check_training_step(config, monkeypatch, batch=BATCH, seq=SEQ, **all_slots)


@pytest.mark.few(1)
@pytest.mark.parametrize("config", DECODERS)
def test_decoder_is_scanned_and_keeps_dims_apart(config):
    import jax

    program = open_source(f"hf:{config}", train=True, batch=11, seq=26, remat="full")
    names = {argument.name for argument in program.arguments}
    assert names >= set(DECODERS[config])
    assert all(a.result is not None for a in program.arguments if a.role.value in ("parameter", "optimizer_state"))
    text = jax.jit(program.fn).lower(*program.args).as_text()
    assert "stablehlo.while" in text
    sizes = {int(size) for dims in re.findall(r"tensor<((?:\d+x)+)", text) for size in dims.split("x") if size}
    assert not sizes & {11 * 26, 22, 44, 88, 52, 104}
    assert not re.search(r"chlo.top_k|stablehlo.sort|reduce_window", text)


def test_experts_say_how_they_are_dispatched_and_count_only_chosen_ones():
    dropped = open_source("hf:mixtral-tiny", batch=2, seq=16)
    assert dropped.notes == (
        "Experts are dispatched by einsum: groups of 16 tokens, 10 slots for each of 4 experts; "
        "tokens beyond the slots are dropped.",
    )
    exact = open_source("hf:mixtral-tiny", batch=2, seq=16, capacity_factor=2.0)
    assert exact.notes[0].endswith("(no token is ever dropped).")
    attention = 64 * 64 * 2 + 64 * 32 * 2
    per_token = 2 * (4 * (attention + 64 * 4 + 2 * 3 * 64 * 96) + 64 * 256)
    causal = 4 * (2 * 2 * 2 * 16 * 16 * 64) / 2
    assert dropped.model_flops == exact.model_flops == pytest.approx(per_token * 32 + causal)


def test_routing_prefers_the_lower_index_on_a_tie():
    import jax.numpy as jnp

    from autoshard.program.moe.experts import choose, group_size

    first, second = choose(jnp.array([[1.0, 3.0, 3.0, 3.0]]), 2)
    assert first.tolist() == [[False, True, False, False]] and second.tolist() == [[False, False, True, False]]
    assert group_size(4096) == 512 and group_size(26) == 26 and group_size(1021) == 1


def test_tokens_beyond_the_slots_of_an_expert_are_dropped():
    import jax.numpy as jnp

    from autoshard.program.moe.experts import capacity, mix

    x = jnp.ones((1, 4, 2))
    mask = jnp.zeros((1, 4, 2), bool).at[:, :, 0].set(True)  # every token chooses expert 0
    weights = mask.astype(jnp.float32)
    gate_up, down = jnp.ones((2, 2, 2)), jnp.ones((2, 2, 1))
    with capacity(1.0, notes := []):
        out = mix(x, weights, mask, gate_up, down, lambda v: v, 1)
    assert out[0, :, 0].tolist() == [4.0, 4.0, 0.0, 0.0] and "2 slots for each of 2 experts" in notes[0]


def test_sliding_windows_alternate():
    """Connect tokens beyond the window only through the full-attention layers."""
    program = open_source("hf:gemma2-tiny", batch=1, seq=16, dtype="fp32")
    assert program.model_flops < open_source("hf:llama-tiny", batch=1, seq=16, dtype="fp32").model_flops * 4
    names = sorted(a.name for a in program.arguments if "q_proj" in a.name)
    assert names == ["model.layers.[0::2].self_attn.q_proj.weight", "model.layers.[1::2].self_attn.q_proj.weight"]
