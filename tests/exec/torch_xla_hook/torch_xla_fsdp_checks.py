"""Scripts for `test_torch_xla_fsdp.py`: planned modules that `SpmdFullyShardedDataParallel` wraps."""

import copy
import functools
from typing import Any

from tests.exec.torch_xla_hook.torch_xla_checks import Check, compiled, difference, plans, report, spec


CHECKS: dict[str, Check] = {}


def script(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def block() -> Any:
    """Return the class of a residual block."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.tanh(self.up(x)))

    return Block


def wrapped(policy: str, checkpointed: bool) -> tuple[Any, Any, Any]:
    """Return a net wrapped by FSDPv2, the same net on the host, and the mesh."""
    import numpy as np
    import torch
    import torch_xla.distributed.spmd as xs
    from torch_xla.distributed.fsdp import checkpoint_module
    from torch_xla.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    kind = block()
    torch.manual_seed(0)
    plain = torch.nn.Sequential(kind(), kind(), torch.nn.Linear(64, 16))
    model = copy.deepcopy(plain)
    if checkpointed:
        for number in (0, 1):
            model[number] = checkpoint_module(model[number])
    mesh = xs.Mesh(np.arange(8), (8, 1), ("fsdp", "model"))
    policies: dict[str, Any] = {
        "none": None,
        "size": functools.partial(size_based_auto_wrap_policy, min_num_params=1000),
        "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={kind}),
    }

    def shard_output(output: Any, mesh: Any) -> None:
        xs.mark_sharding(output, mesh, ("fsdp", None))

    shown = SpmdFullyShardedDataParallel(model, mesh=mesh, shard_output=shard_output, auto_wrap_policy=policies[policy])
    return shown, plain, mesh


def trained(policy: str, checkpointed: bool) -> dict[str, Any]:
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    import autoshard.torch_xla  # noqa: F401

    xr.use_spmd(auto=True)
    model, plain, mesh = wrapped(policy, checkpointed)
    marked = [spec(p) for p in model.parameters()]
    pairs = [(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)) for net in (model, plain)]
    before, planned, counts = compiled(), len(plans()), []
    for _ in range(4):
        x, y = torch.randn(32, 64), torch.randn(32, 16)
        there = x.to("xla")
        xs.mark_sharding(there, mesh, ("fsdp", None))
        for (net, updater), (a, b) in zip(pairs, ((there, y.to("xla")), (x, y)), strict=True):
            updater.zero_grad()
            torch.nn.functional.mse_loss(net(a), b).backward()
            updater.step()
        torch_xla.sync()
        counts.append(compiled() - before)
    plan = plans()[-1]
    return {
        "difference": max(difference(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)),
        "compiles": counts,
        "plans": len(plans()) - planned,
        "marked": marked,
        "held": [spec(p) for p in model.parameters()],
        "planned": {name: str(plan.arguments[name]) for name in plan.arguments if plan.roles[name] == "parameter"},
        "kept": [s.split()[4].strip(",") for s in plan.warnings if s.startswith("your own mark on")],
        "names": [name for name, _ in plain.named_parameters()],
    }


@script
def transformer() -> dict[str, Any]:
    return trained("transformer", checkpointed=True)


@script
def size() -> dict[str, Any]:
    return trained("size", checkpointed=False)


@script
def fsdp_baseline() -> dict[str, Any]:
    """Compare the baseline `fsdp` of an offline plan with the marks of FSDPv2."""
    import torch

    from autoshard.exec import TorchPlan
    from autoshard.planning import Options, make_plan, parse_hlo_sharding
    from autoshard.program import from_torch

    model, plain, _ = wrapped("none", checkpointed=False)
    program = from_torch(plain.to("meta"), torch.empty(32, 64, device="meta"), train=True)
    planned = make_plan(program, Options(topology="cpu:8", mesh={"fsdp": 8}))
    plan = planned.baseline_plans["fsdp"]
    specs = TorchPlan(plan).specs(model)
    return {
        "marked": {n: str(parse_hlo_sharding(spec(p), p.dim(), plan.mesh)) for n, p in model.named_parameters()},
        "planned": {name: str(each) for name, each in specs.items()},
    }


if __name__ == "__main__":
    report(CHECKS)
