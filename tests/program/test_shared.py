"""Tensors of torch modules that share elements: a write to one is read from the others."""

import jax
import numpy as np
import pytest
from hf_reference import close

from autoshard import UserError
from autoshard.program import from_torch
from autoshard.program.torch.torch_function import TorchFunction


def before_a_write(x):
    rows, turned, halves = x.view(16, 6), x.transpose(0, 1), x.chunk(2, -1)
    x.mul_(2.0)
    return rows.sum(0) + turned[1].sum(0) + halves[1].sum((0, 1)).repeat(2)


def of_each_other(x):
    flat, turned = x.view(-1), x.transpose(0, 2)
    flat[3:9] = 0
    turned[1].add_(1.0)
    return x + flat.view(x.shape) + turned.transpose(0, 2)


def one_after_another(x):
    flat = x.view(-1)
    flat.add_(1.0)
    part = flat[2:5]
    flat.mul_(2.0)
    part.zero_()
    flat.mul_(2.0)
    return x


def of_views(x):
    turned = x.view(4, 24).t()
    part = turned[3:7]
    wide = part.unsqueeze(0)
    x.add_(1.0)
    wide.mul_(2.0)
    x.sub_(3.0)
    return x + wide.sum() + part.sum()


def of_lists(x):
    one, two = x.unbind(0)[:2]
    two.mul_(3.0)
    for row in x.split(1, 1):
        row.add_(1.0)
    list(x)[2].mul_(5.0)
    x.narrow(1, 1, 2).mul_(2.0)
    x.select(1, 2).tensor_split(2, 1)[1].fill_(4.0)
    return x + one + two


def of_diagonals(x):
    across = x.diagonal(0, 0, 1)
    across.zero_()
    x.view(-1)[0] = 7
    x[0, :4, :4].T.fill_diagonal_(3.0, wrap=True)
    return x + across.sum()


def of_numbers_and_truths(x):
    import torch

    truths, numbers = x > 0, (x > 0).long()
    truths.view(-1)[2:9] = True
    truths.transpose(0, 1)[0].logical_not_()
    numbers.permute(2, 1, 0)[0] += 1
    made = torch.zeros(4, 24)
    made.view(4, 4, 6)[:, 1:3] = x[:, :2]
    made.view(-1)[::5] = 1.0
    return truths * 1.0 + numbers * 10.0 + made.view(x.shape)


def by_a_mask(x):
    x.permute(0, 2, 1)[(x[:, :, 0] > 0)[:, None, :].expand(4, 6, 4)] = 5.0
    return x


def to_what_is_wide(x):
    wide = x.unsqueeze(1).expand(-1, 3, -1, -1)
    x.view(-1)[:5] = 9.0
    return wide.sum(1)


def by_a_function(x):
    import torch

    same = x.to(torch.float32)
    same.float().view(-1)[:3] = 0
    rows = torch.nn.functional.relu(x.view(16, 6), inplace=True)
    return x + rows.view(x.shape)


def of_the_same_dtype(x):
    import torch

    copy = x.to(torch.float32, copy=True)
    copy.zero_()
    x[1:].to(torch.float32)[0, 1:] = 3.0
    x[2:].float().mul_(2.0)
    return x + copy + x.type(torch.float32)


def by_strides(x):
    x.unsqueeze_(0)
    x.as_strided((4, 3), (24, 2)).add_(1.0)
    x.view(-1)[:3] = 0.0
    return x


def copied_in(x):
    x[0].view(-1).copy_(x[1].view(-1).clone())
    x.transpose(0, 1).copy_(x[2].clone())
    return x


def reshaped_in_place(x):
    rows = x.view(16, 6)
    rows.unsqueeze_(0)
    return x + rows.view(x.shape)


def to_copies(x):
    """Write to the copies that torch makes if a layout allows no view."""
    turned = x.transpose(0, 1)
    flat, ordered, one = turned.reshape(-1), turned.contiguous(), turned.ravel()
    flat[:7] = 0
    ordered.zero_()
    one.fill_(2.0)
    product = turned * 2
    product.reshape(-1)[:9] = 0
    cloned = turned.clone()
    cloned.flatten()[:9] = 0
    return x + flat.view(x.shape) + ordered + product + cloned


def to_views_of_what_lies_turned(x):
    turned = x.permute(2, 0, 1) + x.permute(2, 0, 1)
    turned.permute(1, 2, 0).view(-1)[:11] = 0
    return turned


def without_gradients(x):
    detached = x.detach()
    detached.clamp_(0.0)
    scaled = x * 3
    scaled.data.clamp_(0.0)
    moved = x * 2
    moved.data.view(-1)[3:20].zero_()
    return x + scaled * 1.5 + moved * x.detach()


BODIES = [before_a_write, of_each_other, one_after_another, of_views, of_lists, of_diagonals, of_numbers_and_truths]
BODIES += [
    by_a_mask,
    to_what_is_wide,
    by_a_function,
    of_the_same_dtype,
    by_strides,
    copied_in,
    reshaped_in_place,
    to_copies,
]
BODIES += [to_views_of_what_lies_turned, without_gradients]

WITHOUT_GRADIENTS = {before_a_write, of_lists, of_numbers_and_truths}
"""Bodies without gradients: torch refuses writes to one of several views, and booleans have no gradients."""


def module_of(body):
    import torch

    class Body(torch.nn.Module):
        def forward(self, x):
            return body(x.clone())

    return Body()


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_writes_and_their_gradients_are_torchs(body, folded):
    import torch

    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 4, 6)).astype(np.float32)
    module = module_of(body)
    given = torch.tensor(x, requires_grad=body not in WITHOUT_GRADIENTS)
    expected = module(given)
    weights = rng.standard_normal(expected.shape).astype(np.float32)
    function = TorchFunction(module)
    function.folded = folded

    def run(x):
        return function({}, (x,), {})

    close(jax.jit(run)(x), expected.detach().numpy(), 1e-6)
    if given.requires_grad:
        (expected * torch.tensor(weights)).sum().backward()
        close(jax.jit(jax.grad(lambda x: (run(x) * weights).sum()))(x), given.grad.numpy(), 1e-6)


def widened(x):
    x[:, :1].expand(-1, 4, -1).clone().zero_()
    x.unfold(1, 2, 2)[:, 0].zero_()
    return x


def overlapping(x):
    x.as_strided((3, 3), (1, 1)).zero_()
    return x


def turned_in_place(x):
    rows = x.view(16, 6)
    x.transpose_(0, 1)
    x.zero_()
    return rows


@pytest.mark.parametrize("body", [widened, overlapping, turned_in_place])
def test_a_write_that_is_not_followed_is_refused_where_what_shares_it_is_read(body):
    function = TorchFunction(module_of(body))
    params = jax.ShapeDtypeStruct((4, 4, 6), "float32")
    with pytest.raises(UserError, match=r"`body` could not .* writes in place in .*Body\.forward at .*:\d+"):
        function.settle(lambda _, x: function({}, (x,), {}), params, "body")


def test_a_buffer_written_through_a_view_is_handed_back():
    import torch

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(4, 6))

        def forward(self, x):
            self.seen.view(-1)[::2] += x.flatten()[::2]
            return self.seen.T @ x

    module, x = Counting(), np.ones((4, 6), np.float32)
    function = TorchFunction(module, stateful=True)

    def run(x):
        result = function({}, (x,), {}, {"seen": np.zeros((4, 6), np.float32)})
        return result, function.updated_buffers["seen"]

    result, seen = jax.jit(run)(x)
    close(result, module(torch.tensor(x)).numpy(), 1e-6)
    close(seen, module.seen.numpy(), 1e-6)


def layered(layer_forward, model_forward):
    """Build a module of four equal layers, each with one linear layer."""
    import torch

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(6, 6)

        def forward(self, *given):
            return layer_forward(self.linear, *given)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(6, 6)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x):
            return model_forward(self.first(x), self.layers)

    torch.manual_seed(0)
    return Model()


def adds_to_it(linear, x):
    x += linear(x)
    return x


def writes_to_a_view_of_it(linear, x):
    x.view(-1).mul_(1.5)
    return x + linear(x)


def halves_what_all_take(linear, x, mask):
    mask.mul_(0.5)
    return x + linear(x) * mask


def keeps_the_first(x, layers):
    first, flat = x, x.view(-1)
    for layer in layers:
        x = layer(x)
    return x * 2 + first + flat.view(x.shape)


def keeps_none(x, layers):
    for layer in layers:
        x = layer(x)
    return x * 2


def gives_all_one_mask(x, layers):
    mask = x.sigmoid()
    for layer in layers:
        x = layer(x, mask)
    return x + mask


@pytest.mark.parametrize(
    "layer, model, scans",
    [
        (adds_to_it, keeps_the_first, False),
        (adds_to_it, keeps_none, True),
        (writes_to_a_view_of_it, keeps_the_first, False),
        (halves_what_all_take, gives_all_one_mask, False),
    ],
)
def test_layers_that_write_to_what_they_take_are_scanned_only_where_nothing_else_reads_it(layer, model, scans):
    import torch

    module = layered(layer, model)
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    program = from_torch(module, (torch.tensor(x),))
    assert any("writes to what" in note for note in program.notes) is not scans
    function = TorchFunction(module)
    function.settle(lambda params, x: function(params, (x,), {}), jax.ShapeDtypeStruct(x.shape, x.dtype), "model")
    assert bool(function.blocks) is scans
    close(
        jax.jit(lambda params, x: function(params, (x,), {}))(function.values(), x),
        module(torch.tensor(x)).detach().numpy(),
        1e-6,
    )


def test_a_layer_that_is_computed_again_and_writes_to_what_is_read_elsewhere_is_refused():
    import torch

    module, x = layered(adds_to_it, keeps_the_first), torch.zeros(4, 6)
    with pytest.raises(UserError, match=r"writes in place in .* to a tensor that may share elements with another"):
        from_torch(module, (x,), train=True, remat="full", loss=lambda out: out.sum())
