"""Degrees for a decoder under a GPU framework: their product is the devices, and of the fastest, the one that waits
least is first.
"""

import json
from pathlib import Path

import pytest

from autoshard.degrees import DegreeChoice, choose_degrees, format_degrees, gpu_decoder
from autoshard.errors import UserError


@pytest.fixture(scope="module")
def choices() -> tuple[DegreeChoice, ...]:
    return choose_degrees(gpu_decoder("hf:llama3-8b"), "h100:8*2", "megatron-core", batch=64, seq=8192)


def test_every_plan_multiplies(choices: tuple[DegreeChoice, ...]) -> None:
    assert len({each.run for each in choices}) == len(choices) > 50
    for each in choices:
        run = each.run
        assert run.dp * run.tp * run.pp == 16 and run.batch == 64 and run.tp <= 8
        assert run.decoder.kv_heads % run.tp == 0 and run.zero in (0, 1)


def test_the_first_waits_least_of_the_fastest_that_fit(choices: tuple[DegreeChoice, ...]) -> None:
    fitting = [each for each in choices if each.fits]
    assert choices[: len(fitting)] == tuple(fitting) and len(fitting) < len(choices)
    near = [each for each in fitting if each.step.seconds <= 1.21 * min(each.step.seconds for each in fitting)]
    assert choices[0].waits == min(each.waits for each in near) < max(each.waits for each in near)
    assert list(choices[1 : len(fitting)]) == sorted(fitting[1:], key=lambda each: each.step.seconds)
    assert 0.2 < choices[0].mfu < 0.6


def test_less_memory_means_more_parallelism_or_recomputation() -> None:
    large = choose_degrees(gpu_decoder("hf:llama3-70b"), "h100:8*8", "torchtitan", batch=128, seq=8192)
    assert large[0].run.recompute == "full" or large[0].run.tp * large[0].run.pp > 1
    assert not any(each.run.zero == 3 and each.run.pp > 1 for each in large)


def test_dims_of_a_configuration() -> None:
    decoder = gpu_decoder("hf:llama3-8b")
    parameters = decoder.layers * decoder.dense_layer_params + 2 * decoder.table_params
    assert parameters == pytest.approx(8.03e9, rel=1e-3)
    assert (decoder.kv_heads, decoder.tied) == (8, False)


@pytest.mark.parametrize(
    ("program", "topology", "framework", "batch", "message"),
    [
        (
            "hf:mixtral-8x7b",
            "h100:8",
            "torchtitan",
            8,
            "mixtral-8x7b is of the type mixtral; degrees are chosen",
        ),
        ("hf:llama3-8b", "h100:8", "jax", 8, "degrees are chosen for torchtitan and megatron-core; found 'jax'"),
        ("hf:llama3-8b", "cpu:8", "torchtitan", 8, "cpu:8 has no GPUs"),
        (
            "hf:llama3-70b",
            "h100:2",
            "torchtitan",
            8,
            "nothing fits h100:2: the least that a plan needs is .* GiB",
        ),
        ("hf:llama3-8b", "h100:8*97", "torchtitan", 7, "no degrees multiply to the 776 GPUs of h100:8\\*97"),
    ],
)
def test_bad_input(program: str, topology: str, framework: str, batch: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_degrees(gpu_decoder(program), topology, framework, batch, 8192)


def test_dims_that_are_not_priced(tmp_path: Path) -> None:
    fields = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    fields |= {"num_attention_heads": 4, "vocab_size": 256}
    for name, wrong, message in (
        ("wide", {"head_dim": 32}, "wide has heads of 32, which do not make up its width"),
        ("open", {"vocab_size": None}, "open does not state all dims of a decoder"),
    ):
        stated = {key: value for key, value in (fields | wrong).items() if value is not None}
        (tmp_path / f"{name}.json").write_text(json.dumps(stated))
        with pytest.raises(UserError, match=message):
            gpu_decoder(f"hf:{tmp_path / f'{name}.json'}")


def test_words(choices: tuple[DegreeChoice, ...]) -> None:
    run = choices[0].run
    assert format_degrees(run).startswith(f"dp{run.dp} tp{run.tp} pp{run.pp} ZeRO-{run.zero} micro {run.micro_batch}")
