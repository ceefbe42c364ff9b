"""Serving by closed form: memory and time of each way to serve, limits that hold, and bad input."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest

from autoshard import cli
from autoshard.cost import Compute, Topology, larger_topologies
from autoshard.errors import UserError
from autoshard.planning import Options, make_plan, read_asked
from autoshard.program import parse_sampling, trace
from autoshard.serving import (
    Decoder,
    ServingEngine,
    ServingLimits,
    ServingRequests,
    config_decoder,
    engine_kinds,
    engine_steps,
    plan_serving,
    serving_figures,
    serving_point,
    serving_points,
    vllm_commands,
)
from autoshard.serving.decoder_estimate import layout_estimate
from autoshard.serving.decoder_step import Layout, StepAsked


V6E = Topology.parse("v6e:2x4")
ASKED = ServingRequests(1000, 500)
LLAMA = config_decoder("hf:llama3-8b")
assert LLAMA is not None
DECODERS = ("hf:llama3-8b", "hf:mixtral-8x7b")
"""Decoders to serve; the second one is also served with attention in groups."""


def test_a_step_of_decoding_reads_weights_and_cache():
    point = serving_point(LLAMA, V6E, ASKED, ServingEngine(8), 16)
    weights, cache = 2 * LLAMA.params / 8, LLAMA.kv_bytes(16 * 1250) / 8
    assert point.decode_s > (weights + cache) / V6E.memory_bytes_per_s
    assert point.token_s == pytest.approx(point.decode_s + 16 / 500 * point.added_s)
    assert point.added_s < point.prompt_s  # decoding in the same step as a prompt reads the same weights
    assert point.peak_bytes > weights + LLAMA.kv_bytes(16 * 1500) / 8
    assert point.tokens_per_s == pytest.approx(16 / point.token_s)


def test_bytes_of_weights_and_of_keys_and_values_are_halved():
    point = serving_point(LLAMA, V6E, ASKED, ServingEngine(8), 16)
    layers = LLAMA.params - 2 * LLAMA.vocabulary * LLAMA.width  # the embedding and the head stay
    half = serving_point(LLAMA, V6E, ServingRequests(1000, 500, "int8"), ServingEngine(8), 16)
    assert point.peak_bytes - half.peak_bytes == pytest.approx(layers / 8)
    assert half.decode_s < point.decode_s and half.prompt_s < point.prompt_s
    small = serving_point(LLAMA, V6E, ServingRequests(1000, 500, cache="fp8"), ServingEngine(8), 16)
    assert point.peak_bytes - small.peak_bytes == pytest.approx(LLAMA.kv_bytes(16 * 1500) / 8 / 2)
    assert small.decode_s < point.decode_s
    # The v6e multiplies int8 twice as fast as fp8, which it converts to bf16.
    stored = [ServingRequests(1000, 500, each) for each in ("int8", "fp8")]
    whole, float8 = (serving_point(LLAMA, V6E, each, ServingEngine(1), 16, 512) for each in stored)
    assert whole.prompt_s < 0.9 * float8.prompt_s and whole.peak_bytes == float8.peak_bytes


def test_the_plan_keeps_its_limits_and_nothing_that_does_serves_more():
    plan = plan_serving("hf:llama3-8b", "v6e:2x4", ASKED, ServingLimits(0.2, 0.010))
    assert plan.best.first_s <= 0.2 and plan.best.token_s <= 0.010 and plan.best.fits
    kept = [each for each in plan.points if each.first_s <= 0.2 and each.token_s <= 0.010]
    assert plan.best.tokens_per_s == max(each.tokens_per_s for each in kept)
    free = plan_serving("hf:llama3-8b", "v6e:2x4", ASKED)
    assert free.best.tokens_per_s > plan.best.tokens_per_s
    rates, times = ([getattr(each, name) for each in free.frontier] for name in ("tokens_per_s", "token_s"))
    assert rates == sorted(rates) and times == sorted(times) and len(rates) > 3
    for each in free.points:
        decoding = (each.engines - each.prompt_engines) * each.engine.devices
        assert each.fits and decoding + each.prompt_engines * (each.prompts or each.engine).devices == 8


@pytest.mark.parametrize("name", DECODERS)
def test_engines_apart_serve_what_the_slower_side_does(name: str):
    plan, decoder = plan_serving(name, "v6e:2x4", ASKED), config_decoder(name)
    assert decoder is not None
    apart = [each for each in plan.points if each.prompt_engines]
    assert apart
    assert any(each.prompts.attention > 1 for each in apart if each.prompts) == (decoder.experts > 1)
    for each in apart:
        assert each.prompts is not None
        prompts = each.prompt_engines * each.prompts.attention / each.prompt_s * 500
        decoded = (each.engines - each.prompt_engines) * each.batch / each.decode_s
        assert each.tokens_per_s == pytest.approx(min(prompts, decoded)) and each.token_s == each.decode_s
        kept = decoder.kv_bytes(1000) / min(each.prompts.tensor, decoder.kv_heads)
        assert each.first_s == pytest.approx(each.prompt_s + kept / (0.8 * V6E.chip.network_bytes_per_s_per_chip))


def test_engines_for_prompts_may_be_of_another_kind_where_that_serves_more():
    plan = plan_serving("hf:llama3-8b", "v6e:2x4", ASKED)
    other = [each for each in plan.points if each.prompts and each.prompts != each.engine]
    assert other
    for each in other:
        alone = engine_steps(LLAMA, V6E, ASKED, each.engine, 1)[1].step_time_s
        assert each.decode_s == serving_point(LLAMA, V6E, ASKED, each.engine, each.batch).decode_s
        # No split into engines of the same kind serves as much: each group runs a prompt at once.
        total = 8 // each.engine.devices
        rates = [
            min((total - count) * each.batch / each.decode_s, count * each.engine.attention / alone * 500)
            for count in range(1, total)
        ]
        assert not rates or max(rates) <= each.tokens_per_s * (1 + 1e-9)
    point = next(each for each in other if each.prompts.devices != each.engine.devices)
    first, second = vllm_commands(plan, point)
    assert f"--tensor-parallel-size {point.prompts.devices} " in first
    assert f"--tensor-parallel-size {point.engine.devices} " in second


@pytest.mark.parametrize("name", DECODERS)
def test_the_largest_batch_that_fits_is_offered(name: str):
    plan, decoder = plan_serving(name, "v6e:2x4", ASKED), config_decoder(name)
    assert decoder is not None
    for engine in {each.engine for each in plan.points}:
        batches = {each.batch for each in plan.points if each.engine == engine and not each.prompts}
        larger = max(batches) + engine.attention
        chunk = max(128, 1 << (2 * larger // engine.attention - 1).bit_length())  # two prompt tokens for each
        assert not serving_point(decoder, V6E, ASKED, engine, larger, chunk).fits
        doubled = {engine.attention << n for n in range(max(batches).bit_length())}
        assert {each for each in doubled if each <= max(batches)} <= batches


def test_commands_say_the_same():
    plan = plan_serving("hf:llama3-8b", "v6e:2x4", ASKED, ServingLimits(token_s=0.010))
    text = " / ".join(vllm_commands(plan))
    assert f"--tensor-parallel-size {plan.best.engine.devices} " in text and f"--max-num-seqs {plan.best.batch}" in text
    assert "--max-model-len 1500" in text
    assert serving_figures(plan)["best"]["tokens_per_s"] == plan.best.tokens_per_s


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--output 0", "argument --output: '0' is not a positive whole number"),
        ("--ttft -5ms", "argument --ttft: expected one argument"),
        ("--ttft=-5ms", "argument --ttft: '-5ms' is not a time above zero, such as 500ms or 0.5s"),
        ("--ttft 500", "argument --ttft: '500' has no unit: write 500ms or 500s"),
        ("--tpot soon", "argument --tpot: 'soon' is not a time above zero, such as 500ms or 0.5s"),
        ("--tpot 1us", "no way to serve hf:llama3-8b on v6e:2x4 keeps the limits; the best there is has a first token"),
        ("--weights fp4", "argument --weights: invalid choice: 'fp4'"),
        ("--gap 1ms", "or no gap above"),
        (
            "--input 8100",
            "hf:llama3-8b has 8192 positions, and a prompt of 8100 tokens with its answer of 100 needs 8200",
        ),
        ("--topology v6q:2x4", "unknown chip 'v6q'; did you mean"),
    ],
)
def test_bad_input_gets_one_sentence(line: str, sentence: str, capsys: pytest.CaptureFixture[str]):
    start = "serve-plan hf:llama3-8b --topology v6e:2x4 --input 1000 --output 100".split()
    assert cli.main([*start, *line.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert sentence in captured.err


@pytest.mark.parametrize(("program", "sentence"), [("hf:resnet-50", "is no decoder"), ("x.py", "for a configuration")])
def test_other_programs_are_refused(program: str, sentence: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(f"serve-plan {program} --topology v6e:2x4 --input 10 --output 10".split()) == 2
    assert sentence in capsys.readouterr().err


def commands(line: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the JSON text of a command."""
    assert cli.main([*line, "--json"]) == 0
    return capsys.readouterr().out


def test_the_table_fits_80_columns_and_json_has_the_best(capsys: pytest.CaptureFixture[str]):
    line = "serve-plan hf:llama3-8b --topology v6e:2x4 --input 1000 --output 500 --tpot 10ms".split()
    assert cli.main(line) == 0
    shown = capsys.readouterr().out
    (command,) = (each for each in shown.splitlines() if "vllm serve MODEL" in each)
    assert max(len(each) for each in shown.splitlines() if each != command) <= 80
    assert command.endswith(json.loads(commands(line, capsys))["commands"][0][-20:]), "a command stays on one line"
    assert sum(each.startswith("*") for each in shown.splitlines()) == 2  # the best one, and the legend of the mark
    document = json.loads(commands(line, capsys))
    assert document["best"]["token_s"] <= 0.010 and document["best"] in document["frontier"]


def test_nothing_fits_says_what_weights_take():
    with pytest.raises(UserError, match=r"cannot be served on v6e:1x1: weights alone are 131.4 GiB"):
        plan_serving("hf:llama3.1-70b", "v6e:1x1", ASKED)


@pytest.mark.parametrize(
    ("name", "place", "narrower"), [("llama3.1-405b", "h100:1", False), ("llama3-8b", "v5e:1x1", True)]
)
def test_nothing_fits_names_the_fewest_devices_and_weights_that_fit(name: str, place: str, narrower: bool):
    with pytest.raises(UserError) as error:
        plan_serving(f"hf:{name}", place, ASKED)
    match = re.search(r"serve it are (\d+) \((\S+)\)(, or use --weights fp8)?\.$", str(error.value))
    assert match is not None and bool(match[3]) == narrower
    topology = Topology.parse(match[2])
    assert topology.num_devices == int(match[1])
    decoder = config_decoder(f"hf:{name}")
    assert decoder is not None and plan_serving(f"hf:{name}", topology.name, ASKED).points
    for each in larger_topologies(Topology.parse(place), 0):
        if each.num_devices >= topology.num_devices:
            break
        assert not list(serving_points(decoder, each, ASKED))
    if narrower:
        assert plan_serving(f"hf:{name}", place, dataclasses.replace(ASKED, weights="fp8")).points


MIXTURE = config_decoder("hf:mixtral-8x7b")
LATENT = config_decoder("hf:deepseek-v3")
assert MIXTURE is not None and LATENT is not None


def test_groups_are_offered_where_heads_run_out_and_for_experts():
    assert {each.attention for each in engine_kinds(LLAMA, V6E)} == {1}  # 8 devices, 8 heads of keys and values
    more = {(each.tensor, each.attention) for each in engine_kinds(LLAMA, Topology.parse("v6e:4x4"))}
    assert {(16, 1), (8, 2), (4, 4)} <= more and (4, 2) not in more
    # attention groups of dense models need a TPU server
    assert {each.attention for each in engine_kinds(LLAMA, Topology.parse("h100:8*2"))} == {1}
    experts = set(engine_kinds(MIXTURE, V6E))
    assert {ServingEngine(8, 1, 1), ServingEngine(8, 1, 8), ServingEngine(1, 8, 8), ServingEngine(2, 2, 4)} <= experts
    assert all(each.experts in (1, each.devices) for each in experts)
    wide = set(engine_kinds(MIXTURE, Topology.parse("v6e:4x4")))
    assert all(each.experts <= 8 for each in wide) and ServingEngine(8, 2) in wide


@pytest.mark.parametrize("decoder", [MIXTURE, LATENT])
def test_groups_have_a_part_of_the_cache_and_all_of_attention(decoder: Decoder):
    place = Topology.parse("v6e:8x8")
    asked = ServingRequests(8000, 1000, "fp8")
    one = serving_point(decoder, place, asked, ServingEngine(64 if decoder is LATENT else 32, 1), 64, 1024)
    four = serving_point(decoder, place, asked, ServingEngine(one.engine.tensor // 4, 4), 64, 256)
    attention = decoder.layers * decoder.attention_params
    # If key-value heads run out, or are latent, all devices of a group store them.
    parts = [1 if decoder is LATENT else min(each.engine.tensor, decoder.kv_heads) for each in (one, four)]
    cache = [decoder.kv_bytes(64 * 9000) / each for each in (parts[0], 4 * parts[1])]
    gained = (cache[0] - cache[1]) - 3 * attention / one.engine.devices
    assert one.peak_bytes - four.peak_bytes == pytest.approx(gained)
    assert (four.decode_s < one.decode_s) == (gained > 0)


def test_chunks_trade_first_tokens_for_gaps():
    asked = ServingRequests(4000, 1000)
    short, long = (serving_point(LLAMA, V6E, asked, ServingEngine(8), 16, chunk) for chunk in (128, 4096))
    assert short.gap_s < long.gap_s and short.first_s > long.first_s
    assert short.decode_s == long.decode_s < short.gap_s
    free = plan_serving("hf:llama3-8b", "v6e:2x4", asked, ServingLimits(token_s=0.02))
    held = plan_serving("hf:llama3-8b", "v6e:2x4", asked, ServingLimits(token_s=0.02, gap_s=free.best.gap_s / 1.5))
    assert held.best.gap_s <= free.best.gap_s / 1.5 and held.best.tokens_per_s < free.best.tokens_per_s
    # No chunk is too short for the incoming prompts.
    for each in held.points:
        assert each.prompt_engines or each.chunk * each.engine.attention >= each.batch * 4000 / 1000


def test_commands_of_groups_and_experts():
    asked = ServingRequests(1000, 1000, "fp8", "fp8")
    plan = plan_serving("hf:deepseek-v3", "v6e:8x8", asked)
    point = next(each for each in plan.points if each.engine == ServingEngine(4, 16, 64) and each.batch == 256)
    (text,) = vllm_commands(plan, point)
    assert text.startswith("NEW_MODEL_DESIGN=1 vllm serve MODEL --tensor-parallel-size 64 --enable-expert-parallel ")
    assert f"--max-num-seqs 16 --max-num-batched-tokens {point.chunk + 16} --gpu-memory-utilization 0.95 --kv" in text
    assert "--kv-cache-dtype fp8" in text
    added = json.loads(text.split("--additional-config ")[1].strip("'"))
    assert added["sharding"]["sharding_strategy"] == {"enable_dp_attention": True, "attn_dp_size": 16}
    assert added["quantization"] == "fp8_default.yaml"
    gpus = plan_serving("hf:mixtral-8x7b", "h100:8", ServingRequests(1000, 1000))
    point = next(each for each in gpus.points if each.engine == ServingEngine(1, 4, 4) and each.engines == 2)
    (text,) = vllm_commands(gpus, point)
    assert "--tensor-parallel-size 1 --data-parallel-size 4 --enable-expert-parallel" in text
    assert text.endswith("# 2 of these")  # copies by --data-parallel-size would share their experts
    apart = plan_serving("hf:llama3-8b", "v6e:2x4", ASKED)
    point = next(each for each in apart.points if each.prompt_engines)
    prompts, decoding = vllm_commands(apart, point)
    assert '"kv_role": "kv_producer"' in prompts and '"kv_role": "kv_consumer"' in decoding
    assert "TPUConnector" in prompts and "--max-num-seqs" not in prompts


@pytest.mark.parametrize(
    ("topology", "asked", "note"),
    [
        ("h100:8", ServingRequests(1000, 100, "int8"), "a checkpoint with weights of int8"),
        ("v6e:2x4", ServingRequests(1000, 100, cache="int8"), "no keys and values of int8 on TPUs"),
        ("v6e:2x4", ServingRequests(1000, 100, "int8", "fp8"), ""),
    ],
)
def test_what_commands_cannot_say_is_reported(topology: str, asked: ServingRequests, note: str):
    plan = plan_serving("hf:llama3-8b", topology, asked)
    assert note in " ".join(serving_figures(plan)["notes"]) and bool(serving_figures(plan)["notes"]) == bool(note)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "line", ["hf:deepseek-v3 --topology v6e:8x8 --weights fp8", "hf:mixtral-8x7b --topology h100:8"]
)
def test_tables_of_mixtures_fit_80_columns(line: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(f"serve-plan {line} --input 4000 --output 1000".split()) == 0
    shown = capsys.readouterr().out
    tables = [each for each in shown.splitlines() if "vllm serve" not in each]
    assert max(map(len, tables)) <= 80 and "…" not in shown and "experts" in shown


@pytest.mark.parametrize("sample", ["greedy", "top_k=50", "top_p=0.9"])
def test_the_selection_of_tokens_is_priced_as_in_plans(sample: str):
    """Compare the closed form with the plan of a head whose vocabulary is split; only 64 rows can be split, too."""
    sampling, rows = parse_sampling(sample), 64 if sample == "top_p=0.9" else 63
    asked = StepAsked(rows, 1000, "decode", candidates=sampling.candidates, rounds=sampling.rounds(16))
    compute, layout = Compute(V6E), Layout(1, 8)
    step, logits = (
        layout_estimate(LLAMA, compute, each, layout) for each in (asked, dataclasses.replace(asked, candidates=0))
    )
    estimated = step.exposed_s - logits.exposed_s

    def head(hidden: jax.Array, weights: jax.Array, seed: jax.Array) -> jax.Array:
        return sampling.tokens(hidden @ weights, seed)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 4096), (4096, LLAMA.vocabulary))]
    program = trace(head, (*shapes, jax.ShapeDtypeStruct((), jnp.int32)), name=sample)
    asked_for = read_asked({"weights": "-,model", "hidden": "-,-"})
    plan = make_plan(program, Options(topology="v6e:2x4", mesh="model=8", asked=asked_for)).plan
    waited = sum(each.exposed_s for each in plan.prediction.collectives)
    assert waited == pytest.approx(estimated, rel=0.1)


def test_serve_plan_counts_the_selection_that_is_asked_for(capsys: pytest.CaptureFixture[str]):
    words = "serve-plan hf:llama3-8b --topology v6e:2x4 --input 1000 --output 500 --quiet --sample".split()
    assert cli.main([*words, "top_k=50,top_p=0.9"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1000 tokens in, 500 out, sampling top_k=50 and top_p=0.9" in said
    assert cli.main([*words, "top_k"]) == 2
    assert "is not of the form greedy, top_k=50" in capsys.readouterr().err
    quick, slow = (
        serving_point(LLAMA, V6E, dataclasses.replace(ASKED, sample=each), ServingEngine(8), 16)
        for each in ("greedy", "top_p=0.9")
    )
    assert quick.decode_s < slow.decode_s < 1.5 * quick.decode_s
