"""The code for DTensor and FSDP2 runs on four processes, and computes the module's unplanned results."""

import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import torch

import autoshard
from autoshard import UserError
from autoshard.exports import export_plan, make_export
from autoshard.planning import Plan, Spec
from tests import forked


FILE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(32, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
model = Net()
inputs, targets = torch.randn(64, 32), torch.randn(64, 16)


def loss(output, targets):
    return ((output - targets) ** 2).mean()
"""
RUN = """
import runpy, sys, warnings
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
import autoshard

warnings.simplefilter("ignore")
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def module_on(plan, net):
    # What the code of an export has, by the plan itself.
    mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    names = {name.removeprefix("batch."): None for name, role in plan.roles.items() if role == "batch"}
    place = lambda mesh, **inputs: inputs
    return {"make_mesh": lambda kind: mesh, "distribute": plan.distribute, "distribute_inputs": place, "INPUTS": names}


for name in sys.argv[3:]:
    net = runpy.run_path(f"{folder}/net.py")
    if name.startswith("plan"):
        code = module_on(autoshard.load(f"{folder}/{name}.json"), net)
    else:
        code = runpy.run_path(f"{folder}/{name}.py")
    model, mesh = net["model"], code["make_mesh"]("cpu")
    (given,) = code.get("INPUTS", {"x": None}).keys() - {"targets"}
    if name.startswith("torchtitan"):
        code["parallelize"](model, mesh)
        place = lambda mesh, **inputs: {key: value.chunk(4)[rank] for key, value in inputs.items()}
    elif name.startswith("fsdp2"):
        code["shard"](model, mesh)
        place = code["local_inputs"]
    else:
        code["distribute"](model, mesh)
        place = code["distribute_inputs"]
    local = {key: list(p.to_local().shape) for key, p in model.named_parameters()}
    placed = place(mesh, **{given: net["inputs"], "targets": net["targets"]})
    given = model(placed[given])
    loss = whole(net["loss"](whole(given) if name.startswith("plan") else given, placed["targets"]))
    loss.backward()
    told = loss.detach().clone()
    if name.startswith(("fsdp2", "torchtitan")):
        dist.all_reduce(told)  # every process has its own part of the batch
        told /= 4
    grads = {key: whole(p.grad) for key, p in model.named_parameters()}
    torch.save((grads, told, local), f"{folder}/{name}.{rank}")
dist.destroy_process_group()
"""
MESHES = {"data=4": {"data": 4}, "data=2,model=2": {"data": 2, "model": 2}}


SPECS = {"up.weight": ("model", "data"), "up.bias": ("model",), "down.weight": ("data", "model")}


def stated(plan: Plan) -> Plan:
    """Replace the chosen plan of this small module by FSDP and, over `model`, Megatron."""
    arguments = dict(plan.arguments)
    for name, shape in plan.shapes.items():
        if plan.roles.get(name) not in ("parameter", "batch"):
            continue
        stacked = "*" in name
        axes = next((axes for end, axes in SPECS.items() if name.endswith(end)), ("data",))
        if "model" not in plan.mesh and plan.roles[name] == "parameter":
            axes = ("data",)
        if ".norm." in name:  # DTensor of torch 2.9 has no gradient of a layer norm whose weight is split
            axes = ()
        dims = [()] * stacked + [(axis,) for axis in axes]
        arguments[name] = Spec((*dims, *((),) * (len(shape) - len(dims))))
    return dataclasses.replace(plan, arguments=arguments)


def hybrid(plan: Plan) -> Plan:
    """Replace the plan on two axes by FSDP over `model`, whose groups `data` copies; both split the batch."""
    arguments = dict(plan.arguments)
    for name, spec in stated(plan).arguments.items():
        if plan.roles.get(name) == "parameter":
            stacked = [()] * ("*" in name)
            arguments[name] = Spec((*stacked, ("model",), *((),) * (len(spec.dims) - len(stacked) - 1)))
        elif plan.roles.get(name) == "batch":
            arguments[name] = Spec((("data", "model"), *((),) * (len(spec.dims) - 1)))
    return dataclasses.replace(plan, arguments=arguments, axis_roles=dict.fromkeys(plan.mesh, ("batch",)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all four processes for each form and mesh, and store their results in a folder."""
    folder = tmp_path_factory.mktemp("torch")
    (folder / "net.py").write_text(FILE)
    (folder / "run.py").write_text(RUN)
    names = []
    for mesh in MESHES.values():
        plan = autoshard.plan(str(folder / "net.py"), topology="h100:4", mesh=mesh, program_options={"train": True})
        (use,) = (use for use in plan.uses if use.parameter.endswith("up.weight") and use.output_shape[-1] == 128)
        assert (use.input_shape, use.output_shape) == ((64, 32), (64, 128)), "what its own layer takes and gives"
        names.append(f"plan{len(mesh)}")
        stated(plan).save(folder / f"{names[-1]}.json")
        for form in ("dtensor", "fsdp2"):
            names.append(f"{form}{len(mesh)}")
            (folder / f"{names[-1]}.py").write_text(export_plan(stated(plan), form, force=True))
        if len(mesh) == 2:
            for form in ("fsdp2", "torchtitan"):
                names.append(f"{form}hybrid")
                (folder / f"{names[-1]}.py").write_text(export_plan(hybrid(plan), form, force=True))
        if len(mesh) == 1:
            names.append("torchtitan1")
            (folder / "torchtitan1.py").write_text(export_plan(stated(plan), "torchtitan", force=True))
    runs = forked.server().run([[str(folder / "run.py"), str(rank), str(folder), *names] for rank in range(4)])
    assert [run.returncode for run in runs] == [0] * 4, "".join(run.stderr[-2000:] for run in runs)
    return folder


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", ["dtensor1", "fsdp21", "torchtitan1", "plan1", "dtensor2", "fsdp22", "plan2", "fsdp2hybrid"]
)
def test_loss_and_gradients_are_those_of_the_unplanned_module(folder: Path, name: str) -> None:
    net = runpy.run_path(str(folder / "net.py"))
    loss = net["loss"](net["model"](net["inputs"]), net["targets"])
    loss.backward()
    wanted = {key: p.grad for key, p in net["model"].named_parameters()}
    for rank in range(4):
        grads, told, _ = torch.load(folder / f"{name}.{rank}")
        torch.testing.assert_close(told, loss.detach(), rtol=1e-5, atol=0)
        assert grads.keys() == wanted.keys()
        for key, grad in grads.items():
            worst = (grad - wanted[key]).abs().max() / wanted[key].abs().max()
            assert worst < 1e-5, (key, worst)


def test_every_device_holds_its_share(folder: Path) -> None:
    for name in ("fsdp22", "dtensor2", "plan2"):
        _, _, local = torch.load(folder / f"{name}.0")
        assert local["blocks.0.up.weight"] == [64, 16] and local["blocks.1.down.weight"] == [16, 64]
    for name, mesh in (("fsdp2hybrid", {"data": 2, "shard": 2}), ("torchtitanhybrid", {"dp_replicate": 2, "fsdp": 2})):
        assert runpy.run_path(str(folder / f"{name}.py"))["MESH"] == mesh
        _, _, local = torch.load(folder / f"{name}.0")
        assert local["blocks.0.up.weight"] == [64, 32], "half of it: the other two processes have copies"
    _, _, local = torch.load(folder / "fsdp21.0")
    assert sum(torch.Size(shape).numel() for shape in local.values()) * 4 <= 1.1 * (2 * (64 + 2 * 32 * 128 + 128) + 528)


def test_what_fsdp2_has_no_use_for_is_refused(plan: Plan) -> None:
    single = dataclasses.replace(
        plan,
        mesh={"model": 8},
        arguments={name: Spec.replicated(len(shape)) for name, shape in plan.shapes.items() if name in plan.arguments},
    )
    with pytest.raises(UserError, match="the plan splits no batch"):
        export_plan(single, "fsdp2", force=True)


@pytest.mark.heavy
def test_an_fsdp_plan_stays_one_where_its_ids_stand_whole() -> None:
    """Export a plan that looks tokens up by columns: every process receives its rows, at the step of FSDP itself."""
    options = {"train": True, "batch": 16, "seq": 512, "remat": "full"}
    within = autoshard.plan("hf:llama-tiny", topology="h100:8", mesh={"data": 8}, program_options=options, form="fsdp2")
    provenance = {key: value for key, value in within.provenance.items() if key != "for"}
    arguments = {**within.arguments, "batch.input_ids": Spec.replicated(2)}
    ids = dataclasses.replace(within, arguments=arguments, provenance=provenance)
    exported = make_export(within, "fsdp2")
    assert exported.prediction == within.prediction and within.arguments["batch.input_ids"].axes == ("data",)
    of_ids = make_export(ids, "fsdp2", force=True)
    assert of_ids.prediction is not None
    assert of_ids.prediction.step_time_s == pytest.approx(within.prediction.step_time_s, rel=0.1)
    text = of_ids.text
    names: dict[str, object] = {}
    exec(text[text.index("INPUTS = ") : text.index("def make_mesh")], names)  # noqa: S102
    assert names["INPUTS"] == {"input_ids": 0, "labels": 0}
    dtensor = make_export(ids, "dtensor", force=True).text
    assert re.search(r"'input_ids': .*Shard\(0\)", dtensor), dtensor[-1500:]


@pytest.mark.heavy
def test_parameters_that_an_axis_must_not_split_are_copied_over_it() -> None:
    """Plan for HSDP as docs/export.md says: between islands parameters are copied."""
    options = {"train": True, "batch": 16, "seq": 128}
    asked = {"pins": {"batch.*": "data+model,None"}, "forbid": {"*.weight": "data"}}
    place = {"topology": "h100:4*2", "mesh": {"data": 2, "model": 4}, "form": "fsdp2"}
    text = make_export(autoshard.plan("hf:llama-tiny", program_options=options, **place, **asked), "fsdp2").text
    assert "MESH = {'data': 2, 'shard': 4}" in text
