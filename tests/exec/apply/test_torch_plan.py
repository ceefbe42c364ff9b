"""Plans on torch modules: specs by parameter, DTensors over two processes, batches for JAX."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import UserError
from autoshard.exec import placements_of, spec_of_placements
from autoshard.planning import Spec
from tests.exec.planned_programs import handmade
from tests.exec.workers import run_workers


def module_plan(mesh: dict[str, int], specs: dict[str, str]):
    """Return a small torch module and a plan for it with given specs."""
    import torch

    from autoshard.program import from_torch

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    program = from_torch(model, torch.zeros(8, 16), name="small")
    return model, handmade(program, mesh, specs)


MESH = {"data": 2, "model": 1}
SPECS = {"0.weight": "data,-", "0.bias": "data", "2.weight": "-,data"}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(-1, 3), min_size=1, max_size=3))
def test_placements_round_trip(rank: int, where: list[int]):
    mesh = {f"a{number}": 2 for number in range(len(where))}
    dims: list[tuple[str, ...]] = [()] * rank
    for axis, dim in zip(mesh, where, strict=True):
        if 0 <= dim < rank:
            dims[dim] += (axis,)
    spec = Spec(tuple(dims))
    assert spec_of_placements(placements_of(spec, mesh, "x"), rank, mesh) == spec


def test_an_order_that_dtensor_has_not():
    with pytest.raises(UserError) as error:
        placements_of(Spec((("b", "a"),)), {"a": 2, "b": 2}, "weight")
    assert "`weight` is split as */b/a" in str(error.value) and "other order" in str(error.value)


def test_specs_by_parameter():
    import torch

    from autoshard.exec import TorchPlan

    model, plan = module_plan(MESH, SPECS)
    assert TorchPlan(plan).specs(model)["2.weight"] == Spec(((), ("data",)))
    with pytest.raises(UserError) as error:
        TorchPlan(plan).specs(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    assert "parameter `0.weight` is of shape [4, 4], but the plan for small has [32, 16]" in str(error.value)
    with pytest.raises(UserError) as error:
        TorchPlan(plan).specs(torch.nn.Linear(4, 4))
    assert "the plan for small has no parameter `weight`" in str(error.value)


WORKER = """
import json, os, sys
os.environ.update(RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=sys.argv[2])
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
import autoshard
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
plan = autoshard.load(sys.argv[3])
mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
inputs = torch.randn(8, 16)
expected = model(inputs)
plan.distribute(model, mesh)
given = distribute_tensor(inputs, mesh, [Replicate(), Replicate()])
found = model(given).full_tensor()
print(json.dumps({
    "local": {name: list(p.to_local().shape) for name, p in model.named_parameters()},
    "difference": float((found - expected).detach().abs().max()),
}))
torch.distributed.destroy_process_group()
"""


def test_dtensors_over_two_processes(tmp_path: Path):
    module_plan(MESH, SPECS)[1].save(tmp_path / "plan.json")
    for found in run_workers(WORKER, [str(tmp_path / "plan.json")]):
        assert found["local"] == {"0.weight": [16, 16], "0.bias": [16], "2.weight": [8, 16], "2.bias": [8]}
        assert found["difference"] < 1e-5


def test_a_batch_is_sent_in_parts():
    import numpy as np

    from autoshard.exec import ensure_devices

    ensure_devices(8)
    from tests.exec import planned_programs as made

    plan = handmade(made.mlp(), {"data": 4, "model": 2}, {"arg1": "data,-", "arg2": "data,-"})
    names = [name for name in plan.arguments if plan.roles[name] == "batch"]
    host = [np.arange(np.prod(plan.shapes[name]), dtype=np.float32).reshape(plan.shapes[name]) for name in names]
    placed = plan.shard_batch(tuple(host))
    for value, array in zip(host, placed, strict=True):
        assert (np.asarray(array) == value).all()
        assert {shard.data.shape[0] for shard in array.addressable_shards} == {value.shape[0] // 4}
    with pytest.raises(UserError) as error:
        plan.shard_batch((host[0][:2],))
    assert "the batch has arrays of shapes [2, " in str(error.value)


def test_batches_are_sent_ahead():
    import numpy as np

    from autoshard.exec import ensure_devices

    ensure_devices(8)
    from tests.exec import planned_programs as made

    plan = handmade(made.mlp(), {"data": 4, "model": 2}, {"arg1": "data,-", "arg2": "data,-"})
    shapes = [plan.shapes[name] for name in plan.arguments if plan.roles[name] == "batch"]
    read: list[int] = []

    def batches():
        for number in range(5):
            read.append(number)
            yield tuple(np.full(shape, number, np.float32) for shape in shapes)

    for number, batch in enumerate(plan.load_batches(batches(), ahead=3)):
        assert read[-1] == min(number + 2, 4)
        assert all((np.asarray(array) == number).all() for array in batch)
        assert {shard.data.shape[0] for array in batch for shard in array.addressable_shards} == {shapes[0][0] // 4}
    assert read == [0, 1, 2, 3, 4]
    with pytest.raises(UserError) as error:
        list(plan.load_batches([], ahead=0))
    assert "ahead=0" in str(error.value)
