"""Gradients of torch modules that differ from their values' derivatives: `no_grad`, `detach`, custom functions."""

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
from autoshard.program.torch.torch_function import TorchFunction


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
    """Reversed gradient, with a separate `setup_context` that saves a number, a tensor and a computed tensor."""

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
    """Function with a gradient for only one of its two arguments."""

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
        return gradient * 3


class Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, average):
        average.mul_(0.5).add_(x.mean(0))
        return x * average

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        mask = (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(mask)
        return x * mask, mask

    @staticmethod
    def backward(ctx, of_x, of_mask):
        return of_x * 2 + of_mask


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


def written_in_place(x):
    h, part = x * 1, x * 2
    y = InPlace.apply(h)
    InPlace.apply(part[1:])
    return h * x + y + part * x


def average_written(x):
    average = torch.ones(6)
    y = Averaged.apply(x, average)
    return y + average * x


def masked(x):
    y, mask = Masked.apply(x)
    return y * x + mask * x


def computed_again(x):
    y = checkpoint(lambda a: Sign.apply(a.sin()) * a, x, use_reentrant=False)
    return y + checkpoint(lambda a: a.sin() * a, x, use_reentrant=True)


BODIES = [without, of_a_decorated_function, switched, written_without, views_made_without, detached, rounded]
SIGN: Any = Sign.apply
REVERSED: Any = Reversed.apply


def bound_before(x):
    y, _ = REVERSED(x, 3.0, None)
    return SIGN(x) * x + y


def bound_before_and_computed_again(x):
    return checkpoint(lambda a: SIGN(a.sin()) * a, x, use_reentrant=True)


BODIES += [straight_through, reversed_, of_two, computed_again, bound_before, bound_before_and_computed_again]
BODIES += [written_in_place, average_written, masked]


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


class Normed(torch.nn.Module):
    """A layer whose autograd function writes to its buffer."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(6, 6)
        self.register_buffer("average", torch.ones(6))

    def forward(self, x):
        return Averaged.apply(self.up(x), self.average)


def test_a_function_writes_to_a_buffer():
    torch.manual_seed(0)
    module, x = Normed(), torch.randn(4, 6)
    program = from_torch(module, (x,), train=True, optimizer="sgd", loss=lambda out: out.square().mean())
    params, state, _, buffers = program.make_args(0)
    outputs = jax.jit(program.fn)(params, state, {"x": x.numpy()}, buffers)
    module(x)
    close(outputs[2]["average"], module.average.numpy(), 1e-6)


def test_backward_hooks_are_named_in_a_note():
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    module[1].register_full_backward_hook(lambda _, into, out: None)
    program = from_torch(module, (torch.zeros(4, 6),), train=True)
    assert any(note.startswith("Backward hooks of `1` are not run") for note in program.notes)


def test_a_module_that_asks_for_training_gets_a_note_that_it_is_not_trained():
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


class Derivative(torch.nn.Module):
    """Module whose forward pass differentiates `energy`, which contains a linear layer."""

    def __init__(self, ask):
        super().__init__()
        self.fc, self.ask = torch.nn.Linear(4, 4), ask

    def energy(self, x):
        return (x * x).sum() + self.fc(x).sin().sum()

    def forward(self, x):
        return self.fc(x) + self.ask(self, x)


def by_backward(self, x):
    leaf = x.detach().requires_grad_()
    self.energy(leaf).backward()
    return leaf.grad


def by_grad(self, x):
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(self.energy(leaf), leaf, create_graph=True)[0]


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (by_grad, "asks torch for gradients in Derivative.by_grad at test_gradients.py:"),
        (by_backward, "asks torch for gradients in Derivative.by_backward at test_gradients.py:"),
        (lambda self, x: torch.autograd.functional.jacobian(self.energy, x), "asks torch for gradients in Derivative"),
        (lambda self, x: torch.autograd.functional.hessian(self.energy, x)[0, 0], "asks torch for gradients"),
        (lambda self, x: torch.func.grad(self.energy)(x), "calls a transform of torch.func in Derivative.<lambda>"),
        (lambda self, x: torch.func.jacrev(self.energy)(x), "calls a transform of torch.func in Derivative.<lambda>"),
        (lambda self, x: torch.func.jvp(self.energy, (x,), (x,))[1], "calls a transform of torch.func"),
        (lambda self, x: torch.func.vmap(self.fc)(x), "calls a transform of torch.func in Derivative.<lambda>"),
    ],
)
@pytest.mark.parametrize("train", [False, True])
def test_derivatives_in_a_forward_pass_are_refused(ask, sentence, train):
    module = Derivative(ask)
    with pytest.raises(UserError, match=sentence):
        from_torch(module, torch.randn(3, 4), train=train)
    assert torch.autograd.grad(module.energy(leaf := torch.ones(4, requires_grad=True)), leaf)[0].shape == (4,)


class AskedInBackward(torch.autograd.Function):
    """Function whose `backward` recomputes its forward pass and lets torch differentiate that."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x * x + x.softmax(-1)).sin()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad((x * x + x.softmax(-1)).sin(), x, gradient)[0]


def test_derivatives_in_a_backward_pass_are_refused():
    class Asking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x):
            return AskedInBackward.apply(self.fc(x))

    with pytest.raises(UserError, match="`AskedInBackward.backward` asks torch for gradients"):
        from_torch(Asking(), torch.randn(3, 4), train=True)


@pytest.mark.parametrize(
    "ask",
    [
        lambda self, x: torch.func.grad(lambda y: (y.softmax(-1) ** 2).sum())(x),
        lambda self, x: torch.func.vjp(torch.sin, x)[1](x)[0],
        lambda self, x: torch.func.vmap(torch.mul)(x, x),
    ],
)
def test_transforms_that_are_followed_give_torchs_values(ask):
    torch.manual_seed(0)
    module, x = Derivative(ask), torch.randn(3, 4)
    program = from_torch(module, x)
    params, batch = program.make_args(0)
    close(jax.jit(program.fn)(params, dict.fromkeys(batch, x.numpy())), module(x).detach().numpy(), 1e-6)
