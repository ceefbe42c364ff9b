"""State that is saved under one plan and loaded under another. Each process and device reads its own part."""

from pathlib import Path

import autoshard
from autoshard.program import trace
from tests.exec.planned_programs import handmade
from tests.exec.workers import run_workers
from tests.graph.programs import f32


WORKER = """
import json, math, os, sys
os.environ.update(RANK=sys.argv[1], WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=sys.argv[2])
import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
import autoshard
torch.distributed.init_process_group("gloo")

class Counted(checkpoint.DefaultLoadPlanner):
    def create_local_plan(self):
        plan = super().create_local_plan()
        self.read = sum(math.prod(item.lengths) * 4 for item in plan.items)
        return plan

def net(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))

def held(model):
    return {name: list(p.to_local().shape) for name, p in model.named_parameters()}

saved, loaded, expected = net(0), net(1), net(0)
one, other = (autoshard.load(name) for name in sys.argv[3:5])
one.distribute(saved, init_device_mesh("cpu", tuple(one.mesh.values()), mesh_dim_names=tuple(one.mesh)))
other.distribute(loaded, init_device_mesh("cpu", tuple(other.mesh.values()), mesh_dim_names=tuple(other.mesh)))
before = held(loaded)
checkpoint.save({"model": saved.state_dict()}, checkpoint_id=sys.argv[5])
state = {"model": loaded.state_dict()}
planner = Counted()
checkpoint.load(state, checkpoint_id=sys.argv[5], planner=planner)
loaded.load_state_dict(state["model"])
pairs = zip(loaded.parameters(), expected.parameters())
print(json.dumps({
    "saved": held(saved), "loaded": held(loaded), "kept": held(loaded) == before, "read": planner.read,
    "equal": all(bool((p.full_tensor() == q).all()) for p, q in pairs),
}))
torch.distributed.destroy_process_group()
"""


def torch_plan(path: Path, mesh: dict[str, int], specs: dict[str, str]) -> str:
    import torch

    from autoshard.program import from_torch

    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    handmade(from_torch(net, torch.zeros(8, 16), name="small"), mesh, specs, topology="cpu:2").save(path)
    return str(path)


def test_torch_state_moves_from_plan_to_plan(tmp_path: Path):
    rows = torch_plan(tmp_path / "rows.json", {"data": 2, "model": 1}, {"0.weight": "data,-", "2.weight": "data,-"})
    columns = torch_plan(tmp_path / "columns.json", {"all": 2}, {"0.weight": "-,all", "2.weight": "-,all"})
    predicted = autoshard.predict_reshard(autoshard.load(rows), autoshard.load(columns), hosts=2)
    for host, found in enumerate(run_workers(WORKER, [rows, columns, str(tmp_path / "saved")])):
        assert found["read"] == predicted.read_bytes[host] < predicted.whole_bytes
        assert found["equal"] and found["kept"]
        assert found["saved"] == {"0.weight": [16, 16], "0.bias": [32], "2.weight": [4, 32], "2.bias": [8]}
        assert found["loaded"] == {"0.weight": [32, 8], "0.bias": [32], "2.weight": [8, 16], "2.bias": [8]}


def test_jax_state_moves_from_plan_to_plan(tmp_path: Path):
    from autoshard.exec import ensure_devices

    ensure_devices(8)
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    from tests.exec import planned_programs as made

    program = made.mlp()
    one = handmade(program, {"data": 4, "model": 2}, {"params.up": "-,model", "params.down": "model,-"})
    other = handmade(program, {"all": 8}, {"params.up": "all,-", "params.down": "-,all"})
    host = program.make_args(0)[0]
    saved = jax.device_put(host, one.jit(program.fn).shardings(*program.make_args(0))[0])
    wanted = other.jit(program.fn).shardings(*program.make_args(0))[0]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", saved)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), saved, wanted)
        loaded = checkpointer.restore(tmp_path / "saved", abstract)
    for name in ("up", "down"):
        assert (np.asarray(loaded[name]) == np.asarray(host[name])).all()
        assert loaded[name].sharding == wanted[name] and loaded[name].sharding != saved[name].sharding
        assert {shard.data.size for shard in loaded[name].addressable_shards} == {host[name].size // 8}


def test_what_moving_state_takes_is_predicted_exactly(tmp_path: Path):
    """Count the elements that each device receives: every element has a unique value."""
    from autoshard.exec import ensure_devices

    ensure_devices(8)
    import jax
    import numpy as np

    from tests.exec import planned_programs as made

    program = made.mlp()
    one = handmade(program, {"data": 4, "model": 2}, {"params.up": "-,model", "params.down": "model,data"})
    two = handmade(program, {"data": 2, "model": 4}, {"params.up": "data,model", "params.down": "model,data"})
    found = autoshard.predict_reshard(one, two, hosts=2, disk_bytes_per_s=1e9)
    host = jax.tree.map(lambda x: np.arange(x.size, dtype=np.int32).reshape(x.shape), program.make_args(0)[0])
    old, new = (plan.jit(program.fn).shardings(*program.make_args(0))[0] for plan in (one, two))
    held, received = np.zeros(8, int), np.zeros(8, int)
    read: list[dict[bytes, int]] = [{}, {}]
    for name in found.names:
        leaf = name.removeprefix("params.")
        before = jax.device_put(host[leaf], old[leaf])
        after = jax.device_put(before, new[leaf])
        there = {shard.device.id: np.asarray(shard.data) for shard in before.addressable_shards}
        for shard in after.addressable_shards:
            values, device = np.asarray(shard.data), shard.device.id
            held[device] += values.nbytes
            received[device] += np.setdiff1d(values, there[device]).size * 4
            read[device // 4][name.encode() + values.tobytes()] = values.nbytes
    assert set(found.names) == {"params.up", "params.down"} and not found.left_out
    assert list(found.after_bytes) == list(held)
    assert list(found.received_bytes) == list(received) and 0 < sum(received) < sum(held)
    assert list(found.read_bytes) == [sum(each.values()) for each in read]
    assert found.disk_s == max(found.read_bytes) / 1e9
    whole = sum(x.nbytes for x in jax.tree.leaves(host))
    assert found.whole_bytes == whole and found.largest_read_bytes < found.largest_bytes
    assert max(found.before_bytes) < max(found.peak_bytes) < max(found.before_bytes) + max(found.after_bytes)


def test_a_scalar_is_read_by_the_devices_of_the_plan():
    """Load onto every other device, so that the first device of each host is outside the plan."""
    program = trace(
        lambda state, x: (state["scale"] * 0.9, x * state["scale"]), ({"scale": f32()}, f32(8, 16)), name="scale"
    )
    one = handmade(program, {"data": 8}, {})
    two = handmade(program, {"data": 4}, {}, device_order=(1, 3, 5, 7))
    found = autoshard.predict_reshard(one, two, hosts=2)
    assert list(found.after_bytes) == [0, 4] * 4 and list(found.read_bytes) == [4, 4]
