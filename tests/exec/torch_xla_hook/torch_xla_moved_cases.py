"""Scripts for `test_torch_xla_moved.py`: ops that move, pool or sum values along a dim that is split."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from tests.exec.torch_xla_hook.torch_xla_modes import Case, Script


STEPS = 4
ROWS = 64


def _along(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply an op of the last dim to dim 1, the sequence of a value. Cut the result to the value's rows."""
    made = function(value.transpose(1, 2)).transpose(1, 2)
    rest = value.shape[1] - made.shape[1]
    return functional.pad(made, (0, 0, 0, rest)) if rest > 0 else made[:, : value.shape[1]]


OPS: dict[str, Callable[[Any], Any]] = {
    "shift": lambda h: functional.pad(h, (0, 0, 1, -1)),
    "shift_back": lambda h: functional.pad(h, (0, 0, -3, 3), value=0.5),
    "cut": lambda h: functional.pad(functional.pad(h, (0, 0, -2, -2)), (0, 0, 2, 2)),
    "longer": lambda h: functional.pad(h, (0, 0, 9, -1))[:, :ROWS],
    "shorter": lambda h: functional.pad(functional.pad(h, (0, 0, 1, -9)), (-1, 1, 0, 8)),
    "joined": lambda h: torch.cat([torch.ones_like(h[:, :1]), h[:, :-1]], 1),
    "rolled": lambda h: torch.roll(h, 3, 1),
    "flipped": lambda h: h.flip(1),
    "sorted": lambda h: h.sort(1).values,
    "summed": lambda h: h.cumsum(1) / ROWS,
    "windows": lambda h: _along(lambda t: t.unfold(2, 4, 1).sum(-1), h),
    "reflected": lambda h: _along(lambda t: functional.pad(t, (2, 1), mode="reflect"), h),
    "circular": lambda h: _along(lambda t: functional.pad(t, (2, 1), mode="circular"), h),
    "replicated": lambda h: _along(lambda t: functional.pad(t, (2, 1), mode="replicate"), h),
    "convolved": lambda h: _along(lambda t: functional.conv1d(t, t.new_ones(32, 32, 3) / 96, padding=1), h),
    "largest": lambda h: _along(lambda t: functional.max_pool1d(t, 3, 1, 1), h),
    "largest_ceil": lambda h: _along(lambda t: functional.max_pool1d(t, 3, 2, 1, ceil_mode=True), h),
    "mean": lambda h: _along(lambda t: functional.avg_pool1d(t, 3, 1, 1, count_include_pad=False), h),
    "mean_ceil": lambda h: _along(lambda t: functional.avg_pool1d(t, 3, 2, 1, True, False), h),
}
"""Ops along the sequence of a value of batch, sequence and features."""


class Along(nn.Module):
    """Sum of the results of some ops on projections of a sequence, between two layers."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.ins = nn.ModuleList(nn.Linear(32, 32) for _ in names)
        self.out = nn.Linear(32, 8)

    def forward(self, x: Any) -> Any:
        made = [OPS[name](layer(x)) for name, layer in zip(self.names, self.ins, strict=True)]
        return self.out(torch.tanh(torch.stack(made).sum(0)))


def _along_sequence(names: list[str], script: Script) -> None:
    model = Along(names).to(script.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(1, ROWS, 32, generator=generator).to(script.device)
        y = torch.randint(0, 8, (1, ROWS), generator=generator).to(script.device)
        script.mark(x, (None, "data", None))
        script.mark(y, (None, "data"))
        output = model(x)
        loss = functional.cross_entropy(output.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        script.sync()
        script.log("loss", loss)
        script.log("output", output)
    script.log_state("model", model)


POOLS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda h: functional.avg_pool2d(h, 3, 2, 1, count_include_pad=False),
    "mean_ceil": lambda h: functional.avg_pool2d(h, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "mean_padded": lambda h: functional.avg_pool2d(h, 3, 2, 1),
    "largest": lambda h: functional.max_pool2d(h, 3, 2, 1, ceil_mode=True),
    "adaptive": lambda h: functional.adaptive_avg_pool2d(h, 4),
    "shifted": lambda h: functional.pad(h, (1, -1, -1, 1)),
}


class Images(nn.Module):
    """Two blocks of a convolution, a norm and all pools, whose means are classified."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.convs = nn.ModuleList([nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)])
        self.norms = nn.ModuleList([nn.GroupNorm(4, 16), nn.GroupNorm(4, 16)])
        self.out = nn.Linear(16, 8)

    def forward(self, x: Any) -> tuple[Any, list[Any]]:
        pooled = []
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = functional.gelu(norm(conv(x)))
            pooled += [POOLS[name](x) for name in self.names]
            x = pooled[0]
        features = torch.stack([each.mean((2, 3)) for each in pooled]).sum(0)
        return self.out(features), pooled


def _of_images(names: list[str], script: Script) -> None:
    model = Images(names).to(script.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 4, 16, 16, generator=generator).to(script.device)
        y = torch.randint(0, 8, (16,), generator=generator).to(script.device)
        output, pooled = model(x)
        loss = functional.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        script.sync()
        script.log("loss", loss)
        for value in pooled:
            script.log("pooled", value)
    script.log_state("model", model)


class Masked(nn.Module):
    """Two layers, and between them a mask that is moved to the dtype and device of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x).relu()
        return self.last(hidden * (hidden.sum(1, keepdim=True) > 1).to(hidden))


def mask_like_value(script: Script) -> None:
    model = Masked().to(script.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = model(torch.randn(32, 16, generator=torch.Generator().manual_seed(step)).to(script.device)).square()
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        script.sync()
        losses.append(loss.detach())
    for loss in losses:
        script.log("loss", loss.to(torch.empty(0)))
    script.log_state("model", model)


def edges(script: Script) -> None:
    """Pad a small matrix: cut, add, both, and cut more than it has."""
    values = torch.arange(12).reshape(3, 4).to(script.device)
    for low, high in itertools.product((-5, -2, 0, 1), (-5, -1, 0, 3)):
        try:
            script.log(f"{low} {high}", functional.pad(values, (low, high, 1, -1), value=7))
        except RuntimeError:
            script.log(f"{low} {high} refused", torch.zeros(1))


CASES: dict[str, Case] = {
    "edges": edges,
    "mask_like_value": mask_like_value,
    **{f"{name}_beside_flip": functools.partial(_along_sequence, [name, "flipped"]) for name in OPS},
    **{name: functools.partial(_along_sequence, [name]) for name in OPS},
    "all_along": functools.partial(_along_sequence, [name for name in OPS if name != "largest"]),
    "pools": functools.partial(_of_images, [*POOLS]),
    "mean_pool": functools.partial(_of_images, ["mean"]),
}
