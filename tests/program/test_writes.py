"""Writes of torch under traced masks."""

import numpy as np
import pytest
from hf_reference import close

from autoshard.errors import UserError
from autoshard.program import from_torch
from autoshard.program.torch.torch_function import TorchFunction


def written(body, *arrays):
    """Return the results of `body` by torch, and by the same code as a JAX function whose masks are traced."""
    import jax
    import torch

    class Body(torch.nn.Module):
        def forward(self, *tensors):
            return body(*tensors)

    expected = body(*(torch.tensor(each) for each in arrays))
    function = TorchFunction(Body())
    function.folded = True
    result = jax.jit(lambda *given: function({}, given, {}))(*arrays)
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        close(ours, theirs.numpy(), 1e-6)


def one_for_all(x, mask, rows):
    x = x.clone()
    x[mask] = 7.0
    return x


def one_row_for_all(x, mask, rows):
    x = x.clone()
    x[mask] = rows[0]
    return x


def one_row_for_each(x, mask, rows):
    x = x.clone()
    x[mask] = rows[: int(mask.shape[0])]
    return x


def through_a_view(x, mask, rows):
    x = x.clone()
    part = x[:, 1:]
    part[mask[:, 1:]] = 7.0
    return x


def by_numbers(x, mask, rows):
    x = x.clone()
    x[0, mask[:, 0].long()] = rows[0]
    return x


def copied_into_a_view(x, mask, rows):
    x = x.clone()
    x[:, 1:3].copy_(rows[:2])
    return x


def read_from_a_view(x, mask, rows):
    return x[:, 1:][:, mask[:2, 0].long() + 1]


def put_in(x, mask, rows):
    return x.index_put((mask,), rows[1])


def by_an_operation_in_place(x, mask, rows):
    x = x.clone()
    x.abs_()
    x[:, 1:].sinh_()
    return x


def by_decomposed_operations_in_place(x, mask, rows):
    """Write in place by ops whose torch decompositions would write to copies of views."""
    x = x.clone()
    x[:, 1:2].zero_()
    x[:, 2:3].fill_(0.5)
    x[0, :, 1:].masked_fill_(mask[:1, :, None].reshape(4, 1), 0.25)
    x[1].fill_diagonal_(2.0)
    tall = rows.clone()
    tall.fill_diagonal_(3.0, wrap=True)
    x[2] = tall[2:]
    x[..., :2].clamp_(-0.5, 0.5).index_fill_(-1, mask[0, :1].long(), 0.75)
    return x


def of_wrapped_diagonals(x, mask, rows):
    """Fill wrapped diagonals of twelve rows of three, and of six of five, where a second one would begin just below."""
    tall, flat = x[:, :, :3].reshape(12, 3).clone(), rows.clone()
    tall.fill_diagonal_(3.0, wrap=True)
    flat.fill_diagonal_(4.0, wrap=True)
    return tall, flat


def up_to_a_number(x, mask, rows):
    import torch

    return x[:, : torch.tensor([1, 3])[1], torch.tensor(1) :]


def flattened(x, mask, rows):
    return x.flatten(1)[:, None].flatten(0, 1) + x.flatten().flatten(-1).sum() + x[0, 0, 0].flatten()


def scaled_by_their_own_sums(x, mask, rows):
    x = x.clone()
    own = x[mask]
    x[mask] = own / own.abs().sum(-1, keepdim=True) + own.softmax(-1)
    return x


BODIES = [
    scaled_by_their_own_sums,
    flattened,
    one_for_all,
    one_row_for_all,
    one_row_for_each,
    through_a_view,
    by_numbers,
]
BODIES += [copied_into_a_view, read_from_a_view, put_in, by_an_operation_in_place, up_to_a_number]
BODIES += [by_decomposed_operations_in_place, of_wrapped_diagonals]


@pytest.mark.parametrize("body", BODIES)
def test_writes_under_a_mask(body):
    rng = np.random.default_rng(0)
    x, rows = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4, 5), (6, 5)))
    mask = np.zeros((3, 4), bool)
    mask[[0, 1, 2], [1, 3, 0]] = True
    written(body, x, mask, rows)


@pytest.mark.parametrize("mixed", [lambda own: own.mean(0), lambda own: own.sum(0, True), lambda own: own.var()])
def test_rows_under_a_mask_are_not_mixed(mixed):
    """Refuse to mix rows under a mask: their number is unknown, and rows outside of the mask would count."""
    import torch

    class Body(torch.nn.Module):
        def forward(self, x, mask):
            own = x[mask]
            x = x.clone()
            x[mask] = own - mixed(own)
            return x

    with pytest.raises(UserError, match="mask"):
        from_torch(Body(), (torch.randn(3, 4, 5), torch.rand(3, 4) > 0.5))


@pytest.mark.parametrize("part", [slice(2), slice(1, None)])
def test_parts_of_rows_under_a_mask_are_not_mistaken_for_whole_ones(part):
    import torch

    class Body(torch.nn.Module):
        def forward(self, x, mask):
            mean = x[mask, part].mean(-1, keepdim=True)
            x = x.clone()
            x[mask] = x[mask] - mean
            return x

    with pytest.raises(UserError, match="mask"):
        from_torch(Body(), (torch.randn(3, 4, 5), torch.rand(3, 4) > 0.5))


def test_a_large_mask_that_follows_from_sizes_is_asked_for_its_values():
    """Fold values that are too large for constants, also through views and writes."""
    import jax
    import torch

    class Masked(torch.nn.Module):
        def forward(self, x):
            mask = torch.ones(x.shape[0], 1, 1, 1100).expand(-1, 1, 1100, 1100)
            mask = (1.0 - mask).masked_fill((1.0 - mask).bool(), -1.0)[:, 0, 0, :]
            seen = mask[:, : x.shape[1]] >= 0
            seen[:, 0] = False
            return x * 2 if seen[:, 1:].flatten().all().item() and not seen[0, 0] else x

    function, x = TorchFunction(Masked()), np.ones((2, 8), np.float32)
    function.folded = True
    jaxpr = jax.make_jaxpr(lambda given: function({}, (given,), {}))(x)
    assert all(each.size < 1 << 20 for each in jaxpr.consts)
    close(jax.jit(lambda given: function({}, (given,), {}))(x), 2 * x)
