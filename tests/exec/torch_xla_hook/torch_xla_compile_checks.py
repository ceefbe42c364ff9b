"""Scripts for `test_torch_xla_compile.py`: `torch.compile(backend="openxla")` and inference under auto-sharding."""

import copy
from typing import Any

from tests.exec.torch_xla_hook.torch_xla_checks import Check, compiled, difference, inferences, mlp, plans, report, spec


CHECKS: dict[str, Check] = {}


def script(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def pair(width: int) -> tuple[Any, Any]:
    """Return a net on the XLA device, and the same net on the host."""
    import torch

    torch.manual_seed(0)
    plain = mlp(width)
    return copy.deepcopy(plain).to("xla"), plain


def inferred(compile_it: bool) -> dict[str, Any]:
    import torch
    import torch_xla.runtime as xr

    import autoshard.torch_xla  # noqa: F401

    xr.use_spmd(auto=True)
    model, plain = pair(1024)
    called = torch.compile(model, backend="openxla") if compile_it else model
    planned = len(plans())
    counts, most = inferences(called, plain, 1024)
    plan = plans()[-1]
    names = [name.removeprefix("_orig_mod.") for name, _ in model.named_parameters()]
    return {
        "difference": most,
        "compiles": counts,
        "plans": len(plans()) - planned,
        "held": [spec(p).startswith("{devices=") for p in model.parameters()],
        "planned": [plan.arguments[name].shards(plan.mesh) > 1 for name in names],
    }


@script
def inference() -> dict[str, Any]:
    return inferred(compile_it=False)


@script
def compiled_inference() -> dict[str, Any]:
    return inferred(compile_it=True)


@script
def compiled_layers() -> dict[str, Any]:
    """Compile equal layers for inference, call one of them twice, and return the plan's collectives."""
    import torch
    import torch_xla.runtime as xr

    import autoshard.torch_xla  # noqa: F401

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
            self.first, self.again, self.head = layer, copy.deepcopy(layer), torch.nn.Linear(128, 16)
            self.norm = torch.nn.BatchNorm1d(16)

        def forward(self, x: Any) -> Any:
            x = self.again(self.again(self.first(x)))
            return self.norm(self.head(x.mean(1)))

    xr.use_spmd(auto=True)
    plain = Layers().eval()
    called = torch.compile(copy.deepcopy(plain).to("xla"), backend="openxla")
    counts, most = inferences(called, plain, 32, 128)
    return {
        "difference": most,
        "compiles": counts,
        "mesh": plans()[-1].mesh,
        "wire": {axis: size for axis, size in plans()[-1].prediction.wire_bytes.items() if size},
    }


@script
def hosted_inside() -> dict[str, Any]:
    """Compile inference with ops inside that PyTorch/XLA computes on the host."""
    import torch

    class Hosted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x: Any) -> Any:
            y = self.first(x)
            return self.last(torch.special.bessel_j0(y) + y)

    plain = Hosted().eval()
    counts, most = inferences(torch.compile(copy.deepcopy(plain).to("xla"), backend="openxla"), plain, 64)
    return {"difference": most, "compiles": counts}


@script
def written_batch() -> dict[str, Any]:
    """Run a model that writes to its batch, after one whose plan splits batches in a way that this one cannot use."""
    import torch
    import torch_xla

    class Written(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(256)
            self.register_buffer("kept", torch.zeros(256))

        def forward(self, x: Any) -> Any:
            x.add_(1)
            y = self.inner(x)
            self.kept.mul_(0.9).add_(y.mean(0))
            y[0] = self.kept
            x.copy_(y)
            return y

    planned, found = len(plans()), []
    for plain in (mlp(256), Written().eval()):
        model = copy.deepcopy(plain).to("xla")
        for _ in range(3):
            x = torch.randn(64, 256)
            ours, theirs = x.to("xla"), x.clone()
            with torch.no_grad():
                results = model(ours), plain(theirs)
            torch_xla.sync()
            found.append(max(difference(*results), difference(ours, theirs)))
    return {"differences": found, "plans": len(plans()) - planned}


@script
def compiled_training() -> dict[str, Any]:
    import torch
    import torch_xla

    model, plain = pair(256)
    called = torch.compile(model, backend="openxla")
    pairs = [(net, torch.optim.SGD(net.parameters(), lr=0.5)) for net in (called, plain)]
    before, counts = compiled(), []
    for _ in range(5):
        x, y = torch.randn(64, 256), torch.randn(64, 256)
        for (net, updater), (a, b) in zip(pairs, ((x.to("xla"), y.to("xla")), (x, y)), strict=True):
            updater.zero_grad()
            torch.nn.functional.mse_loss(net(a), b).backward()
            updater.step()
        torch_xla.sync()
        counts.append(compiled() - before)
    x = torch.randn(64, 256)
    with torch.no_grad():
        evaluated = difference(called(x.to("xla")), plain(x))
    return {
        "difference": max(difference(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)),
        "evaluated": evaluated,
        "compiles": counts,
        "held": [spec(p).startswith("{devices=") for p in model.parameters()],
    }


@script
def running() -> dict[str, Any]:
    """Return identities of a tensor's data, requested right after a long step began."""
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    from autoshard.exec.torch_xla_hook.values.lazy_tensors import handles

    xr.use_spmd()
    value, found, kept = torch.eye(512).to("xla"), [], []
    for _ in range(5):
        for _ in range(8):
            value = torch.tanh(value @ value)
        torch_xla.sync()
        found += handles([value, value])
        kept.append(value)  # the identity of freed data may be reused
    return {"handles": found}


@script
def upstream_gradients() -> dict[str, Any]:
    """Train compiled in SPMD mode without autoshard. Compare upstream's gradients with those on the host."""
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    xr.use_spmd()
    warm = torch.ones(2, 2).to("xla").requires_grad_()
    (warm @ warm).sum().backward()
    torch_xla.sync()
    model, plain = pair(256)
    called = torch.compile(model, backend="openxla")
    found = []
    for _ in range(5):
        x = torch.randn(64, 256)
        for net, a in ((called, x.to("xla")), (plain, x)):
            net.zero_grad()
            net(a).square().mean().backward()
        torch_xla.sync()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        found.append(max(difference(p.grad, q.grad) for p, q in pairs))
    return {"differences": found}


if __name__ == "__main__":
    report(CHECKS)
