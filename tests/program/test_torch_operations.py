"""Operations of torch whose lowering, ours or torchax's, once was wrong or had no gradient."""

import jax
import numpy as np
import pytest
import torch
from hf_reference import close
from torch.nn import functional

from autoshard.program.torch.torch_function import TorchFunction
from tests.scripts import load_script


def rows_that_see_more_keys(q):
    k, v = q.repeat(1, 1, 2, 1).flip(2), q.repeat(1, 1, 2, 1) + 1
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def rows_of_fewer_heads(q):
    k, v = q[0].flip(1), q[1]
    return functional.scaled_dot_product_attention(q, k, v[None, :1].expand(2, 3, -1, -1), is_causal=True)


def rows_under_masks_of_many_dims(q):
    wide = q[:, None].expand(2, 4, 3, 4, 5)
    own = torch.linspace(-1, 1, 2 * 4 * 3 * 4 * 4).view(2, 4, 3, 4, 4)
    masks = (own, own[:, :1, :1] > 0.1, own[0], own[0, 0] > -0.9, own[0, 0, 0], own[:1])
    masks = [mask if mask.dtype != torch.bool else mask | torch.eye(4, dtype=torch.bool) for mask in masks]
    mixed = [functional.scaled_dot_product_attention(wide, wide + 1, wide, attn_mask=mask) for mask in masks]
    return sum(each * number for number, each in enumerate(mixed, 1))


def rows_without_heads(q):
    mask = torch.linspace(-1, 1, 16).view(4, 4)
    k, rows = q[0, 1], q[0, 0]
    mixed = functional.scaled_dot_product_attention(rows, k, k, attn_mask=mask)
    causal = functional.scaled_dot_product_attention(rows, k, k, is_causal=True)
    return mixed + causal * 2 + functional.scaled_dot_product_attention(rows, q[1], q[1]) * 3


def shares_of_attention(q):
    x = q.permute(2, 0, 1, 3).reshape(4, 2, 15)
    projection, output = torch.linspace(-9, 9, 675).view(45, 15).sin(), torch.eye(15)
    given = (x, x, x, 15, 3, projection, None, None, None, False, 0.0, output, None, False)
    hidden, mask = torch.tensor([[False] * 4, [False, False, True, True]]), torch.linspace(-1, 1, 16).view(4, 4)
    later = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
    attend = functional.multi_head_attention_forward
    results = [*attend(*given, key_padding_mask=hidden), *attend(*given, attn_mask=mask, average_attn_weights=False)]
    results += attend(*given, attn_mask=later, is_causal=True)
    alone = (x[:, 0], x[:, 0], x[:, 0], *given[3:])
    return torch.cat([each.flatten() for each in (*results, *attend(*alone))])


def maxima_with_places(x):
    values, places = functional.max_pool2d(x, 2, stride=1, padding=1, return_indices=True)
    return values * (places + 1.0)


def maxima_along_one_dim(x):
    values, places = functional.max_pool1d(x[0], 3, stride=2, ceil_mode=True, return_indices=True)
    return values * (places + 1.0)


def adaptive_maxima(x):
    values, places = functional.adaptive_max_pool2d(x, (3, 2), return_indices=True)
    return functional.adaptive_max_pool1d(x[0], 3).sum() + values * (places + 1.0)


def searched(x):
    rows, values = x[0].sort(-1).values, x[1] * 0.9
    edges = torch.tensor([-1.0, 0.0, 0.5])
    right = torch.searchsorted(rows, values, right=True) + torch.searchsorted(rows, values, side="left")
    return x * (right + torch.searchsorted(edges, values) + torch.bucketize(values, edges, right=True))


def eigenvalues_of_a_triangle(x):
    square = x[0, :, :, :4]
    return torch.linalg.eigvalsh(square, UPLO="U") * 2 + torch.linalg.eigvalsh(square)


def softmax_of_nothing(x):
    return torch.ops.aten._safe_softmax(x.masked_fill(torch.tensor([True, False, True]).view(3, 1, 1), -np.inf), -1)


BODIES = [rows_that_see_more_keys, rows_of_fewer_heads, maxima_with_places, maxima_along_one_dim, adaptive_maxima]
BODIES += [rows_under_masks_of_many_dims, rows_without_heads, shares_of_attention, searched]
BODIES += [eigenvalues_of_a_triangle, softmax_of_nothing]


@pytest.mark.few(2)
@pytest.mark.parametrize("body", BODIES)
def test_values_and_gradients_are_torchs(body):
    class Body(torch.nn.Module):
        def forward(self, x):
            return body(x)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    given = torch.tensor(x, requires_grad=True)
    expected = body(given)
    weights = rng.standard_normal(expected.shape).astype(np.float32)
    (expected * torch.tensor(weights)).sum().backward()
    function = TorchFunction(Body())

    def run(x):
        return function({}, (x,), {})

    close(jax.jit(run)(x), expected.detach().numpy())
    close(jax.jit(jax.grad(lambda x: (run(x) * weights).sum()))(x), given.grad.numpy())


EDGES = {
    "abs": lambda x: x.abs() + abs(x) * 2,
    "norms": lambda x: x.norm(dim=-1) + x.norm(p=3, dim=-1) * 2 + (x * 0).norm() + x.norm(p=1, dim=-1),
    "more norms": lambda x: torch.linalg.matrix_norm(x * 0) + x.norm(p=float("inf")) + torch.linalg.norm(x, dim=-1),
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "cosine_similarity": lambda x: functional.cosine_similarity(x, x.flip(0), dim=-1),
    "distances": lambda x: torch.cdist(x, x) + torch.cdist(x, x, p=1.0) + torch.dist(x, x),
    "pairs": lambda x: torch.pdist(x),
    "std": lambda x: torch.std_mean(x[1:2], -1)[0] + x[2:].std(correction=0) + x.std((0, 1)),
    "clamp": lambda x: x.clamp(min=0) + x.clamp(max=0) * 2 + x.clamp(-0.5, 0.5) + x.clamp_min(0) + x.clamp(x * 0),
    "leaky_relu": lambda x: functional.leaky_relu(x),
    "logsigmoid": lambda x: functional.logsigmoid(x * 100),
    "binary_cross_entropy": lambda x: (
        functional.binary_cross_entropy((x != 0) * 0.3 + x * 0, x.sigmoid().detach())
        + functional.binary_cross_entropy(x.sigmoid(), (x != 0) * 1.0, weight=x.detach(), reduction="sum")
    ),
    "sgn": lambda x: x.sgn() * x,
    "trunc": lambda x: (x * 3).trunc() + (x * 3).frac(),
}


@pytest.mark.parametrize("name", EDGES)
def test_gradients_at_edges_are_torchs(name):
    """Differentiate rows of zeros, equal rows, and numbers at the bounds of a clamp."""

    class Body(torch.nn.Module):
        def forward(self, x):
            return EDGES[name](x)

    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    x[1], x[2, 3:], x[3] = 0, 0, x[0]
    x[0, 0], x[3, 0], x[0, 1] = 0.5, 0.5, -0.5
    given = torch.tensor(x, requires_grad=True)
    expected = EDGES[name](given)
    expected.sum().backward()
    function = TorchFunction(Body())

    def run(x):
        return function({}, (x,), {})

    close(jax.jit(run)(x), expected.detach().numpy())
    close(jax.jit(jax.grad(lambda x: run(x).sum()))(x), given.grad.numpy())


SAMPLED = """
add atan2 cat clamp cumsum einsum erf expand gather index_add index_select logsumexp masked_fill matmul
max mean nn.functional.avg_pool2d nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.cross_entropy
nn.functional.gelu nn.functional.grid_sample nn.functional.group_norm nn.functional.layer_norm nn.functional.pad
softmax pow prod roll scatter scatter_add sort split std tril topk var where
""".split()


@pytest.fixture(scope="module")
def operations():
    from torch.testing._internal.common_methods_invocations import op_db

    return {each.name: each for each in reversed(op_db)}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", SAMPLED)
def test_torchs_own_samples_come_out_alike(operations, name):
    """Check a slice of `python experiments/correctness/torch_operations.py`."""
    found = load_script("experiments/correctness/torch_operations.py").row(operations[name], operations[name].op, 2)
    assert found["outcomes"] == ["equal"] and found["samples"]
