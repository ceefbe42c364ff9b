"""Attention over a cache by a kernel: equal to scores in memory, and refusals of the impossible."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.errors import UserError
from autoshard.program import Program, open_source
from autoshard.program.kernels import decode_attention, splash_attention
from autoshard.program.kernels.cached_keys import CachedKeys
from autoshard.program.kernels.decode_attention import _Blocks, cached_attention, cached_refusal, no_gain
from autoshard.program.kernels.dot_attention import attend


CONFIG = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "sliding_window": None,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
}


def cache(layers: int, batch: int, heads: int, length: int, filled: int, size: int = 128) -> CachedKeys:
    random = np.random.default_rng(0)
    keys, values = (
        jnp.asarray(random.standard_normal((layers, batch, heads, length, size)).astype(np.float32)) for _ in range(2)
    )
    return CachedKeys(keys, values, layers - 1, filled)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("sizes", "position", "more"),
    [
        ((2, 2, 2, 256), 0, {}),  # only the token itself
        ((2, 2, 2, 256), 127, {}),  # the last position of a block
        ((1, 2, 1, 384), 383, {"window": 100, "softcap": 5.0, "scale": 0.3}),
        ((1, 1, 2, 512), 40, {"window": 100}),  # a window that begins before the cache
        ((2, 1, 1, 6144), 4000, {}),  # three parts, the last one empty
        ((1, 1, 1, 4096), 3000, {"window": 200}),  # two parts; the window excludes the first
    ],
)
def test_the_kernel_computes_what_scores_in_memory_do(
    sizes: tuple[int, int, int, int], position: int, more: dict[str, Any]
) -> None:
    held = cache(*sizes, filled=position + 1)
    batch, heads = sizes[1:3]
    query = np.random.default_rng(1).standard_normal((batch, 3 * heads, 1, 128)).astype(np.float32)
    options = {"causal": True, "position": jnp.int32(position), **more}
    plain = attend(query, held.keys[held.layer], held.values[held.layer], **options)
    with splash_attention.attention_kernel("cached", []):
        kernel = attend(query, held.keys[held.layer], held.values[held.layer], held=held, **options)
    assert kernel.shape == plain.shape
    assert np.abs(plain - kernel).max() <= 1e-5 * np.abs(plain).max()


def test_blocks_that_hold_nothing_are_not_read() -> None:
    """Fill empty blocks with NaN: they may contain anything and must not be read."""
    held = cache(1, 1, 1, 8192, filled=200)
    assert _Blocks.of(1, 1, 8192, 1024).positions == 4096
    empty = CachedKeys(*(each.at[..., 4096:, :].set(np.nan) for each in (held.keys, held.values)), 0, 200)
    query = jnp.ones((1, 1, 2, 128))
    found = cached_attention(query, empty, position=199)
    assert bool(jnp.isfinite(found).all())
    assert np.abs(found - cached_attention(query, held, position=199)).max() == 0.0


def decoding(directory: Path, **options: Any) -> Program:
    (directory / "config.json").write_text(json.dumps(CONFIG | options.pop("config", {})))
    return open_source(f"hf:{directory / 'config.json'}", serve="decode", batch=2, dtype="fp32", **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("window", [None, 24])
def test_steps_of_decoding_are_the_same(tmp_path: Path, window: int | None) -> None:
    options: dict[str, Any] = {"seq": 64, "cache": 256, "config": {"sliding_window": window}}
    plain, kernel = (decoding(tmp_path, attention=each, **options) for each in ("plain", "cached"))
    assert "pallas_call" in str(jax.make_jaxpr(kernel.fn)(*kernel.args))
    assert kernel.model_flops is not None and plain.model_flops is not None
    assert kernel.model_flops < plain.model_flops, "it counts what is read"
    params, entries, batch, *rest = plain.make_args(0)
    random = np.random.default_rng(2)
    entries = jax.tree.map(lambda x: random.standard_normal(x.shape).astype(x.dtype), entries)
    for position in (0, 50, 255):
        given = (params, entries, batch | {"position": np.int32(position)}, *rest)
        (after, logits), (also, again) = jax.jit(plain.fn)(*given), jax.jit(kernel.fn)(*given)
        assert np.abs(logits - again).max() <= 1e-5 * np.abs(logits).max()
        for left, right in zip(jax.tree.leaves(after), jax.tree.leaves(also), strict=True):
            assert np.abs(left - right).max() <= 1e-5 * np.abs(left).max()


def test_the_program_is_the_same_where_kernels_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = decoding(tmp_path, attention="cached", seq=64, cache=128)
    monkeypatch.setattr(decode_attention, "interpreted", lambda: False)
    assert decoding(tmp_path, attention="cached", seq=64, cache=128).fingerprint == here.fingerprint
    assert decoding(tmp_path, attention="cached", seq=64, cache=256).fingerprint != here.fingerprint


def test_the_kernel_is_chosen_where_it_gains_and_else_it_is_reported(tmp_path: Path) -> None:
    half = decoding(tmp_path, attention="auto", seq=64, cache=128)
    assert not half.notes and "cached_attention" in str(jax.make_jaxpr(half.fn)(*half.args))
    whole = decoding(tmp_path, attention="auto", seq=128)
    assert whole.notes == (
        "An attention over the cache stays plain: 128 of its 128 places are to be read, and without a kernel all are "
        "read once, which is as fast.",
    )
    narrow = decoding(tmp_path, attention="auto", seq=64, cache=128, config={"head_dim": 64})
    assert len(narrow.notes) == 1 and "heads of 64 are no multiples of 128" in narrow.notes[0]


def test_what_the_kernel_cannot_take_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="attention `cached` cannot be: a cache of 100 tokens is no multiple of 128"):
        decoding(tmp_path, attention="cached", seq=100)
    with pytest.raises(UserError, match="attention `cached` is for steps of decoding"):
        open_source("hf:llama-tiny", infer=True, batch=2, seq=128, attention="cached")
    held = cache(1, 1, 1, 128, 128)
    assert not cached_refusal((1, 1, 1, 128), held, masked="", causal=True)
    assert "one new token" in cached_refusal((1, 1, 2, 128), held, masked="", causal=True)
    assert cached_refusal((1, 1, 1, 128), held, masked="a mask", causal=True) == "a mask"
    assert no_gain(held) and not no_gain(cache(1, 1, 1, 128, 60))


def test_blocks_fit_the_memory_of_a_core() -> None:
    for sizes in ((1, 8, 8192, 512), (12, 1, 8192, 512), (1, 1, 65536, 512), (7, 5, 384, 1024)):
        found = _Blocks.of(*sizes)
        assert sizes[0] % found.batch == sizes[1] % found.heads == sizes[2] % found.positions == 0
        assert found.batch * found.heads * found.positions * sizes[3] <= 4 << 20
    assert _Blocks.of(1, 8, 8192, 512) == _Blocks(1, 8, 1024)
    assert _Blocks.of(12, 1, 8192, 512) == _Blocks(12, 1, 512)
