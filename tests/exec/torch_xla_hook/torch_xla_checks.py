"""Scripts for `test_torch_xla_hook.py`, run in processes of their own under the real torch_xla on 8 CPU devices.

`python -m tests.exec.torch_xla_hook.torch_xla_checks NAME ...` runs the named checks in one process and prints the
results of each.
"""

import copy
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any


Check = Callable[[], dict[str, Any]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def spec(tensor: Any) -> str:
    from autoshard.exec.torch_xla_hook.values.lazy_tensors import xlac

    return xlac()._get_xla_sharding_spec(tensor)


def compiled() -> int:
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0


def plans() -> list[Any]:
    from autoshard.exec import torch_xla_hook

    session = torch_xla_hook.session()
    return [] if session is None else session.plans


def mlp(width: int = 256) -> Any:
    """Build an MLP with a smooth activation: rounding decides the gradient of a ReLU at an input of nearly 0."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.Tanh(), torch.nn.Linear(4 * width, width))


def inferences(called: Any, plain: Any, *widths: int) -> tuple[list[int], float]:
    """Return the programs compiled after each of four calls, and the largest difference from the results of `plain`.

    A batch has 16 rows, each of the shape `widths`.
    """
    import torch
    import torch_xla

    before, counts, differences = compiled(), [], []
    for _ in range(4):
        x = torch.randn(16, *widths)
        with torch.no_grad():
            y = called(x.to("xla"))
        torch_xla.sync()
        counts.append(compiled() - before)
        differences.append(difference(y, plain(x)))
    return counts, max(differences)


def difference(one: Any, other: Any) -> float:
    """Return the largest difference as a fraction of the largest value."""
    one, other = one.detach().cpu().double(), other.detach().cpu().double()
    return float((one - other).abs().max() / other.abs().max())


def train(steps: int, width: int = 256, rows: int = 64, **options: Any) -> dict[str, Any]:
    """Run an ordinary loop, and the same loop without XLA."""
    import torch
    import torch_xla

    torch.manual_seed(0)
    plain = mlp(width)
    model = copy.deepcopy(plain).to("xla")
    make = options.get("optimizer", lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))
    ours, theirs = make(model.parameters()), make(plain.parameters())
    before, losses, counts, inputs = compiled(), [], [], []
    for _ in range(steps):
        x, y = torch.randn(rows, width), torch.randn(rows, width)
        batch = [x.to("xla"), y.to("xla")]
        for net, updater, (a, b) in ((model, ours, batch), (plain, theirs, [x, y])):
            updater.zero_grad()
            loss = torch.nn.functional.mse_loss(net(a), b)
            loss.backward()
            updater.step()
            losses.append(loss)
        torch_xla.sync()
        counts.append(compiled() - before)
        inputs.append([spec(value) for value in batch])
    pairs = [(losses[i].item(), losses[i + 1].item()) for i in range(0, len(losses), 2)]
    return {
        "model": model,
        "plain": plain,
        "loss_difference": max(abs(a - b) / abs(b) for a, b in pairs),
        "parameter_difference": max(
            difference(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        ),
        "compiles": counts,
        "inputs": inputs,
        "parameters": [spec(p) for p in model.parameters()],
        "states": [spec(s) for state in ours.state.values() for s in state.values() if torch.is_tensor(s) and s.dim()],
    }


def shown(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in ("model", "plain")}


@check
def auto() -> dict[str, Any]:
    """Turn auto-sharding on by its one line."""
    import torch_xla.runtime as xr

    import autoshard.torch_xla  # noqa: F401

    xr.use_spmd(auto=True)
    return {"spmd": xr.is_spmd()}


@check
def training() -> dict[str, Any]:
    run = train(6)
    plan = plans()[-1]
    return {**shown(run), "mesh": plan.mesh, "topology": plan.topology, "roles": plan.roles, "pins": len(plan.pins)}


@check
def second_model() -> dict[str, Any]:
    """Train a second model, which is planned too, and evaluate it with another batch size."""
    import torch

    run = train(3, width=128, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    before = len(plans())
    x = torch.randn(32, 128)
    outputs = []
    for _ in range(2):
        with torch.no_grad():
            outputs.append(run["model"](x.to("xla")).cpu())
    return {
        **shown(run),
        "evaluated": max(difference(out, run["plain"](x)) for out in outputs),
        "planned_for_evaluation": len(plans()) - before,
    }


@check
def matmul() -> dict[str, Any]:
    """Run a graph without modules, as PyTorch/XLA's own test of auto-sharding does."""
    import torch
    import torch_xla

    planned, differences = len(plans()), []
    for _ in range(3):
        a, b = torch.rand(64, 128), torch.rand(128, 256)  # positive, so that the sum is not close to zero
        c = (a.to("xla") @ b.to("xla")).sum()
        torch_xla.sync()
        differences.append(difference(c, (a @ b).sum()))
    return {"difference": max(differences), "plans": len(plans()) - planned}


@check
def unchanged_script() -> dict[str, Any]:
    """Set only `XLA_AUTO_SPMD=1`: momentum, dropout, autocast, and losses read before the first sync."""
    import torch
    import torch_xla

    torch.manual_seed(0)
    model = mlp()
    model.insert(2, torch.nn.Dropout(0.1))
    model = model.to("xla")
    updater = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    x, y = torch.randn(64, 256).to("xla"), torch.randn(64, 256).to("xla")
    losses, counts = [], []
    for _ in range(5):
        updater.zero_grad()
        with torch.autocast("xla", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        updater.step()
        losses.append(loss.item())
        torch_xla.sync()
        counts.append(compiled())
    return {
        "losses": losses,
        "compiles": counts,
        "plans": len(plans()),
        "parameters": [spec(p) for p in model.parameters()],
        "dtypes": sorted(set(plans()[0].dtypes.values())),
        "modules": sorted(name for name in sys.modules if name == "autoshard.torch_xla"),
    }


@check
def compiled_step() -> dict[str, Any]:
    """Run a step in `torch_xla.compile`, with smaller batches in between."""
    import torch
    import torch_xla

    torch.manual_seed(2)
    plain = mlp(64)
    model = copy.deepcopy(plain).to("xla")
    ours, theirs = (torch.optim.AdamW(net.parameters()) for net in (model, plain))

    def step(net: Any, updater: Any, x: Any, y: Any) -> Any:
        updater.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        updater.step()
        return loss

    run: Any = torch_xla.compile(lambda x, y: step(model, ours, x, y))  # pyrefly: ignore[bad-specialization]
    planned, before, counts, differences = len(plans()), compiled(), [], []
    for rows in (64, 64, 64, 32, 64, 32, 32, 64):
        x, y = torch.randn(rows, 64), torch.randn(rows, 64)
        loss, expected = run(x.to("xla"), y.to("xla")), step(plain, theirs, x, y)
        differences.append(difference(loss, expected))
        counts.append(compiled() - before)
    return {"difference": max(differences), "compiles": counts, "plans": len(plans()) - planned}


@check
def accumulation() -> dict[str, Any]:
    """Accumulate two small batches for each update, the first of them in its own graph."""
    import torch
    import torch_xla

    torch.manual_seed(1)
    plain = mlp()
    model = copy.deepcopy(plain).to("xla")
    pairs = [(net, torch.optim.SGD(net.parameters(), lr=0.5)) for net in (model, plain)]
    before, planned, counts = compiled(), len(plans()), []
    for number in range(8):
        x, y = torch.randn(32, 256), torch.randn(32, 256)
        for (net, updater), (a, b) in zip(pairs, ((x.to("xla"), y.to("xla")), (x, y)), strict=True):
            torch.nn.functional.mse_loss(net(a), b).backward()
            if number % 2:
                updater.step()
                updater.zero_grad()
        torch_xla.sync()
        counts.append(compiled() - before)
    differences = [difference(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    return {"difference": max(differences), "compiles": counts, "plans": len(plans()) - planned}


@check
def offline() -> dict[str, Any]:
    """Plan a module on the meta device, materialise it in parts, and build an input sharding for a loader."""
    import torch
    import torch_xla.distributed.parallel_loader as loader
    import torch_xla.runtime as xr

    import autoshard
    from autoshard.planning import hlo_sharding
    from autoshard.program import from_torch

    xr.use_spmd()
    with torch.device("meta"):
        model = mlp()
    inputs = torch.empty(64, 256, device="meta")
    plan = autoshard.plan(from_torch(model, inputs, train=True), topology="cpu:8", pins={"0.weight": "model,data"})
    plan.mark(model)
    host = [torch.randn(64, 256) for _ in range(2)]
    sharding = plan.input_sharding
    sent = list(loader.MpDeviceLoader(host, "xla", input_sharding=sharding))
    with torch.no_grad():
        found = model(sent[0]).cpu()
        weights = [p.detach().cpu().double() for p in model.parameters()]
        expected = torch.tanh(host[0].double() @ weights[0].T + weights[1]) @ weights[2].T + weights[3]
    return {
        "weight": spec(model[0].weight),
        "difference": difference(found, expected),
        "sent": [spec(value) for value in sent],
        "planned": [hlo_sharding(plan.arguments[n], plan.mesh) for n in plan.arguments if plan.roles[n] == "batch"],
        "mesh": str(plan.xla_mesh().shape()),
    }


@check
def early_tensors() -> dict[str, Any]:
    """Move a model to the device before SPMD mode is on."""
    import torch_xla.runtime as xr

    from autoshard import UserError

    model = mlp(8).to("xla")
    try:
        xr.use_spmd(auto=True)
    except UserError as error:
        return {"said": str(error), "parameters": len(list(model.parameters()))}
    return {"said": ""}


@check
def without_asking() -> dict[str, Any]:
    """Use SPMD without auto-sharding, which leaves PyTorch/XLA unchanged."""
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    xr.use_spmd()
    value = (torch.ones(8, 8).to("xla") @ torch.ones(8, 8).to("xla")).sum()
    torch_xla.sync()
    loaded = sorted(name for name in sys.modules if name.split(".")[0] == "autoshard")
    return {"loaded": loaded, "value": value.item(), "to": torch.Tensor.to.__qualname__}


@check
def failing() -> dict[str, Any]:
    """Replace the planner by one that fails: one warning, and the step runs replicated."""
    import torch
    import torch_xla

    from autoshard import UserError
    from autoshard.exec.torch_xla_hook.lifecycle import hook_session

    def no_plan(*_: Any, **__: Any) -> Any:
        raise UserError("there is no plan today.")

    decide, hook_session.kept_decision = hook_session.kept_decision, no_plan
    plain = mlp(16)
    model = copy.deepcopy(plain).to("xla")
    x = torch.randn(8, 16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            value = model(x.to("xla")).square().sum()
            torch_xla.sync()
    strict = ""
    os.environ["AUTOSHARD_STRICT"] = "1"
    other = mlp(8).to("xla")(torch.randn(8, 8).to("xla")).sum()
    try:
        torch_xla.sync()
    except UserError as error:
        strict = str(error)
    del os.environ["AUTOSHARD_STRICT"], other
    hook_session.kept_decision = decide
    return {
        "difference": difference(value, plain(x).square().sum()),
        "strict": strict,
        "warned": [str(w.message) for w in caught if "autoshard" in str(w.message)],
    }


def report(checks: dict[str, Check]) -> None:
    """Run the checks named on the command line, each from the same seed. Print each result as a line of JSON."""
    import torch

    warnings.simplefilter("ignore")
    for name in sys.argv[1:]:
        torch.manual_seed(0)
        print("found " + json.dumps({"name": name, **checks[name]()}), flush=True)


if __name__ == "__main__":
    report(CHECKS)
