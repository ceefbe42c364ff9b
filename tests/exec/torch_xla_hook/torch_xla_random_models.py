"""Random trees of modules for `torch_xla_random_scripts.py`: layers that mix, share, count and write in place."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn


WORDS, CLASSES, HEADS = 40, 8, 4


class Residual(nn.Module):
    """Two layers with a residual connection."""

    def __init__(self, width: int, hidden: int, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.act = (
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
            act,
        )

    def forward(self, x: Any) -> Any:
        return x + self.down(self.act(self.up(self.norm(x))))


class Attention(nn.Module):
    """Attention among the parts of a row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.part = width // HEADS
        self.qkv, self.out = nn.Linear(self.part, 3 * self.part), nn.Linear(self.part, self.part, bias=False)

    def forward(self, x: Any) -> Any:
        parts = x.reshape(-1, HEADS, self.part)
        q, k, v = self.qkv(parts).chunk(3, -1)
        mixed = torch.softmax(q @ k.transpose(1, 2) / self.part**0.5, -1) @ v
        return x + self.out(mixed).flatten(1)


class Mixed(nn.Module):
    """A convolution along a row, in channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(HEADS, HEADS, 3, padding=1)
        self.width = width

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.convolution(x.view(-1, HEADS, self.width // HEADS))).flatten(1)


class Counted(nn.Module):
    """A scale that counts its calls and follows the mean of its inputs, by writes in place."""

    def __init__(self, width: int, way: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.calls: torch.Tensor
        self.mean: torch.Tensor
        self.register_buffer("calls", torch.zeros(3))
        self.register_buffer("mean", torch.zeros(width))
        self.way = way

    def forward(self, x: Any) -> Any:
        if self.training:
            with torch.no_grad():
                if self.way == 0:
                    self.calls += 1
                    self.mean.lerp_(x.mean(0), 0.25)
                elif self.way == 1:
                    self.calls[1].add_(1)
                    self.mean.copy_(0.5 * self.mean + 0.5 * x.mean(0))
                else:
                    self.calls = self.calls + 1
                    self.mean = 0.5 * (self.mean + x.detach().mean(0))
        return x * self.scale - self.mean


class Shared(nn.Module):
    """One layer that runs twice, the second time transposed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.inner(x)) + 0.5 * functional.linear(x, self.inner.weight.t())


class Masked(nn.Module):
    """A mask among the buffers, of which every second entry counts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.ones(2 * width))
        self.inner = nn.Linear(width, width, bias=False)

    def forward(self, x: Any) -> Any:
        return x + torch.relu(self.inner(x)) * self.mask[::2]


class Net(nn.Module):
    """Words and numbers in, classes out."""

    def __init__(self, draw: random.Random, width: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(_block(draw, width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES, bias=draw.random() < 0.5)

    def forward(self, x: Any, ids: Any) -> Any:
        x = x + self.words(ids).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _block(draw: random.Random, width: int) -> nn.Module:
    act = draw.choice((torch.tanh, functional.gelu, functional.silu, torch.relu))
    return draw.choice(
        (
            lambda: Residual(width, draw.choice((2, 4)) * width, act),
            lambda: Attention(width),
            lambda: Mixed(width),
            lambda: Counted(width, draw.randrange(3)),
            lambda: Shared(width),
            lambda: Masked(width),
            lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.BatchNorm1d(width)),
        )
    )()
