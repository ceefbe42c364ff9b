"""Modules of layers for tests, and functions that run them."""

import torch
from torch import nn

from autoshard.program import from_torch


def meta(*shape):
    return torch.empty(*shape, device="meta")


class Layer(nn.Module):
    def __init__(self, width, scale=1.0):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.scale = scale

    def forward(self, hidden, shift):
        return hidden + torch.tanh(self.fc(self.norm(hidden))) * self.scale + shift


class Chain(nn.Module):
    """Layers called one after another, with a hook for code in between."""

    def __init__(self, layers=4, width=8, scales=None):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, 1.0 if scales is None else scales[i]) for i in range(layers))

    def between(self, index, hidden):
        return hidden

    def forward(self, x, shift):
        for index, layer in enumerate(self.layers):
            x = layer(self.between(index, x), shift)
        return x


def run_module(module, *inputs, **options):
    import jax

    program = from_torch(module, inputs, **options)
    args = program.make_args(0)
    batch = {k: v.numpy() for k, v in zip(program.args[1], inputs, strict=True)}
    return program, jax.jit(program.fn)(args[0], batch, *args[2:])


def training_step(module, *inputs, **options):
    """Trace a step with the mean of squares as its loss, and run it. Return program, loss and gradients by name."""
    import jax
    import numpy as np

    program = from_torch(module, inputs, train=True, optimizer="momentum", **options)
    params, state, _, *buffers = program.make_args(0)
    batch = {key: value.numpy() for key, value in zip(program.args[2], inputs, strict=True)}
    _, state, *_, loss = jax.jit(program.fn)(params, state, batch, *buffers)
    gradients = {}
    for name, value in state[0].trace.items():
        members = program.weights[name]
        rows = np.asarray(value) if "*" in name or "[" in name else np.asarray(value)[None]
        gradients.update(zip(members, rows, strict=True))
    return program, float(loss), gradients


def eager_step(module, *inputs):
    """Run the same step in eager torch, in evaluation mode. Return the loss and the gradients by name."""
    modes = {child: child.training for child in module.modules()}
    module.eval()
    module.zero_grad(set_to_none=True)
    loss = module(*inputs).square().mean()
    loss.backward()
    for child, training in modes.items():
        child.training = training
    return float(loss.detach()), {
        name: parameter.grad.numpy() for name, parameter in module.named_parameters() if parameter.grad is not None
    }
