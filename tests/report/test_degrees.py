"""Degrees in JSON, in words, and as configurations of frameworks."""

import dataclasses
import io
import json
import math
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

import autoshard
from autoshard.cli import main
from autoshard.cost import Topology
from autoshard.degrees import (
    DEGREE_FORMS,
    DegreeChoice,
    choose_degrees,
    degree_figures,
    degree_report,
    eager_step_s,
    gpu_decoder,
)
from autoshard.degrees.gpu_run import GpuRun
from autoshard.degrees.gpu_step import price_step
from autoshard.planning import Options, plan_recipes
from autoshard.planning.forms.eager_memory import eager_excess
from autoshard.program import Program, open_source
from autoshard.report import best_baseline, html_report, plan_figures, terminal_report
from autoshard.report.terminal.explanation_report import why_not


def _choices(framework: str) -> tuple[DegreeChoice, ...]:
    return choose_degrees(gpu_decoder("hf:llama3-8b"), "h100:8", framework, batch=32, seq=4096)


def test_figures_and_words_say_the_same() -> None:
    choices = _choices("torchtitan")
    figures = json.loads(json.dumps(degree_figures(choices), allow_nan=False))["plans"]
    assert len(figures) == len(choices) and figures[0]["fits"]
    text = io.StringIO()
    Console(file=text, width=200).print(degree_report(choices))
    said = text.getvalue()
    assert f"dp{figures[0]['dp']} tp{figures[0]['tp']}" in said and f"{figures[0]['step_time_s']:.4g} s" in said
    assert f"{len(choices)} plans multiply" in said


def test_a_plan_for_fsdp2_has_the_time_of_these_degrees() -> None:
    """Choose one of the degrees by hand, with the recomputation of its name, and as the other forms have none."""
    options = {"train": True, "batch": 32, "seq": 4096, "remat": "full", "microbatches": 2}
    given = {"topology": "h100:8", "mesh": "data=8", "program_options": options}
    plan = autoshard.plan("hf:llama3-8b", form="fsdp2", **given)
    (same,) = (
        each.step.seconds
        for each in _choices("torchtitan")
        if (each.run.dp, each.run.zero, each.run.recompute, each.run.accumulation) == (8, 3, "full", 2)
    )
    seconds = plan.prediction.eager_step_time_s
    assert seconds == eager_step_s(plan) == same > plan.prediction.step_time_s
    text = io.StringIO()
    Console(file=text, width=200).print(terminal_report(plan))
    assert f"{seconds:.3g} s in eager torch" in text.getvalue()
    assert eager_step_s(dataclasses.replace(plan, topology="v5e:2x4")) is None
    split = dataclasses.replace(plan, mesh={"data": 4, "model": 2})
    times = [eager_step_s(split)]
    for form in ("torchtitan", "transformers"):  # their values are whole too, but no DTensors
        times.append(eager_step_s(dataclasses.replace(split, provenance=plan.provenance | {"for": form})))
    run = GpuRun(gpu_decoder("hf:llama3-8b"), Topology.parse("h100:8"), "dtensor", 4096, 4, 2, 1, 4, 2, 3, "full")
    styles = price_step(dataclasses.replace(run, framework="styles")).seconds
    assert times == [price_step(run).seconds, styles, styles]
    times = []
    for remat in ("none", "full:8+none", "full", "dots,keep=context"):
        recipe = plan.provenance | {"recipe": {"chosen": {"remat": remat}}}
        times.append(eager_step_s(dataclasses.replace(plan, provenance=recipe)))
    assert times[1] == pytest.approx(0.75 * times[0] + 0.25 * times[2]) and times[3] is None
    # The size of the batch may be the default, which no option states.
    given["program_options"] = {"train": True}
    assert eager_step_s(autoshard.plan("hf:llama-tiny", form="fsdp2", **given))


def test_baselines_of_an_eager_form_are_compared_in_eager_torch() -> None:
    """Plan tensor parallelism, whose baselines have other degrees, or the same ones with other values split."""
    options = {"train": True, "batch": 64, "seq": 128}
    plan = autoshard.plan(
        "hf:llama-tiny", topology="h100:8", mesh="data=4,model=2", form="fsdp2", program_options=options
    )
    rows = {name: row.eager_step_time_s for name, row in plan.baselines.items()}
    decoder, topology = gpu_decoder("hf:llama-tiny"), Topology.parse("h100:8")

    def seconds(dp: int, copies: int) -> float:
        """Return the seconds of a step without recomputation and with one microbatch."""
        run = GpuRun(decoder, topology, "dtensor", 128, dp, 8 // dp, 1, 64 // dp, 1, 3, "none", copies=copies)
        return price_step(run).seconds

    assert rows["fsdp"] == seconds(8, 1) and rows["data_parallel"] == seconds(8, 8)
    assert rows["fsdp_tp"] == rows["fsdp_tp_sp"] == seconds(4, 1) and rows["tensor_parallel"] == seconds(4, 4)
    name, best = min(((n, r) for n, r in plan.baselines.items() if r.fits), key=lambda item: item[1].compared_s)
    assert best_baseline(plan) == (name, best) and best.compared_s == best.eager_step_time_s
    ratio = best.compared_s / (plan.prediction.eager_step_time_s or 0)
    text = io.StringIO()
    Console(file=text, width=200).print(terminal_report(plan))
    words = f"{ratio:.2f}x the speed of the" if abs(ratio - 1) > 5e-4 else "as fast as the"
    assert f"{words} best baseline that fits in eager torch, {name}" in text.getvalue()
    figures = plan_figures(plan)
    assert figures["eager_step_time_s"] == plan.prediction.eager_step_time_s
    assert figures["baselines"][name]["eager_step_time_s"] == best.compared_s
    page = html_report(plan)
    assert "Best baseline that fits in eager torch" in page and 'data-key="baselines.fsdp.eager_step_time_s"' in page
    # A baseline that eager torch has no memory for does not fit, and one that the form cannot hold is not compared.
    lost = {each: dataclasses.replace(row, eager_step_time_s=None) for each, row in plan.baselines.items()}
    assert best_baseline(dataclasses.replace(plan, baselines=lost)) is None
    full = dataclasses.replace(plan.baselines["fsdp"], fits=False)
    why = why_not(dataclasses.replace(plan, baselines={"fsdp": full}), "fsdp")
    assert why[0].startswith("It does not fit: eager torch needs")


def test_recipes_of_an_eager_form_are_ranked_by_their_time_in_eager_torch() -> None:
    """Leave recomputation open that spares traffic of a compiled step, and only adds kernels to an eager one."""
    options = Options(topology="h100:8", mesh="data=8", form="fsdp2")

    def make(remat: str) -> Program:
        return open_source("hf:llama-tiny", train=True, batch=4096, seq=128, remat=remat)

    plan = plan_recipes(make, {"remat": ("none", "full")}, options, of_source=True)[1].plan
    rows = {row["choices"]["remat"]: row for row in plan.provenance["recipe"]["tried"]}
    assert min(rows, key=lambda remat: rows[remat]["step_time_s"]) == "full"
    assert min(rows, key=lambda remat: rows[remat]["eager_step_time_s"]) == "none"
    assert plan.recipe is not None and plan.recipe.chosen == {"remat": "none"}
    assert rows["none"]["eager_step_time_s"] == eager_step_s(plan)
    assert rows["full"]["verdict"].endswith("slower in eager torch")
    text = io.StringIO()
    Console(file=text, width=200).print(terminal_report(plan))
    assert "eager step" in text.getvalue()
    short = dataclasses.replace(plan, memory_limit_bytes=plan.prediction.peak_bytes)
    assert eager_excess(plan, plan) == 0 and eager_excess(short, plan) == math.inf == -eager_excess(plan, short)


def test_the_written_plan_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Write the first plan, which waits least between nodes, and is not the fastest here."""
    file = tmp_path / "llama.toml"
    given = "hf:llama3-8b --topology h100:8*16 --batch 256 --seq 8192"
    assert main(["degrees", *given.split(), "--out", str(file)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    degrees = tomllib.loads(file.read_text())["parallelism"]
    sharded, tensor = degrees["data_parallel_shard_degree"], degrees["tensor_parallel_degree"]
    assert last.startswith(f"Written: {file}, of the first plan, dp{sharded} tp{tensor} pp1 ")


def test_torchtitan_reads_the_batch_and_the_degrees() -> None:
    for choice in _choices("torchtitan"):
        document = tomllib.loads(DEGREE_FORMS["torchtitan"](choice))
        degrees, training = document["parallelism"], document["training"]
        whole = degrees["data_parallel_shard_degree"] * degrees["tensor_parallel_degree"]
        assert whole * degrees["pipeline_parallel_degree"] == 8 and training["global_batch_size"] == 32
        per_step = training["local_batch_size"] * degrees["data_parallel_shard_degree"]
        assert 32 % per_step == 0 and (choice.run.pp == 1 or per_step == 32)
        assert document["activation_checkpoint"]["mode"] == choice.run.recompute
        assert ("selective_ac_option" in document["activation_checkpoint"]) == (choice.run.recompute == "selective")
        assert degrees["fsdp_reshard_after_forward"] == ("always" if choice.run.zero == 3 else "never")


def test_megatron_gets_degrees_and_dims() -> None:
    choice = _choices("megatron-core")[0]
    run = dataclasses.replace(choice.run, dp=2, tp=2, pp=2, micro_batch=1, accumulation=16, zero=1, recompute="full")
    arguments = DEGREE_FORMS["megatron-core"](dataclasses.replace(choice, run=run)).splitlines()
    for line in ("--tensor-model-parallel-size 2", "--sequence-parallel", "--pipeline-model-parallel-size 2"):
        assert line in arguments
    for line in ("--global-batch-size 32", "--use-distributed-optimizer", "--recompute-granularity full"):
        assert line in arguments
    assert "--num-query-groups 8" in arguments and "--untie-embeddings-and-output-weights" in arguments


def test_experts_are_written_for_both_frameworks() -> None:
    for framework, line in (
        ("torchtitan", "expert_parallel_degree = {}"),
        ("megatron-core", "--expert-model-parallel-size {}"),
    ):
        choice = choose_degrees(gpu_decoder("hf:mixtral-tiny"), "h100:4", framework, batch=8, seq=256)[0]
        assert line.format(choice.run.ep) in DEGREE_FORMS[framework](choice).splitlines()
    assert "--num-experts 4" in DEGREE_FORMS["megatron-core"](choice)
