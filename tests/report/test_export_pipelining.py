"""The code for torch.distributed.pipelining runs on two processes, and computes the module's results."""

import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import torch

import autoshard
from autoshard import UserError
from autoshard.exports import export_plan, make_export
from autoshard.planning import Plan, PlannedChunk, PlannedPipeline
from tests import forked
from tests.planning.explain.test_staged import FILE


SCHEDULES = ("gpipe", "1f1b", "interleaved:2")
RUN = """
import runpy, sys, warnings
import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
for number in range(3):
    net, code = runpy.run_path(f"{folder}/net.py"), runpy.run_path(f"{folder}/code{number}.py")
    schedule, modules = code["make_schedule"](net["model"], (net["inputs"],), loss=net["loss"])
    losses = []
    if rank == 0:
        schedule.step(net["inputs"])
    else:
        schedule.step(target=net["targets"], losses=losses)
    grads = {name: p.grad for module in modules for name, p in module.named_parameters()}
    told = torch.stack([each.detach() for each in losses]) if losses else None
    torch.save((grads, told), f"{folder}/{number}.{rank}")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run both processes for each schedule, and store their results in a folder."""
    folder = tmp_path_factory.mktemp("pipelining")
    (folder / "net.py").write_text(FILE)
    (folder / "run.py").write_text(RUN)
    for number, schedule in enumerate(SCHEDULES):
        options = {"train": True, "stages": 2, "schedule": schedule, "microbatches": 4}
        plan = autoshard.plan(
            str(folder / "net.py"), topology="cpu:2", program_options=options, form="torch-pipelining"
        )
        (folder / f"code{number}.py").write_text(export_plan(plan, "torch-pipelining"))
    runs = forked.server().run([[str(folder / "run.py"), str(rank), str(folder)] for rank in range(2)])
    assert [run.returncode for run in runs] == [0, 0], "".join(run.stderr[-3000:] for run in runs)
    return folder


@pytest.mark.heavy
@pytest.mark.parametrize("number", range(3), ids=SCHEDULES)
def test_loss_and_gradients_are_those_of_the_module(folder: Path, number: int) -> None:
    net = runpy.run_path(str(folder / "net.py"))
    loss = net["loss"](net["model"](net["inputs"]), net["targets"])
    loss.backward()
    wanted = {name: p.grad for name, p in net["model"].named_parameters()}
    (first, _), (last, losses) = (torch.load(folder / f"{number}.{rank}") for rank in range(2))
    assert not set(first) & set(last) and {**first, **last}.keys() == wanted.keys()
    assert losses.shape == (4,)
    torch.testing.assert_close(losses.mean(), loss.detach(), rtol=1e-5, atol=0)
    for name, grad in {**first, **last}.items():
        worst = (grad - wanted[name]).abs().max() / wanted[name].abs().max()
        assert worst < 1e-5, (name, worst)


def staged(plan: Plan, pipeline: PlannedPipeline) -> Plan:
    return dataclasses.replace(plan, pipeline=pipeline, mesh={"stage": 2, "data": 4, "model": 2})


def test_what_the_code_cannot_say_is_reported(plan: Plan) -> None:
    chunks = (PlannedChunk(1.0, 2.0, ("a'b", "a'b")), PlannedChunk(1.0, 2.0, ("x\nimport os", "{}")))
    made = make_export(staged(plan, PlannedPipeline("1f1b", 2, 4, 1, False, chunks)), "torch-pipelining")
    assert "the split of modules over the 8 devices of a stage (data=4, model=2)." in made.text
    assert "SPLITS = ('x\\nimport os',)" in made.text and "Schedule1F1B(stages[0]," in made.text
    compile(made.text, "code", "exec")
    ahead = tuple(dataclasses.replace(chunk, backward_s=None) for chunk in chunks)
    forward = make_export(staged(plan, PlannedPipeline("1f1b", 2, 4, 1, False, ahead)), "torch-pipelining")
    assert "ScheduleGPipe(stages[0]," in forward.text
    with pytest.raises(UserError, match=re.escape("schedule `interleaved:2` is for training in torch.distributed")):
        make_export(staged(plan, PlannedPipeline("interleaved:2", 2, 4, 2, False, ahead * 2)), "torch-pipelining")


def test_other_plans_and_other_forms_are_refused(plan: Plan) -> None:
    with pytest.raises(UserError, match="llama3-8b has no stages: plan a torch module with --stages 2 --for torch-pip"):
        export_plan(plan, "torch-pipelining")
    ticks = PlannedPipeline("gpipe", 2, 4, 1, True, (PlannedChunk(1.0, 2.0),) * 2)
    with pytest.raises(UserError, match="llama3-8b is one program for all stages: plan a torch module"):
        export_plan(dataclasses.replace(plan, pipeline=ticks), "torch-pipelining")
    apart = dataclasses.replace(ticks, together=False)
    with pytest.raises(UserError, match="is a program for each stage, and no single step: run"):
        export_plan(dataclasses.replace(plan, pipeline=apart), "jax")


def maxtext(plan: Plan, pipeline: PlannedPipeline) -> tuple[dict[str, str], str]:
    roles = {"data": ("batch",), "model": ("stage",)}
    text = export_plan(dataclasses.replace(plan, pipeline=pipeline, axis_roles=roles, choices=""), "maxtext")
    return dict(re.findall(r"^(\w+): (\w+)$", text, re.MULTILINE)), text


def test_maxtext_has_the_pipeline(plan: Plan) -> None:
    parts = plan.mesh["model"]
    chunks = (PlannedChunk(1.0, 2.0),) * (2 * parts)
    ticks = PlannedPipeline("circular:2", parts, 2 * parts, 2, True, chunks, layers=4 * parts)
    found, text = maxtext(plan, ticks)
    assert found["ici_pipeline_parallelism"] == str(parts) and "ici_tensor_parallelism" not in found
    assert found["num_layers_per_pipeline_stage"] == "2"
    assert (found["num_pipeline_repeats"], found["num_pipeline_microbatches"]) == ("2", str(2 * parts))
    assert "microbatches;" not in text and "stages on" not in text
    uneven = dataclasses.replace(ticks, schedule="gpipe", stages=2 * parts, rounds=1, microbatches=2 * parts + 1)
    found, text = maxtext(plan, dataclasses.replace(uneven, chunks=(PlannedChunk(1.0, 2.0),) * (2 * parts)))
    assert found["num_layers_per_pipeline_stage"] == "4" and found["num_pipeline_repeats"] == "1"
    assert f"{2 * parts} stages on {parts} parts of the devices; here there are {parts} stages." in text
    assert f"{2 * parts + 1} microbatches; MaxText takes multiples of the {parts} stages alone." in text
    whole = export_plan(dataclasses.replace(plan, pipeline=ticks), "maxtext")
    assert f"the {parts} stages of the layers; no axis of the mesh splits them." in whole
