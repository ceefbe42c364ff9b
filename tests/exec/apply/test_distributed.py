"""Modules under a plan on DTensors: eight processes compute the values of one. Ops that DTensor cannot run are run
whole.

The tests of exports also run a planned module and a Llama on four processes, which they start anyway.
"""

import dataclasses
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import autoshard
from autoshard.errors import UserError
from autoshard.exec import TorchPlan, distribution_notes
from autoshard.planning import ParameterUse, Plan, Spec
from autoshard.program import from_torch
from experiments.correctness.dtensor import ALLOWED, FAMILIES, plan_row, run_rows
from tests.exec.planned_programs import handmade, spec
from tests.exec.workers import run_workers


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_and_infers_as_undistributed(family: str, tmp_path: Path) -> None:
    rows = [plan_row(family, train, tmp_path) for train in (True, False)]
    training, inference = run_rows(rows, tmp_path)
    assert rows[0]["planned"], "the plan splits something, or there is nothing to compare"
    assert training["loss"] < ALLOWED and training["gradients"] < ALLOWED and training["updates"] < ALLOWED
    assert inference["output"] < ALLOWED
    assert training["updates_seen"] > 0.5
    # DTensor places gradients itself, like the values that they belong to.
    assert training["wire_bytes"] < 1.6 * rows[0]["planned_bytes"]
    assert inference["wire_bytes"] <= 1.25 * rows[1]["planned_bytes"]
    for each in (training, inference):
        assert each["split_share"] > 0.5 and each["held_share"] < 0.9
        assert sum(each["calls"].values()) > 0


FILE = """
import torch
from torch import nn
from torch.nn import functional as F


class Odd(nn.Module):
    '''What DTensor of torch 2.9 fails on, or does to other values, and some of it that of 2.13 does.'''

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.batch = nn.LayerNorm(16), nn.BatchNorm1d(16)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x, offset=None):
        x = self.down(torch.relu(self.up(x)))
        first = self.norm(x)[:, 0]  # makes DTensor forget the shape that the norm gives
        again = self.norm(x * 2)
        padded = F.pad(again, (0, 0, 1, 0))[:, 1:]
        changed = padded.clone()
        changed[:, 1:2] = 0.5
        self.seen[0] += x.detach().abs().sum()
        ranks = torch.topk(x, 3, dim=-1).values
        normed = self.batch(x.flatten(0, 1)).view(x.shape)
        mixed = torch.cat([torch.tensor([]), changed * torch.arange(16), normed], dim=1)
        out = mixed.mean(1) + first + ranks.sum(-1).cumsum(0).mean()
        return {"out": out if offset is None else out + offset}


torch.manual_seed(0)
model = Odd()
inputs, offset = torch.randn(8, 4, 16), torch.randn(16)
"""
WORKER = """
import importlib, json, os, sys
os.environ.update(RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=sys.argv[2])
import copy, io, pickle
import torch
from torch.distributed.device_mesh import init_device_mesh
import autoshard
from autoshard import UserError
from autoshard.exec import distribution_notes
torch.distributed.init_process_group("gloo")
sys.path.insert(0, sys.argv[3])
net = vars(importlib.import_module("net"))
plan = autoshard.load(sys.argv[3] + "/plan.json")
model, inputs, offset = net["model"], net["inputs"], net["offset"]
plain = copy.deepcopy(model)
mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
plan.distribute(model, mesh, gather_outputs=True)
found = {"same_keys": list(plain.state_dict()) == list(model.state_dict())}
try:
    plan.distribute(model, mesh)
except UserError as error:
    found["twice"] = str(error)
for given in (plain, model):
    for _ in range(2):
        given.zero_grad()
        out = given(inputs, offset=offset)["out"]
        out.square().sum().backward()
    given.out = out.detach()
found["plain"] = type(model.out) is torch.Tensor
found["out"] = float((plain.out - model.out).abs().max() / plain.out.abs().max())
grads = {name: p.grad for name, p in plain.named_parameters()}
top = max(float(g.abs().max()) for g in grads.values())
found["grads"] = max(float((p.grad.full_tensor() - grads[n]).abs().max()) / top for n, p in model.named_parameters())
found["split"] = {n: list(p.grad.to_local().shape) for n, p in model.named_parameters()}
found["buffers"] = all(torch.allclose(a, b) for a, b in zip(plain.buffers(), model.buffers()))
found["notes"] = distribution_notes(model)
file = io.BytesIO()
torch.save(model, file)
file.seek(0)
made = {"copied": copy.deepcopy(model), "pickled": pickle.loads(pickle.dumps(model))}
made |= {"saved": torch.load(file, weights_only=False)}
made |= {"compiled": torch.compile(copy.deepcopy(model), backend="aot_eager", dynamic=False)}
for name, twin in made.items():
    for _ in range(2):
        twin.zero_grad()
        twin(inputs, offset=offset)["out"].square().sum().backward()
    pairs = list(zip(twin.parameters(), plain.parameters()))
    found[name] = max(float((p.grad.full_tensor() - q.grad).abs().max()) / top for p, q in pairs)
    found[name + " as placed"] = all(p.grad.placements == p.placements for p, _ in pairs)
short, compiled = inputs[:5], made["compiled"].eval()
with torch.no_grad():
    copied = made["copied"].eval()
    halves = [compiled(inputs[:rows])["out"] - copied(inputs[:rows])["out"] for rows in (8, 4, 2)]
    found["compiled halves"] = max(float(each.abs().max()) for each in halves)
    found["short"] = float((plain(short)["out"] - model(short)["out"]).abs().max())
print(json.dumps(found))
torch.distributed.destroy_process_group()
"""
SPECS = {"up.weight": "data,-", "up.bias": "data", "down.weight": "-,data", "batch.x": "-,-,-", "norm.weight": "data"}


def odd_plan(folder: Path) -> Plan:
    (folder / "net.py").write_text(FILE)
    net = runpy.run_path(str(folder / "net.py"))
    program = from_torch(torch.nn.Sequential(net["model"].up, net["model"].down), net["inputs"], name="odd")
    plan = handmade(program, {"data": 2}, {})
    shapes = {name: tuple(p.shape) for name, p in net["model"].named_parameters()} | {"batch.x": (8, 4, 16)}
    texts = {name: SPECS.get(name, ",".join("-" * len(shape))) for name, shape in shapes.items()}
    split, whole = Spec((("data",), (), ())), Spec(((), (), ()))
    uses = (
        ParameterUse("up.weight", Spec((("data",), ())), (8, 4, 16), whole, (8, 4, 32), Spec(((), (), ("data",)))),
        ParameterUse("down.weight", Spec(((), ())), (8, 4, 32), split, (8, 4, 16), split),
    )
    return dataclasses.replace(
        plan,
        arguments={name: spec(text) for name, text in texts.items()},
        results={},
        shapes=shapes,
        dtypes=dict.fromkeys(shapes, "float32"),
        roles={name: "batch" if name == "batch.x" else "parameter" for name in shapes},
        uses=uses,
    )


def test_what_dtensor_cannot_run_is_run_whole(tmp_path: Path) -> None:
    odd_plan(tmp_path).save(tmp_path / "plan.json")
    for found in run_workers(WORKER, [str(tmp_path)]):
        assert found["same_keys"] and found["plain"] and found["buffers"]
        assert found["out"] < 1e-5 and found["grads"] < 1e-5 and found["short"] < 1e-4
        assert found["split"]["up.weight"] == [16, 16] and found["split"]["down.weight"] == [16, 16]
        assert "has DTensors already" in found["twice"]
        for twin in ("copied", "pickled", "saved", "compiled"):
            assert found[twin] < 1e-5 and found[f"{twin} as placed"]
        assert found["compiled halves"] == 0.0
        said = " ".join(found["notes"])
        assert "torch.Tensor.__setitem__" in said and "torch.topk" not in said
        assert all(note.endswith(".") and "runs whole on every device: " in note for note in found["notes"])


def test_another_mesh_or_module_is_refused(tmp_path: Path) -> None:
    plan = odd_plan(tmp_path)
    mesh = SimpleNamespace(mesh=torch.zeros(4), mesh_dim_names=("model",))
    with pytest.raises(
        UserError, match=r"the device mesh is \{'model': 4\}, but the plan for odd is for \{'data': 2\}"
    ):
        TorchPlan(plan).distribute(torch.nn.Linear(2, 2), mesh)
    mesh = SimpleNamespace(mesh=torch.zeros(2), mesh_dim_names=("data",))
    with pytest.raises(UserError, match="the plan for odd has no parameter `weight`"):
        TorchPlan(plan).distribute(torch.nn.Linear(2, 2), mesh)
    with pytest.raises(UserError, match="the module has 0 of the 1 `down.weight` in the plan for odd"):
        TorchPlan(plan).distribute(torch.nn.ModuleDict({"up": torch.nn.Linear(16, 32)}), mesh)
    with pytest.raises(UserError, match="is not distributed"):
        distribution_notes(torch.nn.Linear(2, 2))


PLACED = """
import torch
from torch import nn


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, 16))
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.last = nn.LayerNorm(16)

    def forward(self, x):
        x = x + self.places
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.last(x) + x


torch.manual_seed(0)
model = Placed()
inputs = (torch.randn(4, 5, 16),)
"""
COUNT = """
import dataclasses, importlib, json, os, sys
os.environ.update(RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=sys.argv[2])
import copy
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
import autoshard
from autoshard.exec import distribution_notes
torch.distributed.init_process_group("gloo")
sys.path.insert(0, sys.argv[3])
net = vars(importlib.import_module("net"))
plan = autoshard.load(sys.argv[3] + "/plan.json")
mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
wanted = net["model"](*net["inputs"])
wanted.square().sum().backward()
found = {}
for name, made in (("pinned", plan), ("free", dataclasses.replace(plan, activations=()))):
    model = copy.deepcopy(net["model"])
    model.zero_grad()
    made.distribute(model, mesh)
    with torch.no_grad():
        model(*net["inputs"])  # what DTensor can run is found out the first time
        with CommDebugMode() as counts:
            out = model(*net["inputs"])
    again = model(*net["inputs"])
    again.square().sum().backward()
    grads = dict(net["model"].named_parameters())
    found[name] = {
        "out": float((out.full_tensor() - wanted).abs().max() / wanted.abs().max()),
        "grads": max(float((p.grad.full_tensor() - grads[n].grad).abs().max() / grads[n].grad.abs().max())
                     for n, p in model.named_parameters()),
        "counts": {str(kind).rpartition(".")[2]: n for kind, n in counts.get_comm_counts().items()},
        "notes": distribution_notes(model),
    }
print(json.dumps(found))
torch.distributed.destroy_process_group()
"""


def test_values_between_layers_are_placed_as_planned(tmp_path: Path) -> None:
    """Count the collectives: each one of the plan, and no other. A value that stays split would be gathered again."""
    (tmp_path / "net.py").write_text(PLACED)
    net = runpy.run_path(str(tmp_path / "net.py"))
    program = from_torch(net["model"], net["inputs"])
    pins = {"places": "None,model", "up.weight": "model,None", "down.weight": "None,model"}
    pins |= {argument.name: ",".join(["None"] * len(argument.shape)) for argument in program.arguments
             if argument.role == "batch"}  # fmt: skip
    plan = autoshard.plan(program, topology="cpu:2", mesh={"model": 2}, pins=pins)
    plan.save(tmp_path / "plan.json")
    planned = Counter[str]()
    for each in plan.prediction.collectives:
        planned[each.kind] += each.count
    for found in run_workers(COUNT, [str(tmp_path)]):
        for each in found.values():
            assert each["out"] < 1e-5 and each["grads"] < 1e-5 and not each["notes"]
        counts = {name: Counter(each["counts"]) for name, each in found.items()}
        assert counts["pinned"] == {KINDS[kind]: count for kind, count in planned.items()}
        assert sum(counts["free"].values()) > sum(counts["pinned"].values())


KINDS = {"all-gather": "all_gather_into_tensor", "all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter_tensor"}


GRADIENTS = """
import json, os, sys
os.environ.update(RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=sys.argv[2])
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention
from autoshard.exec.dtensor.split_ops import SplitOps
torch.distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
plain = torch.arange(8.0).reshape(4, 2)
given = distribute_tensor(plain, mesh, [Shard(0)]).requires_grad_()
with SplitOps(mesh):
    out = distribute_tensor(plain, mesh, [Shard(0)]) + (given * 3).sum()
out.sum().backward()
def attend(queries, keys):
    queries, keys = (each.view(2, 8, 4, 4).transpose(1, 2) for each in (queries, keys))
    return scaled_dot_product_attention(queries, keys, keys).square().sum()
torch.manual_seed(0)
values = [torch.randn(2, 8, 16, requires_grad=True) for _ in range(2)]
attend(*values).backward()
split = [distribute_tensor(each.detach(), mesh, [place]).requires_grad_()
         for each, place in zip(values, (Shard(2), Replicate()))]
with SplitOps(mesh):
    loss = attend(*split)
loss.backward()
away = max(float((one.grad - other.grad.full_tensor()).abs().max()) for one, other in zip(values, split))
def smoothed(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=0, label_smoothing=0.1)
logits, labels = torch.randn(8, 6, requires_grad=True), torch.arange(8) % 6
smoothed(logits, labels).backward()
for place in (Replicate(), Shard(0), Shard(1)):
    split = distribute_tensor(logits.detach(), mesh, [place]).requires_grad_()
    with SplitOps(mesh):
        loss = smoothed(split, distribute_tensor(labels, mesh, [Replicate()]))
    loss.backward()
    away = max(away, float((logits.grad - split.grad.full_tensor()).abs().max()))
norm, image = torch.nn.BatchNorm2d(4), torch.randn(4, 4, 3, 3)
means = [torch.zeros(4), torch.zeros(4)]
torch.nn.functional.batch_norm(image, means[0], torch.ones(4), norm.weight, norm.bias, True)
with SplitOps(mesh):
    for place in (Replicate(), Shard(0)):
        running = [distribute_tensor(each, mesh, [Replicate()]) for each in (torch.zeros(4), torch.ones(4))]
        split = distribute_tensor(image, mesh, [place])
        torch.nn.functional.batch_norm(split, *running, norm.weight, norm.bias, True)
        away = max(away, float((running[0].full_tensor() - means[0]).abs().max()))
print(json.dumps([given.grad.full_tensor().tolist(), away]))
torch.distributed.destroy_process_group()
"""


def test_gradients_of_split_values_are_torchs() -> None:
    """Add a sum to split values, attend by split heads of queries to whole keys, and update a batch norm."""
    for summed, away in run_workers(GRADIENTS, []):
        assert summed == [[24.0, 24.0]] * 4
        assert away < 1e-5


SELECTING = """
import json, os, sys
os.environ.update(RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=sys.argv[2])
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from autoshard.exec.dtensor.split_ops import SplitOps
torch.distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
plain = torch.arange(48.0).reshape(4, 6, 2)
found = []
for split in range(3):
    given = distribute_tensor(plain, mesh, [Shard(split)])
    modes = SplitOps(mesh)
    for dim in range(-3, 3):
        with modes:
            made = given.select(dim, 1)
        places = [place.dim if place.is_shard() else None for place in made.placements]
        found.append([split, dim % 3, torch.equal(made.full_tensor(), plain.select(dim, 1)), places])
    assert not modes.whole
with SplitOps(mesh):
    one, two = given[0, 1], given[[0, 1]]
assert torch.equal(one.full_tensor(), plain[0, 1]) and torch.equal(two.full_tensor(), plain[[0, 1]])
print(json.dumps(found))
torch.distributed.destroy_process_group()
"""


def test_what_is_selected_stays_split_over_the_other_dims() -> None:
    """Select from the end too, and by a list of numbers, which DTensor refuses, and by the same numbers as a tensor."""
    for found in run_workers(SELECTING, []):
        assert len(found) == 18
        for split, dim, equal, places in found:
            assert equal and places == [None if split == dim else split - (split > dim)]
