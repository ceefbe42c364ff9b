"""Arguments of torch operations: values, dtypes and gradients of lowered calls equal those of eager torch."""

import random

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree

from autoshard.program.torch.torch_function import TorchFunction


NARROW = {"int64": "int32", "float64": "float32"}


def calling(text, names):
    code = compile(text, "<case>", "eval")

    class Called(torch.nn.Module):
        def forward(self, *tensors):
            return eval(
                code, {"torch": torch, "F": functional, "inf": float("inf")}, dict(zip(names, tensors, strict=True))
            )

    return Called()


def check(text, **tensors):
    """Compare the results and the gradients of weighted sums of them with those of eager torch."""
    module = calling(text, tensors)
    given = [each.clone().requires_grad_(each.dtype == torch.float32) for each in tensors.values()]
    arrays = [each.detach().clone().numpy() for each in given]
    expected = [each for each in _pytree.tree_leaves(module(*given)) if isinstance(each, torch.Tensor)]
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(each.shape).astype(np.float32) for each in expected]
    follows = [each.requires_grad for each in expected]
    terms = [(e * torch.tensor(w)).sum() for e, w, on in zip(expected, weights, follows, strict=True) if on]
    learned = [k for k, each in enumerate(given) if each.requires_grad] if terms else []
    wanted = torch.autograd.grad(sum(terms), [given[k] for k in learned]) if terms else []
    function = TorchFunction(module)
    function.inputs = [
        (each.dtype, int(each.max()) if each.numel() and each.dtype != torch.bool else 1) for each in given
    ]

    def run(values):
        filled = [values[learned.index(k)] if k in learned else array for k, array in enumerate(arrays)]
        results = jax.tree.leaves(function({}, tuple(filled), {}))
        assert len(results) == len(expected), text
        return sum(((r * w).sum() for r, w, on in zip(results, weights, follows, strict=True) if on), 0.0), results

    values = [arrays[k] for k in learned]
    if learned:
        (_, results), gradients = jax.jit(jax.value_and_grad(run, has_aux=True))(values)
    else:
        results, gradients = jax.jit(run)(values)[1], []
    for result, each in zip(results, expected, strict=True):
        dtype = str(each.dtype).removeprefix("torch.")
        assert result.shape == each.shape and result.dtype == NARROW.get(dtype, dtype), (text, result.dtype)
        exact = not each.is_floating_point()
        own = each.detach().float().numpy() if dtype in ("bfloat16", "float16") else each.detach().numpy()
        tolerance = 0 if exact else 1e-2 if dtype in ("bfloat16", "float16") else 1e-5
        np.testing.assert_allclose(np.asarray(result, own.dtype), own, rtol=tolerance, atol=tolerance, err_msg=text)
    for gradient, own in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(gradient, own.numpy(), rtol=1e-4, atol=1e-5, err_msg=text)


def random_pool(seed):
    """Return a call of a pooling layer, and the sides of its operand."""
    draw = random.Random(seed)
    rank = draw.choice([1, 2, 2, 3])
    kernel = tuple(draw.randint(1, 3) for _ in range(rank))
    stride, pads = (tuple(draw.randint(low, high) for _ in kernel) for low, high in ((1, 4), (0, 1)))
    pads = tuple(min(pad, width // 2) for pad, width in zip(pads, kernel, strict=True))
    options = f"{kernel}, stride={stride}, padding={pads}, ceil_mode={draw.random() < 0.7}"
    kind = draw.choice(["max", "max", "places", "avg"])
    if kind == "avg":
        divisor = f", divisor_override={draw.randint(1, 4)}" if rank > 1 and draw.random() < 0.3 else ""
        text = f"F.avg_pool{rank}d(x, {options}, count_include_pad={draw.random() < 0.5}{divisor})"
    else:
        options += f", dilation={draw.choice([1, 1, 2])}"
        text = f"F.max_pool{rank}d(x, {options}, return_indices={kind == 'places'})"
    return text, [draw.randint(5, 8) for _ in kernel]


@pytest.mark.parametrize("seed", range(24))
def test_random_pools_are_torchs(seed):
    text, sides = random_pool(seed)
    torch.manual_seed(seed)
    check(text, x=torch.randn(2, 2, *sides))


POOLS = [
    "F.max_pool2d(x, 2, stride=3, padding=1, ceil_mode=True)",
    "F.max_pool2d(x, [2], stride=[])",
    "F.avg_pool2d(x, [2])",
    "F.max_pool2d(torch.where(x > 1, float('nan'), x.detach()), 2, return_indices=True)",
    "F.max_pool2d(x.detach() - inf, 2, padding=1, return_indices=True)",
    "F.max_pool3d((x * 9).to(torch.int8), 3, padding=1)",
    "F.max_unpool2d(*F.max_pool2d(x[..., :4, :4], 2, return_indices=True), 2)",
    "F.adaptive_max_pool2d(x, (3, None), return_indices=True)",
]


@pytest.mark.parametrize("text", POOLS)
def test_edges_of_pools_are_torchs(text):
    torch.manual_seed(0)
    check(text, x=torch.randn(2, 3, 5, 5))


@pytest.mark.parametrize(
    "text",
    ["x.std(0, correction=0.5)", "torch.std_mean(x, 1, correction=0, keepdim=True)", "x.var(1, correction=0.5)"],
)
def test_corrections_of_deviations_are_torchs(text):
    check(text, x=torch.randn(4, 5, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("mode", ["trunc", "floor"])
def test_whole_quotients_are_exact(mode):
    x = torch.tensor([(1 << 26) + 7, -(1 << 26) - 7, 7, -7], dtype=torch.int32)
    check(f"torch.div(x, y, rounding_mode={mode!r})", x=x, y=torch.tensor([1, 1, 2, 2], dtype=torch.int32))


def test_a_safe_softmax_has_the_dtype_that_it_is_given():
    x = torch.tensor([[float("-inf")] * 3, [0.0, 1.0, 2.0]])
    check("torch.ops.aten._safe_softmax(x, -1, torch.float32)", x=x)
