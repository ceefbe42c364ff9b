"""Serving by closed form: what a way to serve holds and takes, limits that are kept, and bad input."""

import json

import pytest

from autoshard import cli
from autoshard.cost import ServingAsked, Topology, serving_point
from autoshard.errors import UserError
from autoshard.plan import config_decoder, plan_serving
from autoshard.report import serving_figures, vllm_flags


V6E = Topology.parse("v6e:2x4")
ASKED = ServingAsked(1000, 500)
LLAMA = config_decoder("hf:llama3-8b")
assert LLAMA is not None


def test_a_step_of_decoding_reads_weights_and_cache():
    point = serving_point(LLAMA, V6E, ASKED, 8, 16)
    weights, cache = 2 * LLAMA.params / 8, LLAMA.kv_bytes(16 * 1250) / 8
    assert point.decode_s > (weights + cache) / V6E.memory_bytes_per_s
    assert point.token_s == pytest.approx(point.decode_s + 16 / 500 * point.prompt_s)
    assert point.peak_bytes > weights + LLAMA.kv_bytes(16 * 1500) / 8
    assert point.tokens_per_s == pytest.approx(16 / point.token_s)
    half = serving_point(LLAMA, V6E, ServingAsked(1000, 500, weight_bytes=1), 8, 16)
    assert point.peak_bytes - half.peak_bytes == pytest.approx(weights / 2, rel=1e-3)
    assert half.decode_s < point.decode_s


def test_the_plan_keeps_its_limits_and_nothing_that_does_serves_more():
    plan = plan_serving("hf:llama3-8b", "v6e:2x4", ASKED, 0.2, 0.010)
    assert plan.best.first_s <= 0.2 and plan.best.token_s <= 0.010 and plan.best.fits
    kept = [each for each in plan.points if each.first_s <= 0.2 and each.token_s <= 0.010]
    assert plan.best.tokens_per_s == max(each.tokens_per_s for each in kept)
    free = plan_serving("hf:llama3-8b", "v6e:2x4", ASKED)
    assert free.best.tokens_per_s > plan.best.tokens_per_s
    rates, times = ([getattr(each, name) for each in free.frontier] for name in ("tokens_per_s", "token_s"))
    assert rates == sorted(rates) and times == sorted(times) and len(rates) > 3
    assert all(each.fits and each.tensor * each.engines == 8 for each in free.points)


def test_engines_apart_serve_what_the_slower_side_does():
    plan = plan_serving("hf:llama3-8b", "v6e:2x4", ASKED)
    apart = [each for each in plan.points if each.prompt_engines]
    assert apart
    for each in apart:
        prompts = each.prompt_engines / each.prompt_s * 500
        decoded = (each.engines - each.prompt_engines) * each.batch / each.decode_s
        assert each.tokens_per_s == pytest.approx(min(prompts, decoded)) and each.token_s == each.decode_s


def test_flags_say_the_same():
    plan = plan_serving("hf:llama3-8b", "v6e:2x4", ASKED, token_limit_s=0.010)
    text = " / ".join(vllm_flags(plan))
    assert f"--tensor-parallel-size {plan.best.tensor} " in text and f"--max-num-seqs {plan.best.batch}" in text
    assert "--max-model-len 1500" in text
    assert serving_figures(plan)["best"]["tokens_per_s"] == plan.best.tokens_per_s


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--output 0", "argument --output: '0' is not a positive whole number"),
        ("--ttft -5ms", "argument --ttft: expected one argument"),
        ("--ttft=-5ms", "argument --ttft: '-5ms' is not a time above zero, such as 500ms or 0.5s"),
        ("--tpot soon", "argument --tpot: 'soon' is not a time above zero, such as 500ms or 0.5s"),
        ("--tpot 1us", "no way to serve hf:llama3-8b on v6e:2x4 keeps the limits; the best there is has a first token"),
        ("--weights fp4", "argument --weights: invalid choice: 'fp4'"),
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


def test_the_table_fits_80_columns_and_json_has_the_best(capsys: pytest.CaptureFixture[str]):
    line = "serve-plan hf:llama3-8b --topology v6e:2x4 --input 1000 --output 500 --tpot 10ms".split()
    assert cli.main(line) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and "vllm serve MODEL" in shown
    assert sum(each.startswith("*") for each in shown.splitlines()) == 2  # the best, and what the mark means
    assert cli.main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["token_s"] <= 0.010 and found["best"] in found["frontier"]


def test_nothing_fits_says_what_weights_take():
    with pytest.raises(UserError, match=r"cannot be served on v6e:1x1: weights alone are 131.4 GiB"):
        plan_serving("hf:llama3.1-70b", "v6e:1x1", ASKED)
