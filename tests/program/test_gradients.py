"""Gradients of torch modules that are not those of what is computed: `no_grad`, `detach`, functions with their own."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from hf_reference import close
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from autoshard import UserError
from autoshard.program import from_torch
from autoshard.program._torch_function import TorchFunction


class Sign(torch.autograd.Function):
    """The straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1).to(gradient.dtype)


class Reversed(torch.autograd.Function):
    """In the form with a context of its own, which holds a number, a tensor and a tensor that is computed."""

    @staticmethod
    def forward(x, factor, beside):
        return x * factor, beside

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor, ctx.twice = inputs[1], inputs[0] * 2
        ctx.save_for_backward(inputs[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, _):
        return -gradient * ctx.factor + ctx.saved_tensors[0] * ctx.twice, None, None


class OfTwo(torch.autograd.Function):
    """With a gradient for one of two arguments alone."""

    @staticmethod
    def forward(ctx, one, two):
        ctx.save_for_backward(one)
        return one + two.sum(), two * 2

    @staticmethod
    def backward(ctx, of_one, of_two):
        return of_one * 7 + ctx.saved_tensors[0], None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def without(x):
    with torch.no_grad():
        y = x * x
    return y * x


@torch.no_grad()
def sine(x):
    return x.sin()


def of_a_decorated_function(x):
    return sine(x) * x


def switched(x):
    with torch.no_grad():
        y = x * x
        with torch.enable_grad():
            z = x * 3
    with torch.set_grad_enabled(False):
        w = x * x
    return y * x + z + w


def written_without(x):
    y, z = x * 2, x.clone()
    with torch.no_grad():
        y.mul_(3.0)
        z[0] = 5.0
        z.view(-1)[3:7] = 1.0
        z[1].mul_(2.0)
    return y * x + z * z


def views_made_without(x):
    with torch.no_grad():
        flat, tail, twice = x.view(-1), x[1:], x[1:] * 2
    return flat.view(x.shape) * x + tail.sum() * x + twice.sum()


def detached(x):
    y = (x * 2).detach_()
    return y * x + x[1:].detach().sum() * x + torch.detach(x) * x + x.T.detach().T * x


def rounded(x):
    return x + (torch.round(x) - x).detach()


def straight_through(x):
    return Sign.apply(x) * x


def reversed_(x):
    apply: Any = Reversed.apply
    y, _ = apply(x, 3.0, torch.arange(4))
    z, none = apply(x[1:], 2.0, None)
    return y * x + z.sum() if none is None else None


def of_two(x):
    apply: Any = OfTwo.apply
    one, two = apply(x * 2, x * 3)
    return one + two


def computed_again(x):
    y = checkpoint(lambda a: Sign.apply(a.sin()) * a, x, use_reentrant=False)
    return y + checkpoint(lambda a: a.sin() * a, x, use_reentrant=True)


BODIES = [without, of_a_decorated_function, switched, written_without, views_made_without, detached, rounded]
BODIES += [straight_through, reversed_, of_two, computed_again]


def module_of(body):
    class Body(torch.nn.Module):
        def forward(self, x):
            return body(x)

    return Body()


@pytest.mark.parametrize("body", BODIES)
def test_gradients_are_torchs(body):
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    given = torch.tensor(x, requires_grad=True)
    expected = body(given)
    expected.sum().backward()
    function = TorchFunction(module_of(body))

    def run(x):
        return function({}, (x,), {})

    close(jax.jit(run)(x), expected.detach().numpy(), 1e-6)
    close(jax.jit(jax.grad(lambda x: run(x).sum()))(x), given.grad.numpy(), 1e-6)


def test_a_function_that_writes_in_place_is_refused():
    with pytest.raises(UserError, match="an autograd.Function that writes in place"):
        from_torch(module_of(lambda x: InPlace.apply(x * 1)), (torch.zeros(4, 6),))


def test_backward_hooks_are_named_in_a_note():
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    module[1].register_full_backward_hook(lambda _, into, out: None)
    program = from_torch(module, (torch.zeros(4, 6),), train=True)
    assert any(note.startswith("Backward hooks of `1` are not run") for note in program.notes)


def test_a_module_that_asks_whether_it_is_trained_is_told_in_a_note_that_it_is_not():
    class Asking(torch.nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x

    program = from_torch(Asking(), (torch.zeros(4, 6),))
    assert "The module runs in evaluation mode: `Asking` asks whether it is being trained." in program.notes
    assert not from_torch(Asking().eval(), (torch.zeros(4, 6),)).notes


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        with torch.no_grad():
            scale = x.abs().max()
        return x + Sign.apply(self.linear(x)) * scale


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_they_are_in_layers_that_are_scanned_and_computed_again(scan, remat):
    torch.manual_seed(0)
    module, x = Layers(), torch.randn(4, 6)
    options = {"optimizer": "sgd", "loss": lambda out: (out**2).mean(), "remat": remat, "scan": scan}
    program = from_torch(module, (x,), train=True, **options)
    assert program.stacks == ((4,) if scan else ())
    (module(x) ** 2).mean().backward()
    params = program.args[0]
    own = {name: value.detach().numpy() for name, value in module.named_parameters()}

    def stacked(name, values):
        if "*" not in name:
            return values[name]
        return np.stack([values[name.replace("*", str(number))] for number in range(4)])

    before = {name: stacked(name, own) for name in params}
    state = jax.tree.map(lambda each: np.zeros(each.shape, each.dtype), program.args[1])
    after = jax.jit(program.fn)(before, state, *jax.tree.map(lambda _: x.numpy(), program.args[2:]))[0]
    gradients = {name: value.grad.numpy() for name, value in module.named_parameters()}
    moved = {name: np.asarray(before[name]) - np.asarray(after[name]) for name in params}
    rate = max(np.abs(each).max() for each in moved.values()) / max(np.abs(each).max() for each in gradients.values())
    for name in params:
        close(moved[name], rate * stacked(name, gradients), 1e-5)
