"""First estimates: parameter counts of the real models, steps that grow as expected, and times close to the plan's."""

import dataclasses
import functools
import json
import math
from typing import Any

import pytest

from autoshard import cli
from autoshard.cost import Compute, Topology, larger_topologies
from autoshard.errors import UserError
from autoshard.planning import Options, make_plan
from autoshard.program import Program, Role, bundled, open_source
from autoshard.serving import StepAsked, config_decoder, estimate_config, estimate_step, fewest_devices, least_estimate


V5E = Topology.parse("v5e:4x4")
COUNTED = ("llama-tiny", "gemma2-tiny", "mixtral-tiny", "deepseek-v3-tiny", "gpt2-tiny")
LEFT_OUT = {"gpt2-tiny": 0.05, "gemma2-tiny": 0.004}
"""Learned positions, biases and norms: a notable part of a tiny model, not of a large one."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name == "deepseek-v3-tiny")) for name in COUNTED]
)
def test_parameters_are_those_of_the_model(name: str):
    program = open_source(f"hf:{name}", batch=8, seq=64)
    true = sum(math.prod(a.shape) for a in program.arguments if a.role is Role.PARAMETER)
    decoder = config_decoder(f"hf:{name}")
    assert decoder is not None
    assert decoder.params == pytest.approx(true, rel=LEFT_OUT.get(name, 0))


def test_what_is_no_decoder_has_no_counts():
    counted = {name for name in bundled() if config_decoder(f"hf:{name}") is not None}
    assert {"bert-large", "vit-l16", "resnet-50", "t5-large", "whisper-large"} == {
        name for name in bundled() if name not in counted and "tiny" not in name and "mini" not in name
    }
    assert estimate_config("hf:resnet-tiny", V5E) == []


def step(**changed) -> StepAsked:
    return dataclasses.replace(StepAsked(64, 4096, "train", "full"), **changed)


def test_a_step_grows_with_what_it_computes():
    decoder = config_decoder("hf:llama3-8b")
    assert decoder is not None
    one = estimate_step(decoder, V5E, step())
    twice = estimate_step(decoder, V5E, step(batch=128))
    assert 1.8 < twice.step_time_s / one.step_time_s < 2.1
    assert twice.bytes["saved"] == 2 * one.bytes["saved"]
    assert twice.bytes["parameters"] == one.bytes["parameters"]
    none = estimate_step(decoder, V5E, step(remat="none"))
    assert none.compute_s < one.compute_s and none.bytes["saved"] > 8 * one.bytes["saved"]
    assert one.step_time_s == one.compute_s + one.exposed_s
    peak = V5E.peak_flops("bf16") * V5E.num_devices
    assert one.mfu == pytest.approx(decoder.train_flops(64 * 4096, 4096) / peak / one.step_time_s)
    held = 12 * decoder.params / V5E.num_devices
    assert one.bytes["parameters"] + one.bytes["optimizer state"] == pytest.approx(held)


def test_serving_reads_its_weights_and_its_cache():
    decoder = config_decoder("hf:llama3-8b")
    assert decoder is not None
    asked = StepAsked(16, 8192, "decode", param_bytes=2)
    estimated = estimate_step(decoder, V5E, asked)
    read = sum(estimated.bytes[kind] for kind in ("parameters", "cache")) / V5E.memory_bytes_per_s
    assert read < estimated.step_time_s < 3 * read
    prefill = estimate_step(decoder, V5E, dataclasses.replace(asked, kind="prefill", seq=1024))
    assert prefill.asked.tokens == 1024 * estimated.asked.tokens


def test_a_prompt_is_stored_in_a_cache_with_room_for_more():
    decoder = config_decoder("hf:llama3-8b")
    assert decoder is not None
    topology = Topology.parse("v5e:1x1")
    options: dict = {"serve": "prefill", "batch": 1, "seq": 1024}
    for cache, tokens in ((None, 1024), (512, 1024), (4096, 4096)):
        (found,) = estimate_config("hf:llama3-8b", topology, cache=cache, **options)
        # Keys and values of 8 heads of 128, in 2 bytes.
        assert found.estimate.bytes["cache"] == 2 * 2 * tokens * decoder.layers * 8 * 128
    (short,) = estimate_config("hf:llama3-8b", topology, **options)
    assert found.estimate.step_time_s == short.estimate.step_time_s


@pytest.mark.parametrize("kind", ["prefill", "train"])
def test_a_shared_expert_is_the_matmuls_of_one_that_has_every_token(kind: str):
    one = config_decoder("hf:deepseek-v3-tiny")
    assert one is not None and one.shared_experts == 1
    topology, asked = Topology.parse("v5e:1x1"), StepAsked(64, 1024, kind, "none")
    none, two = (
        estimate_step(dataclasses.replace(one, shared_experts=count), topology, asked).compute_s for count in (0, 2)
    )
    flops = 2 * 64 * 1024 * 3 * one.width * one.expert_inner * (one.layers + one.ahead - one.dense_layers)
    least = flops * (3 if kind == "train" else 1) / topology.peak_flops("bf16")
    assert (two - none) / 2 > least


def test_scores_that_are_written_out_are_two_matmuls_of_every_layer():
    """Compare equal tokens in fewer and longer prompts: only attention needs more time."""
    decoder = config_decoder("hf:llama3-8b")
    assert decoder is not None
    topology = Topology.parse("cpu:1")
    short, long = (
        estimate_step(decoder, topology, StepAsked(batch, 8192 // batch, "prefill", param_bytes=2)).compute_s
        for batch in (8, 2)
    )
    compute = Compute(topology)

    def attention(batch: int) -> float:
        seq, head = 8192 // batch, decoder.head_size
        pair = (seq, seq, head), (seq, head, seq)
        return decoder.layers * sum(float(compute.dot_seconds(m, n, k, batch * decoder.heads)) for m, n, k in pair)

    assert long - short == pytest.approx(attention(2) - attention(8), rel=1e-3) and long > 1.1 * short


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"train": True, "serve": "decode"}, "--serve is for inference"),
        ({"remat": "full"}, "--remat is for training steps"),
        ({"train": True, "remat": "full:2+none"}, "--remat full:2+none is not estimated; give none, dots, full"),
        ({"cache": 64}, "--cache is for serving"),
        ({"train": True, "param_dtype": "int3"}, "--param-dtype int3 is not estimated; give bf16 or"),
        ({"train": True, "batch": 7}, "no layout of the 16 devices of v5e:4x4 divides a batch of 7 and 8 heads; give"),
    ],
)
def test_what_cannot_be_guessed_is_reported(options: dict, sentence: str):
    with pytest.raises(UserError) as caught:
        estimate_config("hf:llama-tiny", V5E, **options)
    assert sentence in str(caught.value)


def test_the_batch_it_asks_for_can_be():
    with pytest.raises(UserError, match="a multiple of 2"):
        estimate_config("hf:llama-tiny", V5E, train=True, batch=7)
    assert len(estimate_config("hf:llama-tiny", V5E, train=True, batch=2)) == 3


@pytest.mark.parametrize(
    ("config", "place", "options"),
    [
        ("hf:llama3.1-70b", "h100:1", {"train": True}),
        ("hf:llama3-8b", "v5e:1x1", {"train": True, "remat": "full"}),
        ("hf:llama3.1-405b", "h100:4", {}),
    ],
)
def test_the_fewest_devices_fit_and_no_fewer_do(config: str, place: str, options: dict[str, Any]):
    topology = Topology.parse(place)
    estimated = estimate_config(config, topology, **options)
    assert not any(each.estimate.fits for each in estimated)
    (fewest,) = fewest_devices(config, estimated, **options).values()
    assert fewest is not None and fewest.chip == topology.chip
    assert any(each.estimate.fits for each in estimate_config(config, fewest, **options))
    smaller = [each for each in larger_topologies(topology, 0) if each.num_devices < fewest.num_devices]
    for each in smaller:
        try:
            assert not any(row.estimate.fits for row in estimate_config(config, each, **options)), each.name
        except UserError as error:
            assert "no layout" in str(error)


def test_what_does_not_fit_has_no_times(capsys: pytest.CaptureFixture[str]):
    line = ["estimate", "hf:llama3.1-405b", "--train", "--remat", "full", "--topology", "h100:1,h100:8*16"]
    assert cli.main([*line, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    small, large = figures["rows"]
    assert not small["fits"] and large["fits"] and figures["fewest"] == []
    assert [small[key] for key in ("step_time_s", "exposed_comm_s", "mfu")] == [None] * 3
    assert large["step_time_s"] > 0 and large["mfu"] > 0
    assert cli.main([*line[:-1], "h100:1", "--json"]) == 0
    (named,) = json.loads(capsys.readouterr().out)["fewest"]
    assert named["chip"] == "h100" and 8 < named["devices"] <= 128
    assert cli.main([*line[:-1], "h100:1"]) == 0
    shown = capsys.readouterr().out
    assert named["topology"] in shown and not {"MFU", "tokens/s", "step"} & {
        row[:20].strip() for row in shown.splitlines()
    }


@functools.cache
def resnet() -> Program:
    return open_source("hf:resnet-tiny", train=True, batch=32)


def test_a_traced_program_that_cannot_fit_needs_at_least_its_arguments_share():
    topology = Topology.parse("v5e:1x1")
    least = least_estimate(resnet(), topology)
    room = int(least.estimate.peak_bytes) // 3
    held = dataclasses.replace(least, estimate=dataclasses.replace(least.estimate, limit_bytes=room))
    (place,) = fewest_devices("hf:resnet-tiny", [held]).values()
    assert place is not None and place.name == "v5e:2x2"  # four devices: a third of it is a little less than needed


def test_the_least_of_a_traced_program_is_below_its_plan():
    topology = Topology.parse("v5e:2x2")
    least = least_estimate(resnet(), topology)
    plan = make_plan(resnet(), Options(topology=topology.name, mesh="data=4")).plan
    assert not least.counted
    assert 0 < least.estimate.step_time_s <= plan.prediction.step_time_s
    assert 0 < least.estimate.peak_bytes <= plan.prediction.peak_bytes
    assert set(least.estimate.bytes) >= {"parameters", "optimizer state", "batch"}
