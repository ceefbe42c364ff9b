"""Traces that fail within a checkpoint before they know how layers run: eager torch afterwards is unchanged."""

import gc

import torch
from torch import nn
from torch._C import _autograd
from torch.utils.checkpoint import checkpoint

from autoshard.program import from_torch


class Mixture(nn.Module):
    """Experts in a list that are called next to each other, so a trace as a scan fails."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        return sum(expert(x) * (number + 1) for number, expert in enumerate(self.experts))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Mixture(), Mixture()

    def forward(self, x):
        for layer in (self.first, self.second):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x


def test_a_failed_trace_leaves_no_hooks_in_torch():
    x = torch.ones(4, 8)
    gc.disable()  # a hook must not depend on garbage collection
    try:
        program = from_torch(Checkpointed(), (x,), train=True)
        assert _autograd._top_saved_tensors_default_hooks(True) is None
        other = Checkpointed()
        other(x).square().mean().backward()
        assert all(parameter.grad is not None for parameter in other.parameters())
    finally:
        gc.enable()
    assert any("not scanned" in note for note in program.notes)
