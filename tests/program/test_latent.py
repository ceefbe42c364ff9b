"""Latent attention of decoders that are built from dims: its values, parameters and FLOPs."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.errors import UserError
from autoshard.program import LatentDims, Role, decoder_program
from autoshard.program.jax.decoder import _norm, _rotated
from autoshard.program.jax.mla import latent_heads, latent_shapes
from autoshard.serving import Decoder


LATENT = LatentDims(key_rank=24, nope_size=16, rope_size=8, value=12)
DIMS = Decoder(3, 64, 160, 4, 4, LATENT.head_size, 128, latent=LATENT)


@pytest.mark.parametrize("query_rank", [0, 20])
def test_heads_are_those_of_each_head_by_itself(query_rank: int) -> None:
    own = dataclasses.replace(LATENT, query_rank=query_rank)
    random = np.random.default_rng(0)
    shapes = latent_shapes(DIMS, own)
    weights = {key: random.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
    x = random.normal(size=(2, 6, DIMS.width)).astype(np.float32)
    query, key, value = latent_heads(own, jnp.asarray(x), weights, _norm, _rotated)

    def normed(value: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return value / np.sqrt((value**2).mean(-1, keepdims=True) + 1e-6) * scale

    def turned(value: np.ndarray) -> np.ndarray:
        """Rotate pairs (k, k + n) of the last dim, as complex numbers, by their angles."""
        half = value.shape[-1] // 2
        angle = np.arange(value.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)
        made = (value[..., :half] + 1j * value[..., half:]) * np.exp(1j * angle)
        return np.concatenate([made.real, made.imag], axis=-1)

    narrow = x @ weights["attn.kv_down.weight"]
    latent = normed(narrow[..., : own.key_rank], weights["attn.kv_norm.weight"])
    shared = turned(narrow[..., own.key_rank :])
    if query_rank:
        source = normed(x @ weights["attn.q_down.weight"], weights["attn.q_norm.weight"])
        queries = weights["attn.q_up.weight"]
    else:
        source, queries = x, weights["attn.q_proj.weight"]
    for head in range(DIMS.heads):
        made = latent @ weights["attn.kv_up.weight"][:, head]
        np.testing.assert_allclose(key[:, head, :, : own.nope_size], made[..., : own.nope_size], rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(key[:, head, :, own.nope_size :], shared, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(value[:, head], made[..., own.nope_size :], rtol=2e-4, atol=2e-4)
        asked = source @ queries[:, head]
        expected = np.concatenate([asked[..., : own.nope_size], turned(asked[..., own.nope_size :])], axis=-1)
        np.testing.assert_allclose(query[:, head], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("query_rank", [0, 20])
@pytest.mark.parametrize("attention", ["flash", "plain"])
def test_a_step_has_the_parameters_and_flops_of_the_closed_form(query_rank: int, attention: str) -> None:
    dims = dataclasses.replace(DIMS, latent=dataclasses.replace(LATENT, query_rank=query_rank))
    program = decoder_program(dims, batch=2, seq=32, attention=attention)
    total = sum(math.prod(a.shape) for a in program.arguments if a.role is Role.PARAMETER)
    assert total == dims.params
    assert program.model_flops == pytest.approx(dims.train_flops(64, 32))
    assert dims.kv_bytes(10) == 10 * 3 * (24 + 8) * 2


def test_a_plain_step_trains() -> None:
    """Run a step: its loss is finite, and its gradients reach the weights that produce keys."""
    from autoshard.program.jax.decoder import _LayerOptions, _loss
    from autoshard.program.jax.decoder_dims import parameters_of
    from autoshard.program.moe.decoder_experts import Routing

    how = _LayerOptions(None, (), "plain", "auto", False, None, Routing("capacity"), "float32", 0, True, None)
    keys = iter(jax.random.split(jax.random.key(0), 40))
    params = {
        name: 0.1 * jax.random.normal(next(keys), s.shape, s.dtype)
        for name, s in parameters_of(DIMS, "float32", 0).items()
    }
    ids = jnp.arange(2 * 16).reshape(2, 16) % DIMS.vocabulary
    step = jax.value_and_grad(lambda p: _loss(DIMS, p, {"input_ids": ids, "labels": ids}, how))
    value, gradients = jax.jit(step)(params)
    assert np.isfinite(float(value))
    assert float(jnp.abs(gradients["layers.*.attn.kv_down.weight"]).max()) > 0


def test_latent_attention_has_no_groups_of_heads() -> None:
    with pytest.raises(UserError, match="2 key-value heads for 4 heads of latent attention"):
        decoder_program(dataclasses.replace(DIMS, kv_heads=2), batch=2, seq=32)
