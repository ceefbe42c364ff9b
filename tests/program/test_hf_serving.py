"""Prefill and decode with a donated key-value cache give the logits of one full forward pass."""

import numpy as np
import pytest
from hf_reference import close

from autoshard.errors import UserError
from autoshard.program import Role, open_source, parse_sampling


BATCH, PROMPT, LENGTH = 3, 5, 9


@pytest.mark.parametrize(
    "config",
    ["gpt2-tiny", *(pytest.param(each, marks=pytest.mark.full) for each in ("gemma2-tiny", "deepseek-v3-tiny"))],
)
def test_prefill_and_decode_equal_the_full_pass(config):
    import jax

    options = {"batch": BATCH, "dtype": "fp32"} | ({"capacity_factor": 100.0} if config.startswith("deepseek") else {})
    full = open_source(f"hf:{config}", seq=LENGTH, **options)
    prefill = open_source(f"hf:{config}", seq=PROMPT, serve="prefill", cache=LENGTH, **options)
    decode = open_source(f"hf:{config}", seq=LENGTH, serve="decode", **options)
    args = full.make_args(0)
    params, extra = args[0], args[2:]
    rng = np.random.default_rng(3)
    params = {k: v + rng.standard_normal(v.shape, np.float32) * 0.1 for k, v in params.items()}
    ids = args[1]["input_ids"]
    expected = np.asarray(jax.jit(full.fn)(params, args[1], *extra))

    cache = prefill.make_args(0)[1]
    cache, logits = jax.jit(prefill.fn)(params, cache, {"input_ids": ids[:, :PROMPT]}, *extra)
    close(logits, expected[:, PROMPT - 1], 2e-5)
    step = jax.jit(decode.fn)
    for position in range(PROMPT, LENGTH):
        batch = {"input_ids": ids[:, position : position + 1], "position": np.int32(position)}
        cache, logits = step(params, cache, batch, *extra)
        close(logits, expected[:, position], 2e-5)


def test_the_cache_is_donated_state_stacked_like_the_layers():
    import jax

    program = open_source("hf:llama-tiny", batch=2, seq=16, serve="decode")
    cache = [a for a in program.arguments if a.name.startswith("cache.")]
    assert [(a.name, a.shape) for a in cache] == [
        ("cache.model.layers.*.keys", (4, 2, 4, 16, 8)),
        ("cache.model.layers.*.values", (4, 2, 4, 16, 8)),
    ]
    assert all(a.role is Role.OTHER and a.donated and a.result is not None and a.dtype == "bfloat16" for a in cache)
    assert not program.training and program.tokens == 2
    text = jax.jit(program.fn).lower(*program.args).as_text()
    assert "stablehlo.while" in text and "dynamic_update_slice" in text
    assert program.results[-1].shape == (2, 256)
    made = program.make_args(0)
    assert 0 <= made[2]["position"] < 16


def test_a_layer_outside_of_the_scan_keeps_its_own_cache():
    program = open_source("hf:deepseek-v3-tiny", batch=2, seq=16, serve="prefill", cache=24)
    names = {a.name: a.shape for a in program.arguments if a.name.startswith("cache.")}
    assert names["cache.layer.0.keys"] == (2, 1, 24, 16)
    assert names["cache.model.layers.[1:].values"] == (3, 2, 1, 24, 4)


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        ("hf:llama-tiny", {"serve": "chat"}, "--serve `chat` does not exist; use `prefill` or `decode`"),
        ("hf:llama-tiny", {"serve": "decode", "train": True}, "--serve is for the inference of models of tokens"),
        ("hf:t5-tiny", {"serve": "decode"}, "--serve is for decoders; `t5-tiny` is none"),
        ("hf:vit-tiny", {"serve": "decode"}, "--serve is for the inference of models of tokens"),
        (
            "hf:llama-tiny",
            {"serve": "prefill", "seq": 16, "cache": 8},
            "a cache of 8 tokens cannot hold 16",
        ),
        ("hf:llama-tiny", {"cache": 8}, "--cache is for serving; add --serve prefill or --serve decode"),
        ("hf:llama-tiny", {"capacity_factor": 2.0}, "--capacity-factor is for mixtures of experts; `llama-tiny` has"),
        ("hf:llama-tiny", {"optimizer": "sgd"}, "--optimizer is for training steps; add --train"),
    ],
)
def test_sentences(source, options, sentence):
    with pytest.raises(UserError, match=sentence):
        open_source(source, batch=2, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("sample", ["greedy", "top_k=20,top_p=0.9", "temperature=0.5"])
def test_a_sampled_step_returns_tokens_of_its_logits(sample):
    import jax

    options = {"batch": 4, "seq": 8, "serve": "decode", "dtype": "fp32"}
    plain, sampled = open_source("hf:llama-tiny", **options), open_source("hf:llama-tiny", sample=sample, **options)
    assert sampled.results[-1].shape == (4,) and sampled.results[-1].dtype == "int32"
    params, cache, batch = plain.make_args(0)
    logits = jax.jit(plain.fn)(params, cache, batch)[1]
    seeded = batch if sample == "greedy" else batch | {"seed": np.int32(5)}
    assert jax.tree.structure(sampled.args[2]) == jax.tree.structure(seeded)
    tokens = jax.jit(sampled.fn)(params, cache, seeded)[1]
    assert (tokens == parse_sampling(sample).tokens(logits, seeded.get("seed"))).all()


@pytest.mark.parametrize("text", ["", "top_k", "top_k=0", "top_p=0", "top_p=1.1", "top_k=2,top_k=3", "greedy,top_k=2"])
def test_other_forms_of_sampling_are_refused(text):
    with pytest.raises(UserError, match="sampling `.*` is not of the form greedy, top_k=50, top_p=0.9 or temperature"):
        open_source("hf:llama-tiny", serve="decode", sample=text)


def test_sampling_is_for_serving_and_of_known_tokens():
    with pytest.raises(UserError, match="--sample is for serving; add --serve prefill or --serve decode"):
        open_source("hf:llama-tiny", sample="greedy")
    with pytest.raises(UserError, match="--sample: top_k=257 is more than the vocabulary of 256 tokens"):
        open_source("hf:llama-tiny", serve="decode", batch=2, seq=8, sample="top_k=257")
