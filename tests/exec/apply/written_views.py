"""Forms of writes to views, and a script of processes that compares each form under a plan with eager torch."""

import contextlib
import copy
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autoshard


def assigned(h: Any, m: Any) -> None:
    h[:, -1, :16] = 0


def doubled(h: Any, m: Any) -> None:
    h[:, 0] *= 2


def strided(h: Any, m: Any) -> None:
    h[..., ::2] += 1


def each_row(h: Any, m: Any) -> None:
    for number, row in enumerate(h.transpose(0, 1)):
        if number % 3 == 0:
            row.mul_(0.5)


def view_after(h: Any, m: Any) -> Any:
    """Read a view that was made before a write to its base."""
    part = h[:, 2:4]
    h.mul_(3.0)
    return part.sum()


def view_beside(h: Any, m: Any) -> Any:
    """Read a view that overlaps another one, which is written to."""
    flat, part = h.view(-1, 64), h.transpose(1, 2)
    flat[3:9].add_(1.0)
    return part[:, :7].sum() + flat.mean()


def no_base(h: Any, m: Any) -> Any:
    """Write to one of two views of a tensor that nothing holds any more."""
    one, two = (lambda t: (t[:, 1:5], t[:, 3:]))(h * 2)
    one.mul_(3.0)
    return two.square().mean()


def nested(h: Any, m: Any) -> None:
    h.view(16, 8, 4, 16).permute(0, 2, 1, 3)[:, 1, 2:5].unsqueeze(1)[..., 3:].squeeze(1).mul_(2.0)


def detached(h: Any, m: Any) -> None:
    h.detach()[:, 2].mul_(2.0)
    h.data[:, 3, :5] = 1.0


def frozen(h: Any, m: Any) -> None:
    with torch.no_grad():
        h[:, 1].add_(1.0)


def parameter(h: Any, m: Any) -> None:
    with torch.no_grad():
        m.a.weight[:4].mul_(0.5)
        m.b.bias.data[::2].add_(0.25)
        m.b.weight.T[1:3].clamp_(-0.01, 0.01)


def owned(h: Any, m: Any) -> Any:
    m.kept = h * 1
    m.kept += 1
    m.kept[:, 1] -= 2
    part = m.kept[:, 1]
    return part.sum() + m.kept.square().mean()


def buffer(h: Any, m: Any) -> Any:
    m.seen[2:5].copy_(h.detach().sum((0, 1))[2:5])
    m.seen += 1
    return (h * m.seen).mean()


def out(h: Any, m: Any) -> Any:
    with torch.no_grad():
        a = torch.zeros_like(h)
        torch.mul(h, 2.0, out=a)
        part = a[:, 3]
        torch.add(h[:, 1], 1.0, out=part)
    return (h * a).mean()


def zeros(h: Any, m: Any) -> Any:
    z = torch.zeros_like(h)
    z[:, 1:3].add_(h[:, 2:4])
    z.transpose(1, 2)[:, ::3].mul_(2.0)
    return (z * h).mean()


def plain(h: Any, m: Any) -> Any:
    z = torch.zeros(16, 8, 64, dtype=torch.float64)
    z[:, 3].add_(h[:, 2])
    return (z * h).mean()


def complex_parts(h: Any, m: Any) -> Any:
    c = torch.view_as_complex(h.reshape(16, 8, 32, 2) * 1)
    c.real.mul_(2.0)
    c.imag[:, 2].zero_()
    return torch.view_as_real(c).square().mean()


def as_complex(h: Any, m: Any) -> Any:
    pairs = h.view(16, 8, 32, 2)
    torch.view_as_complex(pairs).mul_(1j)
    return pairs[..., 0].sum()


def in_autograd(h: Any, m: Any) -> Any:
    """Run in-place activations one after another; some save their input or result."""
    y = F.silu(h * 1, inplace=True)
    return F.dropout(F.hardtanh(y, -1.0, 0.5, True), 0.5, False, True).mean()


def evaluated(h: Any, m: Any) -> Any:
    """Write to what dropout returns in evaluation: its input, or a tensor in its memory."""
    y = F.dropout(h, 0.1, False)
    y[:, 1].mul_(2.0)
    return y.mean()


def contiguous(h: Any, m: Any) -> Any:
    y = h.transpose(1, 2).contiguous()  # a copy
    y.mul_(2.0)
    h.contiguous()[:, 1].mul_(0.5)  # none
    return y.square().mean()


def reshaped(h: Any, m: Any) -> Any:
    y = h.transpose(1, 2).reshape(16, -1)  # a copy
    y.zero_()
    h.reshape(128, 64)[:, 1].mul_(0.5)
    return y.sum()


def expanded(h: Any, m: Any) -> Any:
    wide = h[:, :1].expand(16, 8, 64)
    h[:, 0, 3:9].mul_(2.0)
    return (wide * h).mean()


def windows(h: Any, m: Any) -> Any:
    seen = h.unfold(1, 3, 1)
    h[:, 2:4].mul_(2.0)
    return (seen * seen).mean()


def aliased(h: Any, m: Any) -> None:
    h[:, 1].copy_(h[:, 2] * 2)
    h[:, 3].add_(h[:, 1] * 1)
    h.mul_(h * 1)


def without_gradient(h: Any, m: Any) -> Any:
    y = (h * 2).detach_().requires_grad_(False)
    y[:, 1].mul_(2.0)
    return (y * h).mean()


def typed(h: Any, m: Any) -> Any:
    z = torch.zeros(16, 8, 64, dtype=torch.float64)
    y = z.type_as(h)  # the same memory
    y[:, 2].add_(h[:, 1])
    z[:, 3] = 2.0
    z.add_(1.0)
    return (z * h).mean() + (y * y).mean()


def renormed(h: Any, m: Any) -> Any:
    return F.embedding(torch.tensor([1, 5]), m.a.weight, max_norm=0.1).sum()


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "zero_ of a slice": lambda h, m: h[:, -1, :16].zero_().sum(),
    "zero_ of a row": lambda h, m: h[:, 3].zero_().sum(),
    "zero_ of columns": lambda h, m: h[..., :16].zero_().sum(),
    "zero_ of examples": lambda h, m: h[2:11].zero_().sum(),
    "fill_": lambda h, m: h[:, 3].fill_(2.0).sum(),
    "mul_": lambda h, m: h[:, -1, :16].mul_(0.3).sum(),
    "add_": lambda h, m: h[:, -1, :16].add_(1.0).sum(),
    "copy_": lambda h, m: h[:, 3].copy_(h[:, 2].detach() * 2).sum(),
    "masked_fill_": lambda h, m: h[:, 3].masked_fill_(h[:, 3].detach() > 0, 0.0).sum(),
    "exp_": lambda h, m: h[:, 3].exp_().sum(),
    "relu_": lambda h, m: torch.relu_(h[:, 3]).sum(),
    "clamp_": lambda h, m: h[:, 3].clamp_(-0.1, 0.1).sum(),
    "lerp_": lambda h, m: h[:, 3].lerp_(h[:, 4], 0.3).sum(),
    "transposed": lambda h, m: h.transpose(1, 2)[:, :5].add_(1.0).sum(),
    "T": lambda h, m: h[3].T[2:].mul_(2.0).sum(),
    "select": lambda h, m: h.select(1, 2).mul_(3.0).sum(),
    "narrow": lambda h, m: h.narrow(2, 5, 30).mul_(3.0).sum(),
    "diagonal": lambda h, m: h.diagonal(0, 1, 2).mul_(3.0).sum(),
    "movedim": lambda h, m: h.movedim(0, 2)[1].mul_(3.0).sum(),
    "unflatten": lambda h, m: h.unflatten(-1, (4, 16))[:, :, 1].mul_(3.0).sum(),
    "flatten": lambda h, m: h.flatten(1)[:, 70:99].mul_(3.0).sum(),
    "whole view": lambda h, m: h.view(-1, 64).mul_(0.5).sum(),
    "index_fill_": lambda h, m: h[:, 3].index_fill_(1, torch.tensor([0, 5]), 0.5).sum(),
    "index_add_": lambda h, m: h[:, 3:5].index_add_(2, torch.tensor([0, 5]), h[:, :2, :2].detach() + 1).sum(),
    "scatter_": lambda h, m: h[:, 3].scatter_(1, torch.zeros(16, 1, dtype=torch.long), 2.0).sum(),
    "index_put_": lambda h, m: h[:, 3].index_put_((torch.tensor([0, 3]),), h[0, 0, 0] + 1).sum(),
    "relu in place": lambda h, m: F.relu(h[:, 1], inplace=True).sum(),
    "leaky relu": lambda h, m: F.leaky_relu(h, 0.1, True).sum(),
    "elu": lambda h, m: F.elu(h[..., 5:], inplace=True).sum(),
    "nothing but a sum": lambda h, m: h.sum(),
    "module": lambda h, m: nn.Sequential(nn.ReLU6(inplace=True), nn.Hardswish(inplace=True))(h[:, 1:]).sum(),
    "named": lambda h, m: torch.relu_(input=h[:, 1]).sum(),
} | {each.__name__: each for each in (
    assigned, doubled, strided, view_after, view_beside, no_base, nested, detached, frozen, parameter, owned,
    buffer, out, zeros, plain, complex_parts, as_complex, in_autograd, evaluated, contiguous, reshaped, expanded,
    windows, aliased, without_gradient, typed,
)}  # fmt: skip
UNTRACKED: dict[str, Callable[[Any, Any], Any]] = {
    "unbind": lambda h, m: h.unbind(1)[2].mul_(3.0).sum(),
    "chunk": lambda h, m: h.chunk(2, -1)[1].zero_().sum(),
    "split": lambda h, m: h.split([16, 48], -1)[0].tanh_().sum(),
    "tensor_split": lambda h, m: h.tensor_split(3, 1)[1].tanh_().sum(),
    "each_row": each_row,
    "renormed": renormed,
}
"""Writes that eager torch refuses where it needs gradients."""


class Writes(nn.Module):
    """Two layers, between which a form writes to views of the value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("seen", torch.linspace(0, 1, 64), persistent=False)
        self.form: Callable[[Any, Any], Any] | None = None

    def forward(self, x: Any) -> Any:
        h = self.a(x)
        more = None if self.form is None else self.form(h, self)
        y = self.b(h * 1.5) if more is None else self.b(h * 1.5) + more
        return y.sin()


def made() -> tuple[Writes, Any]:
    """Return the module and its input."""
    torch.manual_seed(0)
    return Writes().double(), torch.randn(16, 8, 32, dtype=torch.float64)


def difference(found: Any, wanted: Any) -> float:
    """Return the largest difference of values, relative to the largest value."""
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max().clamp_min(1e-6))


def run_form(model: Any, x: Any, grad: bool) -> tuple[Any, list[Any], list[Any]]:
    """Return the output, the gradients of parameters, and their values."""
    with contextlib.nullcontext() if grad else torch.no_grad():
        y = model(x)
    if grad:
        y.square().mean().backward()
    return y, [p.grad for p in model.parameters() if grad], [p.data for p in model.parameters()]


def split(model: Writes, x: Any, path: Path) -> Any:
    """Distribute a module by a plan, or by its export, and return the input for it."""
    if path.suffix == ".json":
        plan = autoshard.load(path)
        mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
        plan.distribute(model, mesh, gather_outputs=True)
        return x
    code = runpy.run_path(str(path))
    mesh = code["make_mesh"]("cpu")
    code["distribute"](model, mesh)
    return code["distribute_inputs"](mesh, x=x)["x"]


def main(rank: str, port: str, count: str, folder: str, names: str, grads: str) -> None:
    """Print the largest difference of each form, or its error, with each plan and export of a folder."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://localhost:{port}", rank=int(rank), world_size=int(count)
    )
    found: dict[str, Any] = {}
    both = FORMS | UNTRACKED
    cases = [(name, bool(int(g))) for name in names.split(",") if name for g in grads] or [
        (name, grad) for name in both for grad in (True, False) if name in FORMS or not grad
    ]
    for path in sorted(Path(folder).iterdir()):
        for name, grad in cases:
            model, x = made()
            model.form = both[name]
            eager = copy.deepcopy(model)
            key = f"{path.name}: {name}{'' if grad else ', no_grad'}"
            y, gradients, parameters = run_form(eager, x, grad)
            try:
                z, others, values = run_form(model, split(model, x, path), grad)
            except Exception as error:  # the report of a form names its failure
                found[key] = f"{type(error).__name__}: {str(error)[:600]}"
                continue
            pairs = zip([z, *others, *values], [y, *gradients, *parameters], strict=True)
            found[key] = max(difference(a, b) for a, b in [*pairs, (model.seen, eager.seen)])
    print("\n" + json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()
