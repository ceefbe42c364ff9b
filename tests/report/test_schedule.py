"""Drawings of the schedule of a plan with stages: in a terminal, on the page, in the trace."""

import dataclasses
import re

import jax
import pytest
from rich.console import Console

import autoshard
from autoshard.planning import Plan, PlannedChunk, PlannedPipeline, load_plan, save_plan
from autoshard.program import pipelined, read_pipeline, trace
from autoshard.program.jax.layer_stack import in_stages
from autoshard.report import html_report, perfetto_trace, plan_figures, terminal_report
from autoshard.report.schedule_picture import schedule_picture, schedule_report


def staged(plan: Plan, schedule: str = "1f1b", stages: int = 2, count: int = 4, rounds: int = 1) -> Plan:
    """Add a pipeline with equal chunks of 1 s forward and 2 s backward to a plan."""
    chunks = (PlannedChunk(1.0, 2.0),) * (stages * rounds)
    return dataclasses.replace(plan, pipeline=PlannedPipeline(schedule, stages, count, rounds, False, chunks))


def printed(plan: Plan, width: int) -> list[str]:
    console = Console(width=width, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(schedule_report(plan))
    return capture.get().splitlines()


def test_a_row_has_a_place_for_every_second(plan: Plan) -> None:
    lines = printed(staged(plan), 11 + 2 * 15)  # 15 seconds, two characters each
    rows = {line[2:9]: line[10:].rstrip() for line in lines if line.startswith("  stage ")}
    assert rows == {"stage 0": "0█1█····0▒▒▒2█1▒▒▒3█2▒▒▒··3▒▒▒", "stage 1": "··0█0▒▒▒1█1▒▒▒2█2▒▒▒3█3▒▒▒····"}
    assert sum(row.count("·") for row in rows.values()) == 2 * 6  # (S - 1) turns of 3 s in each of two rows


def test_the_words_say_bubble_and_what_is_stored(plan: Plan) -> None:
    pipeline = staged(plan).pipeline
    assert pipeline is not None
    assert pipeline.words() == (
        "2 stages, 1f1b, 4 microbatches (a program for each stage)",
        "15 s in the stages, 20.0% of it bubble",
        "a microbatch takes 3 s in a stage, forward and backward",
        "for the backward pass a stage holds the values of up to 2 (the first) to 1 (the last) microbatches",
    )
    assert plan_figures(staged(plan))["pipeline"]["bubble"] == pytest.approx(0.2)
    assert plan_figures(plan)["pipeline"] is None


def test_the_page_has_a_box_for_every_piece_of_work(plan: Plan) -> None:
    page = html_report(staged(plan, stages=4, count=8))
    assert page.count('class="s-forward" x=') == page.count('class="s-backward" x=') == 32
    assert "stage 3, backward of microbatch 7" in page and "h-pipeline" not in html_report(plan)
    assert "20.0% of it is bubble" in html_report(staged(plan))
    picture = schedule_picture(staged(plan, "gpipe", count=6000))
    assert picture is not None and [len(row["boxes"]) for row in picture["rows"]] == [2, 2]
    widths = sum(box["width"] for row in picture["rows"] for box in row["boxes"])
    assert widths == pytest.approx(200 * (1 - picture["bubble"]), abs=0.01)


def test_the_trace_has_a_track_for_every_stage(plan: Plan) -> None:
    events = perfetto_trace(staged(plan, stages=3))["traceEvents"]
    titles = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert {"stage 0", "stage 1", "stage 2"} <= set(titles)
    work = [e for e in events if e["ph"] == "X" and e["tid"] == titles["stage 2"]]
    assert [e["name"] for e in work[:3]] == ["forward 0", "backward 0", "forward 1"]
    assert work[0]["ts"] == 2e6 and work[0]["dur"] == 1e6
    assert not [e for e in perfetto_trace(plan)["traceEvents"] if e["tid"] >= 1000]


def test_ticks_of_a_planned_step_are_read_off_it(tmp_path) -> None:
    def step(params, x):
        def loss(p):
            return (autoshard.stack(lambda x, w: x + jax.numpy.tanh(x @ w), p, x) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    shape = jax.ShapeDtypeStruct
    pipeline = read_pipeline(2, 4, None)
    with pipelined(pipeline) as stacks:
        program = trace(step, (shape((4, 64, 64), "float32"), shape((32, 64), "float32")), training=True)
    program = in_stages(program, tuple(stacks), pipeline)
    plan = autoshard.plan(program, topology="cpu:4", mesh={"stage": 2, "data": 2})
    found = plan.pipeline
    assert found is not None and (found.stages, found.microbatches, found.rounds, found.together) == (2, 4, 1, True)
    whole = found.before_s + found.timetable().step_time_s + found.after_s
    assert whole == pytest.approx(plan.prediction.step_time_s, rel=0.01)
    assert found.between_s >= 0 and found.chunks[0].forward_s > 0
    assert found.timetable().in_flight == (5, 5)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").pipeline == found
    console = Console(width=100)
    with console.capture() as capture:
        console.print(terminal_report(plan))
    assert re.search(r"\n  stage 1 ·+0█", capture.get())
