"""Layers in torch save a policy's values, recompute the rest, and have the same gradients."""

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autoshard.errors import UserError
from autoshard.program import torch_contexts
from autoshard.program.remat_policy import read_policy


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 24), nn.Linear(16, 24, bias=False)
        self.v_proj, self.o_proj = nn.Linear(12, 24, bias=False), nn.Linear(24, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            made.unflatten(-1, (2, -1)).transpose(1, 2)
            for made in (self.q_proj(x), self.k_proj(x), self.v_proj(x[..., :12]))
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.up, self.down = Mixer(), nn.Linear(16, 48, bias=False), nn.Linear(48, 16, bias=False)
        self.after = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(x)
        x = x + self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.5))
        return torch.tanh(self.after(x))


class Counting(TorchDispatchMode):
    """Counter of matmuls with a transposed weight: linear layers run these, and their gradients do not."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        if name in ("mm", "addmm") and not args[-1].is_contiguous():
            self.ran[f"{name} {tuple(args[-1].shape)}"] += 1
        elif "attention" in name and "backward" not in name:
            self.ran["attention"] += 1
        return out


FORWARD = {
    "q_proj": "addmm (16, 24)",
    "k_proj": "mm (16, 24)",
    "v_proj": "mm (12, 24)",
    "o_proj": "mm (24, 16)",
    "up": "mm (16, 48)",
    "down": "mm (48, 16)",
    "after": "mm (16, 16)",
    "context": "attention",
}
"""Producer of each value: the op, and its weight's shape."""


def again(policy: str | None, marks: dict[str, tuple[str, ...]] | None = None) -> tuple[set[str], list[torch.Tensor]]:
    """Return the values that two layers recompute, and their gradients."""
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer(), Layer()]).double()
    x = torch.randn(3, 4, 16, dtype=torch.float64, requires_grad=True)
    contexts = None if policy is None else torch_contexts(read_policy(policy), layers, marks or {})
    torch.manual_seed(1)
    h = x
    for layer in layers:
        h = layer(h) if contexts is None else checkpoint(layer, h, use_reentrant=False, context_fn=contexts)
    loss = (h**2).sum()
    with Counting() as counting:
        loss.backward()
    counted = {value: counting.ran[op] for value, op in FORWARD.items()}
    assert set(counted.values()) <= {0, 2}, counted
    gradients = [each.grad for each in (x, *layers.parameters())]
    return {value for value, count in counted.items() if count}, gradients  # type: ignore[return-value]


ALL = {"q_proj", "k_proj", "v_proj", "o_proj", "up", "down", "context", "after"}


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("full", set()),
        ("full,keep=input", set()),
        ("dots", ALL - {"context"}),
        ("full,keep=q_proj/up", {"q_proj", "up"}),
        ("full,keep=mixer.v_proj/context", {"v_proj", "context"}),
        ("dots,keep=context", ALL),
        ("full,keep=context", {"context"}),
    ],
)
def test_what_is_named_is_preserved_and_the_rest_computed_again(policy: str, kept: set[str]) -> None:
    nothing, wanted = again(None)
    assert nothing == set()
    recomputed, found = again(policy)
    assert recomputed == ALL - kept
    for left, right in zip(found, wanted, strict=True):
        assert torch.equal(left, right)


def test_modules_are_called_as_a_program_calls_them() -> None:
    assert again("full,keep=query", {"query": ("q_proj", "k_proj")})[0] == ALL - {"q_proj", "k_proj"}
    recomputed, _ = again("full,keep=values", {"values": ("mixer",)})  # all ops that run in it
    assert recomputed == {"up", "down", "after", "context"}


def test_hooks_are_there_only_while_a_layer_runs() -> None:
    layer = Layer().double()
    contexts = torch_contexts(read_policy("full,keep=up"), layer, {})
    x = torch.randn(1, 2, 16, dtype=torch.float64, requires_grad=True)
    out = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    assert not layer.up._forward_hooks and not layer.up._forward_pre_hooks
    out.sum().backward()
    assert not layer.up._forward_hooks and not layer.up._forward_pre_hooks
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        checkpoint(layer, x[..., :8], use_reentrant=False, context_fn=contexts)
    assert not layer.up._forward_hooks and not layer.up._forward_pre_hooks


def test_a_module_without_matmuls_is_reported() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    contexts = torch_contexts(read_policy("full,keep=act"), layer, {"act": ("1",)})
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    with pytest.warns(UserWarning, match="No matmul ran in `act`, so none of its values is saved"):
        checkpoint(layer, x, use_reentrant=False, context_fn=contexts).sum().backward()


@pytest.mark.parametrize(
    ("policy", "marks", "sentence"),
    [
        ("full,keep=wq", {}, "names `wq`, which is no value of `Layer`: its layers have after, down"),
        ("full,keep=wq", {"wq": ("query",)}, "`names` gives `query` for `wq`, but no module of `Layer` is called so"),
        ("full,keep=context", {"context": ("mixer",)}, "`names` has `context`, which no module makes"),
        ("full,offload=up", {}, "sends up to the host, which torch's checkpoints cannot"),
    ],
)
def test_sentences(policy: str, marks: dict[str, tuple[str, ...]], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        torch_contexts(read_policy(policy), Layer(), marks)
    assert torch_contexts(read_policy("none"), Layer(), {}) is None
