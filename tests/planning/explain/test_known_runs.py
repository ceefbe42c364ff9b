"""Error bars of predicted steps, from measured runs like the planned one."""

import dataclasses
import io
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from autoshard import load, trace
from autoshard.planning import Options, Plan, make_plan
from autoshard.planning.explain.known_runs import KnownRun, coverage, known_runs, ratio_error, time_error
from autoshard.program import decoder_program
from autoshard.report import html_report, plan_figures, terminal_report
from autoshard.serving import Decoder


RUN = KnownRun("v5p", "dense", 4096.0, 1, "xla")
RUNS = [dataclasses.replace(RUN, source=str(n), log_error=math.log(1 + n / 100)) for n in range(-5, 16)]


def test_the_interval_holds_four_of_five_runs_like_it():
    error = time_error(RUN, RUNS)
    assert error is not None and error.runs == 21
    inside = [error.low <= math.expm1(each.log_error) <= error.high for each in RUNS]
    assert sum(inside) / len(inside) == pytest.approx(0.8, abs=0.06)
    assert str(error) == "-3 % to +13 %, from 21 runs like it"


@pytest.mark.parametrize(
    "other",
    [{"chip": "h100"}, {"framework": "torchtitan"}, {"kind": "serving"}, {"tokens": 64.0}],
)
def test_runs_that_are_not_alike_tell_nothing(other: dict):
    assert time_error(dataclasses.replace(RUN, **other), RUNS) is None
    assert time_error(RUN, RUNS[:4]) is None


def test_runs_on_the_same_chip_weigh_more_and_those_of_one_source_less():
    elsewhere = [dataclasses.replace(each, chip="v6e", source="one", log_error=each.log_error + 0.5) for each in RUNS]
    error = time_error(RUN, [*RUNS, *elsewhere])
    assert error is not None and error.runs == 42 and error.high < 0.2


def test_shipped_intervals_hold_of_unseen_sources_what_they_promise():
    inside, counted = coverage(known_runs())
    assert counted > 100 and 0.75 <= inside / counted <= 0.88
    assert 0.01 < ratio_error() < 0.15


def terminal(plan: Plan) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(terminal_report(plan))
    return stream.getvalue()


def planned(topology: str) -> Plan:
    decoder = Decoder(2, 256, 512, 2, 2, 128, 1024)
    return make_plan(decoder_program(decoder, batch=64, seq=512), Options(topology=topology)).plan


def test_a_plan_states_the_error_of_its_step_on_screen_page_and_in_json(tmp_path: pathlib.Path):
    plan = planned("v5e:2x4")
    assert plan.time_error is not None
    words = str(plan.time_error)
    assert f"({words})" in terminal(plan) and words in html_report(plan)
    assert plan_figures(plan)["time_error"]["runs"] == plan.time_error.runs
    plan.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json").time_error == plan.time_error


def test_a_step_like_no_measured_run_says_so(tmp_path: pathlib.Path):
    args = (jax.ShapeDtypeStruct((64, 64), "float32"),) * 2
    plan = make_plan(trace(lambda w, x: jnp.tanh(x @ w), args), Options(topology="v5e:2x4", mesh={"data": 8})).plan
    assert plan.time_error is None and "(no run like this one is known)" in terminal(plan)
    assert plan_figures(plan)["time_error"] is None
    plan.save(tmp_path / "plan.json")
    assert "time_error" not in json.loads((tmp_path / "plan.json").read_text())
