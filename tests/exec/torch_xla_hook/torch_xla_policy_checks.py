"""Scripts for `test_torch_xla_policy.py`: PyTorch/XLA's other entry points of auto-sharding, and its own test."""

from typing import Any

from tests.exec.torch_xla_hook.torch_xla_checks import check, compiled, difference, mlp, plans, report, spec


CHECKS = {}


def script(function: Any) -> Any:
    CHECKS[function.__name__] = check(function)
    return function


def refused(call: Any) -> str:
    from autoshard import UserError

    try:
        call()
    except UserError as error:
        return str(error)
    return ""


def device_mesh(*sizes: int, names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("xla", sizes, mesh_dim_names=names)


def steps(model: Any) -> dict[str, Any]:
    """Train a module and its copy on the host for three steps: the planned one and two with its pins."""
    import copy

    import torch
    import torch_xla

    plain = copy.deepcopy(model).to("cpu")
    pairs = [(net, torch.optim.SGD(net.parameters(), lr=0.5)) for net in (model, plain)]
    differences = []
    for _ in range(3):
        x, y = torch.randn(64, 256), torch.randn(64, 256)
        for (net, updater), (a, b) in zip(pairs, ((x.to("xla"), y.to("xla")), (x, y)), strict=True):
            updater.zero_grad()
            torch.nn.functional.mse_loss(net(a), b).backward()
            updater.step()
        torch_xla.sync()
        both = zip(model.parameters(), plain.parameters(), strict=True)
        differences += [difference(p, q) for p, q in both]
    return {
        "difference": max(differences),
        "mesh": plans()[-1].mesh,
        "parameters": [spec(p) for p in model.parameters()],
    }


@script
def our_policy() -> dict[str, Any]:
    """Plan by `autoshard.auto_policy`, for the mesh that it is given."""
    from torch.distributed.tensor import distribute_module

    import autoshard

    given = mlp()
    model: Any = distribute_module(given, device_mesh(2, 4, names=("x", "y")), autoshard.auto_policy)
    return {"same": model is given, **steps(model)}


@script
def their_policy() -> dict[str, Any]:
    """Plan by PyTorch/XLA's own `auto_policy`, in a process that has used ours."""
    from torch.distributed.tensor import distribute_module
    from torch_xla.distributed.spmd import auto_policy

    import autoshard.torch_xla

    model: Any = distribute_module(mlp(), device_mesh(8), auto_policy)
    autoshard.torch_xla.session().mesh = None
    return steps(model)


@script
def distributed_tensor() -> dict[str, Any]:
    """Split a batch by `distribute_tensor`: the split stays, as a mark of the user's."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    model = mlp(64).to("xla")
    planned, differences, batches = len(plans()), [], []
    for _ in range(3):
        batch: Any = distribute_tensor(torch.randn(16, 64), device_mesh(2, 4), [Replicate(), Shard(0)])
        with torch.no_grad():
            found = model(batch).cpu()
            weights = [parameter.cpu() for parameter in model.parameters()]
            x = batch.global_tensor.cpu()
            expected = torch.tanh(x @ weights[0].T + weights[1]) @ weights[2].T + weights[3]
        differences.append(difference(found, expected))
        batches.append(batch)
    return {
        "difference": max(differences),
        "batch": spec(batches[0].global_tensor),
        "shards": [list(shard.data.shape) for shard in batches[0].local_shards],
        "warnings": plans()[planned].warnings,
    }


@script
def wrong_policies() -> dict[str, Any]:
    import os

    from torch.distributed.tensor import distribute_module

    import autoshard
    from autoshard.exec.torch_xla_hook import plan_first_step

    class Other:
        device_type = "cpu"

    from autoshard.exec.torch_xla_hook.planning.runtime_topology import mesh_here

    os.environ["XLA_AUTO_SPMD_MESH"] = "3,2"
    few = refused(mesh_here)
    os.environ["XLA_AUTO_SPMD_MESH"] = "4,2"
    said = {
        "few": few,
        "mesh": refused(lambda: distribute_module(mlp(8), device_mesh(2, 4), autoshard.auto_policy)),
        "device": refused(lambda: plan_first_step("", mlp(8), Other())),
    }
    moved = mlp(8).to("xla")
    said["moved"] = refused(lambda: distribute_module(moved, device_mesh(2, 4), autoshard.auto_policy))
    return said


@script
def searched_mesh() -> dict[str, Any]:
    """Set `XLA_AUTO_SPMD_MESH=auto`: later models reuse the mesh of the first step."""
    import torch_xla.runtime as xr

    import autoshard.torch_xla

    xr.use_spmd(auto=True)
    first = steps(mlp().to("xla"))
    second = steps(mlp().to("xla"))
    session = autoshard.torch_xla.session()
    return {**first, "second": second["mesh"], "kept": None if session is None else session.mesh}


@script
def upstream_matmul() -> dict[str, Any]:
    """Repeat the checks of PyTorch/XLA's test on a product, and check that its mesh is the planned one."""
    import torch
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    xr.use_spmd(auto=True)
    a, b = torch.ones(64, 128), torch.ones(128, 256)
    before = compiled()
    c = (a.to("xla") @ b.to("xla")).sum()
    xm.mark_step()
    plan = plans()[-1]
    return {
        "close": bool(torch.allclose((a @ b).sum(), c.cpu())),
        "compiles": compiled() - before,
        "mesh": plan.mesh,
        "split": [bool(s.shards(plan.mesh) > 1) for s in plan.arguments.values() if s.dims],
    }


@script
def upstream_training() -> dict[str, Any]:
    """Repeat the checks of PyTorch/XLA's test on five steps of a net with one output column and a cross entropy."""
    import torch
    import torch_xla.core.xla_model as xm

    net = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to("xla").train()
    updater = torch.optim.SGD(net.parameters(), lr=0.1)
    data, target = torch.randn(128, 128).to("xla"), torch.zeros(128).to("xla")
    before, counts = compiled(), []
    for _ in range(5):
        updater.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(data).squeeze(1), target)
        loss.backward()
        updater.step()
        xm.mark_step()
        counts.append(compiled() - before)
    return {
        "compiles": counts,
        "data": spec(data),
        "parameters": [spec(p) for p in net.parameters()],
        "warnings": plans()[-1].warnings,
    }


if __name__ == "__main__":
    report(CHECKS)
