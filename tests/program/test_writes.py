"""Writes of torch under masks that are traced."""

import numpy as np
import pytest
from hf_reference import close

from autoshard.program._torch_function import TorchFunction


def written(body, *arrays):
    """What `body` makes of tensors: by torch, and by the same code as a JAX function whose masks are traced."""
    import jax
    import torch

    class Body(torch.nn.Module):
        def forward(self, *tensors):
            return body(*tensors)

    expected = body(*(torch.tensor(each) for each in arrays))
    function = TorchFunction(Body())
    found = jax.jit(lambda *given: function({}, given, {}))(*arrays)
    close(found, expected.numpy(), 1e-6)


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


def put_in(x, mask, rows):
    return x.index_put((mask,), rows[1])


@pytest.mark.parametrize("body", [one_for_all, one_row_for_all, one_row_for_each, through_a_view, by_numbers, put_in])
def test_writes_under_a_mask(body):
    rng = np.random.default_rng(0)
    x, rows = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4, 5), (6, 5)))
    mask = np.zeros((3, 4), bool)
    mask[[0, 1, 2], [1, 3, 0]] = True
    written(body, x, mask, rows)
