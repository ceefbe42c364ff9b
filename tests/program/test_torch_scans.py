"""Repeated layers of torch modules that become scans: with several states, nested, and under other names."""

from collections import OrderedDict

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch_modules import Layer

from autoshard.program import from_torch
from autoshard.program.torch.torch_function import TorchFunction


class Joint(nn.Module):
    """Two streams that are combined in every layer, and returned in another order than they are passed."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden, other, scale):
        return other + torch.tanh(self.a(hidden)) * scale, hidden + torch.tanh(self.b(other))


class Streams(nn.Module):
    def __init__(self, narrow=False):
        super().__init__()
        self.layers = nn.ModuleList(Joint(8) for _ in range(4))
        self.narrow = narrow

    def forward(self, x, y, scale):
        for layer in self.layers:
            y, x = layer(hidden=x, other=y, scale=scale)
            if self.narrow:
                y = y * 2
        return x + y


class Held(nn.Module):
    """Layers that are called outside of their stack."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(8) for _ in range(3))


class Between(nn.Module):
    """Groups that are not called in sequence, of layers that are."""

    def __init__(self):
        super().__init__()
        self.groups = nn.ModuleList(Held() for _ in "ab")
        self.mixers = nn.ModuleList(nn.Linear(8, 8) for _ in "ab")

    def forward(self, x):
        for group, mixer in zip(self.groups.children(), self.mixers, strict=True):
            for layer in group.get_submodule("layers").children():
                x = layer(x, 0.5)
            x = mixer(x)
        return x


class Dropping(nn.Module):
    """A layer whose rate does not matter without dropout."""

    def __init__(self, rate):
        super().__init__()
        self.fc, self.rate = nn.Linear(8, 8), rate

    def forward(self, x):
        if not 0 <= self.rate < 1:
            raise ValueError("no rate")
        return x + nn.functional.dropout(torch.tanh(self.fc(x)), self.rate, self.training)


class Scaled(Dropping):
    def forward(self, x):
        return x + torch.tanh(self.fc(x)) * self.rate


def named_list():
    return nn.Sequential(OrderedDict((f"layer_{i}", Dropping(0.0)) for i in range(3)))


def rates(kind, *values):
    return nn.Sequential(*(kind(rate) for rate in values))


@pytest.mark.parametrize(
    ("module", "inputs", "stacked"),
    [
        (Streams, 3, ["layers.*.a.bias", "layers.*.b.bias"]),
        (lambda: Streams(narrow=True), 3, []),
        (Between, 1, [f"groups.{i}.layers.*.{key}" for i in range(2) for key in ("fc.bias", "norm.bias")]),
        (named_list, 1, ["layer_*.fc.bias"]),
        (lambda: rates(Dropping, 0.1, 0.2, 0.3), 1, ["*.fc.bias"]),
        (lambda: rates(Scaled, 0.1, 0.2, 0.3), 1, []),
        (lambda: rates(Scaled, 0.1, 0.1, 0.3), 1, ["[0:2].fc.bias"]),
    ],
    ids=["several states", "changed between", "inner lists", "named", "unused rates", "scales", "equal scales"],
)
def test_what_is_scanned_computes_the_same(module, inputs, stacked):
    torch.manual_seed(0)
    made = module()
    given = [torch.randn(4, 8) for _ in range(inputs)]
    program = from_torch(made, tuple(given), train=True, optimizer="sgd", remat="full")
    stacks = [a.name for a in program.arguments if a.name.endswith("bias") and ("*" in a.name or "[" in a.name)]
    assert stacks == stacked
    args = program.make_args(0)
    batch = {key: value.numpy() for key, value in zip(program.args[2], given, strict=True)}
    _, _, loss = jax.jit(program.fn)(args[0], args[1], batch)
    np.testing.assert_allclose(float(loss), float(made.eval()(*given).square().mean().detach()), rtol=1e-5)


def test_what_a_layer_holds_may_be_used_outside_of_the_layers_too():
    """Use a layer's value outside, as DiT's first time embedding. A constant in its place would have no gradient."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.time = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x, time):
            return x + self.inner(x) * torch.tanh(self.time(time))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

        def forward(self, x, time):
            for block in self.blocks:
                x = block(x, time)
            return x * torch.tanh(self.blocks[0].time(time))

    torch.manual_seed(0)
    module, x, time = Model(), torch.randn(2, 4), torch.randn(2, 4)
    function = TorchFunction(module)
    given = {"x": x.numpy(), "time": time.numpy()}

    def loss(params, batch):
        return (function(params, (batch["x"], batch["time"]), {}) ** 2).mean()

    function.settle(
        loss, {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in given.items()}, "Model"
    )
    found = jax.grad(loss)(function.values(), given)
    module(x, time).square().mean().backward()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(found[name], parameter.grad, atol=1e-6)
    assert function.notes == ["The layers of `blocks` are not scanned: their parts are used outside of them too."]
