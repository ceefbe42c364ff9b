"""Torch modules as one program for each stage: the cut, its prices, and modules that cannot be cut."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autoshard
from autoshard import UserError
from autoshard.cli import main
from autoshard.cost import Schedule, Topology
from autoshard.errors import InfeasibleError
from autoshard.planning import Options, Plan, load_plan, make_plan, save_plan
from autoshard.planning.price.analysed_program import analyse_program, reprice
from autoshard.planning.price.step_ledger import itemise
from autoshard.planning.space.user_constraints import Asked
from autoshard.planning.stages.segment_prices import SegmentPrices, segment_prices
from autoshard.planning.stages.stage_cut import cut_memory, cut_seconds
from autoshard.program import in_segments, open_source


FILE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.back = nn.Linear(32, 512), nn.Linear(512, 32)
        self.mixed = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(64, 8)

    def forward(self, x):
        hidden = self.back(torch.relu(self.wide(x)))
        return self.head(torch.cat([hidden, self.norm(self.mixed(hidden))], -1))


torch.manual_seed(0)
model = Net()
inputs, targets = torch.randn(64, 32), torch.randn(64, 8)


def loss(output, targets):
    return ((output - targets) ** 2).mean()
"""
STAGED = {"train": True, "stages": 2, "schedule": "1f1b", "microbatches": 4}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("staged") / "net.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture(scope="module")
def plan(net: str) -> Plan:
    return autoshard.plan(net, topology="cpu:2", program_options=STAGED)


def priced(net: str, topology: str, mesh: str) -> tuple[Plan, SegmentPrices, list[str]]:
    with in_segments(4) as segments:
        program = open_source(net, train=True)
    asked = Asked(axis_only=(("stage", ()),))
    made = make_plan(program, Options(topology=topology, mesh=mesh, refine_axes=False, asked=asked)).plan
    model, choices = reprice(made, program, analyse_program(program, Topology.parse(topology).backend))
    return made, segment_prices(itemise(model, choices), segments.may_cut, "stage", 4), segments.names


def test_segments_have_every_second_and_every_parameter(tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text(FILE.replace("torch.randn(64", "torch.randn(16384"))  # so that data parallelism pays
    made, prices, names = priced(str(path), "cpu:4", "stage=2,data=2")
    costs = prices.costs
    assert names == ["wide", "back", "mixed", "mixed.1", "mixed.2", "norm", "head"]
    # The program is one block without loops: no collective overlaps compute, so all of the step's time belongs to a
    # stage.
    spent = costs.forward_s.sum() + costs.backward_s.sum() + costs.update_s.sum()
    assert spent == pytest.approx(made.prediction.step_time_s, rel=1e-6)
    assert (costs.forward_s[[0, 1, 2, 4, 6]] > 0).all() and (costs.backward_s[[0, 1, 2, 4, 6]] > 0).all()
    weights = [32 * 512 + 512, 512 * 32 + 32, 32 * 256 + 256, 0, 256 * 32 + 32, 2 * 32, 64 * 8 + 8]
    assert prices.kinds["parameters"].tolist() == [4 * n for n in weights]
    assert prices.kinds["gradients"].tolist() == [4 * n for n in weights]
    # The values that cross a cut: 2048 examples a device in f32. The head needs the first hidden state again.
    assert prices.handed_bytes.tolist() == [2048 * n * 4 for n in (512, 32, 32 + 256, 32 + 256, 32 + 32, 32 + 32)]
    assert "data" in str(made.words), "the batch is split inside of a stage"
    assert prices.exposed_s[2].sum() > 0 and prices.exposed_s[:2].sum() == 0, "gradients are summed once a step"
    assert (np.diff(costs.kept_bytes, axis=1)[0] >= 0).all() and costs.kept_bytes[0, -1] > 0


def test_the_plan_is_the_best_of_all_cuts(net: str, plan: Plan) -> None:
    _, prices, names = priced(net, "cpu:2", "stage=2")
    schedule = Schedule("1f1b", 2, 4)
    every = {k: cut_seconds(prices.costs, schedule, (0, k)) for k in range(1, len(names))}
    best = min(every, key=every.__getitem__)
    pipeline = plan.pipeline
    assert pipeline is not None and pipeline.chunks[1].modules[0] == names[best]
    assert plan.prediction.step_time_s == pytest.approx(every[best])
    assert pipeline.bound_s == pytest.approx(every[best]) and plan.plan_gap == pytest.approx(0, abs=1e-9)
    assert pipeline.memory_bytes == tuple(map(round, cut_memory(prices.costs, schedule, (0, best))))
    assert plan.prediction.peak_bytes == max(pipeline.memory_bytes)
    assert sum(plan.prediction.memory.values()) == plan.prediction.peak_bytes
    assert pipeline.timetable().in_flight == (2, 1)


def test_the_plan_is_saved_and_is_the_same_twice(net: str, plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path / "a.json")
    assert load_plan(tmp_path / "a.json") == plan
    save_plan(autoshard.plan(net, topology="cpu:2", program_options=STAGED), tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    with pytest.raises(UserError, match="is a program for each stage, and no single step: export it with"):
        plan.jit(lambda x: x)


def test_the_command_says_the_cut(net: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--train", "--stages", "2", "--schedule", "interleaved:2", "--microbatches", "4", "--topology", "cpu:2"]
    out = str(tmp_path / "staged.json")
    assert main(["plan", net, *flags, "--out", out, "--quiet"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "2 stages, interleaved:2, 4 microbatches (a program for each stage)" in told
    assert re.search(r"stage 0: wide[^;]*; .* forward, .* backward, .* a device", told)
    assert "no cut between modules is faster" in told
    assert main(["measure", net, "--plan", out, "--quiet"]) == 2
    assert "is a program for each stage, and no single step" in capsys.readouterr().err
    assert main(["explain", out, "wide.weight", "--quiet"]) == 2
    said = "is a program for each stage, and `explain` compares specs of one: plan the step without --stages"
    assert said in capsys.readouterr().err


def test_what_is_left_open_is_chosen(net: str) -> None:
    options = {"train": True, "stages": 2, "schedule": "auto"}
    made = autoshard.plan(net, topology="cpu:2", program_options=options, form="torch-pipelining")
    rows = made.provenance["stages"]
    assert {(row["schedule"], row["microbatches"]) for row in rows} == {
        (schedule, count)
        for schedule in ("1f1b", "gpipe", "interleaved:2", "interleaved:3")
        for count in (2, 4, 8, 16)
    }  # fmt: skip
    taken = {row["schedule"]: row["step_time_s"] for row in rows if row["microbatches"] == 4}
    assert taken.pop("interleaved:3") is None, "the skip connection would go past a stage"
    assert all(taken.values())
    best = min(row["step_time_s"] for row in rows if row["step_time_s"])
    assert made.pipeline is not None and made.prediction.step_time_s == best
    assert (made.pipeline.schedule, made.pipeline.microbatches) == (rows[0]["schedule"], rows[0]["microbatches"])


def test_open_stages_end_where_the_modules_do(tmp_path: Path) -> None:
    path = tmp_path / "short.py"
    path.write_text(
        "import torch\n\nmodel = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))\n"
        "inputs = torch.randn(64, 32)\n"
    )
    options = {"stages": "auto", "schedule": "1f1b", "microbatches": 4}
    made = autoshard.plan(str(path), topology="cpu:4", program_options=options)
    assert [row["stages"] for row in made.provenance["stages"]] == [2], "4 stages are more than the 3 modules"


def test_a_stage_sends_what_all_of_its_chunks_hand_on(net: str) -> None:
    made = autoshard.plan(net, topology="cpu:2", program_options={**STAGED, "schedule": "interleaved:2"})
    assert made.pipeline is not None and len(made.pipeline.chunks) == 4
    first, second, third, _ = (chunk.handed_bytes for chunk in made.pipeline.chunks)
    # Four microbatches, forward and backward.
    assert made.prediction.wire_bytes == {"stage": 4 * 2 * max(first + third, second)}


@pytest.mark.parametrize(
    ("options", "topology", "more", "sentence"),
    [
        ({"microbatches": 3}, "cpu:2", {}, "3 microbatches do not divide the batch: an input has 64 examples; use 2"),
        ({"stages": 3}, "cpu:2", {}, "3 stages do not divide the 2 devices of cpu:2; use 2."),
        ({"stages": 8}, "cpu:8", {}, "8 stages are more than the 7 modules or segments of net that one may begin with"),
        ({"stages": 4, "schedule": "interleaved:2"}, "cpu:4", {}, "8 chunks of layers are more than the 7 modules"),
        ({"stages": 6, "microbatches": 8}, "cpu:6", {}, "no cut into 6 stages with 8 microbatches by 1f1b sends each"),
        ({"stages": None}, "cpu:2", {}, "a program for each stage needs stages: add --stages 2 or more"),
        ({"stages": 2}, "cpu:1", {}, "stages need devices of their own, and cpu:1 has one"),
        ({"schedule": "interleaved:2", "microbatches": 1}, "cpu:2", {}, "need 2 microbatches or a multiple of it"),
        ({"schedule": "circular:2"}, "cpu:2", {"form": "torch-pipelining"}, "schedule `circular:2` is that of one"),
        ({"remat": "auto"}, "cpu:2", {}, "--remat auto is not chosen together with a program for each stage"),
        ({}, "cpu:4", {"mesh": "data=4"}, "the mesh data=4 is not that of 2 stages on 4 devices; leave it out"),
        ({}, "cpu:2", {"candidates": 2}, "2 candidates are asked for, but a program for each stage has one plan"),
    ],
)
def test_what_cannot_be_is_refused(
    net: str, options: dict[str, Any], topology: str, more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        autoshard.plan(net, topology=topology, program_options={**STAGED, **options}, **more)


def test_no_cut_within_memory_is_refused(net: str, plan: Plan) -> None:
    limit = plan.prediction.peak_bytes // 3
    with pytest.raises(InfeasibleError, match="no cut into 2 stages with 4 microbatches by 1f1b keeps within"):
        autoshard.plan(net, topology="cpu:2", program_options=STAGED, memory_limit=limit)


def test_torch_modules_have_no_zero_bubble(net: str) -> None:
    with pytest.raises(UserError, match="schedule `zero-bubble` is for JAX steps"):
        autoshard.plan(net, topology="cpu:2", program_options=STAGED | {"schedule": "zero-bubble"})


def test_programs_in_jax_need_marks(tmp_path: Path) -> None:
    path = tmp_path / "step.py"
    path.write_text(
        "import jax\n\ndef program():\n    return (lambda x: x @ x), (jax.ShapeDtypeStruct((8, 8), 'float32'),)\n"
    )
    with pytest.raises(UserError, match="step has neither the modules of a torch module nor marks"):
        autoshard.plan(str(path), topology="cpu:2", program_options={"stages": 2, "schedule": "1f1b"})


def test_figures_of_the_record_are_those_of_its_timetable(plan: Plan) -> None:
    pipeline = plan.pipeline
    assert pipeline is not None
    assert pipeline.timetable().step_time_s + pipeline.after_s == pytest.approx(plan.prediction.step_time_s)
    slower = dataclasses.replace(
        pipeline, chunks=(dataclasses.replace(pipeline.chunks[0], hand_over_s=1.0), pipeline.chunks[1])
    )
    assert slower.timetable().step_time_s > 2.0


def test_updates_are_of_the_segment_whose_parameters_they_are(net: str) -> None:
    _, prices, _ = priced(net, "cpu:2", "stage=2")
    parameters, update = prices.kinds["parameters"], prices.costs.update_s
    # The optimizer's update is bound by memory: each large weight has about its share of all bytes.
    large = parameters > 0.2 * parameters.sum()
    assert large.sum() == 2 and (update[large] > 0.1 * update.sum()).all()
