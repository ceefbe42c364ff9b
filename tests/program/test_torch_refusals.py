"""Calls of torch with unusual arguments: results are eager torch's, or the refusal is, in torch's own words."""

import jax
import numpy as np
import pytest
import torch
from hf_reference import close
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree

from autoshard.errors import UserError
from autoshard.program import from_torch
from autoshard.program.torch.torch_function import TorchFunction
from autoshard.program.torch_ops import torch_refusals


class Called(nn.Module):
    def __init__(self, *calls):
        super().__init__()
        self.calls = calls

    def forward(self, *given):
        return [call(*given) for call in self.calls]


def inputs():
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (4,)))
    return x, y, rng.integers(-2, 5, (3, 4)), rng.random((3, 4)) > 0.5


SPELT = torch.tensor([[1, 2, 3], [3, 3, 2]])
"""Classes of two examples of `ctc_loss`."""


def spoken(x):
    """Return the logarithms of class probabilities of two examples, [9, 2, 4]."""
    steps = torch.cat([x, x.sin(), -x])
    return F.log_softmax(torch.stack([steps, steps * 0.5], 1), -1)


def written(x, key, value):
    copy = x.clone()
    copy[key] = value
    return copy


SMALL = torch.tensor([0.1, 0.2, 0.3, 0.4])
COUNTS = torch.tensor([1, 2, 1, 3])
LABELS = torch.tensor([0, 2, -100])

EQUAL = {
    "arithmetic": [
        lambda x, y, n, m: (x + n, m + n, n + 2.5, x.bfloat16() + 2.5, x.bfloat16() + y, x.half() * y.bfloat16()),
        lambda x, y, n, m: (n / 2, m / 2, n // 2, torch.div(x, y, rounding_mode="trunc"), x % y, torch.fmod(n, 3)),
        lambda x, y, n, m: (n.remainder(-3), 5 - x, 2**x, n.to(torch.int8) + n.to(torch.uint8), torch.lerp(x, y, 0.3)),
        lambda x, y, n, m: (n.abs().sqrt(), m.exp(), n.sigmoid(), m.sign(), n.sign(), n.ceil(), (x * 0 + 2.5).round()),
        lambda x, y, n, m: (x.logical_xor(n), n & 1 | n << 2, n >> 1, torch.atan2(x, n), n == x, torch.maximum(n, y)),
        lambda x, y, n, m: (F.softplus(x * 90), F.softplus(x * 30, 2, 10), F.logsigmoid(x * 100), F.relu(n)),
    ],
    "in place": [
        lambda x, y, n, m: (x.clone().div_(2), n.clone().floor_divide_(2), n.clone().fill_(2.7), n.clone().copy_(x)),
        lambda x, y, n, m: (x.bfloat16().add_(y), x.clone().clamp_(0.5), n.clone().masked_fill_(m, 2.7)),
        lambda x, y, n, m: (
            written(x, 0, y[None, None]),
            written(x, [0, 2], 2.0),
            written(n, 0, 1.7),
            written(x, 1, n[0]),
        ),
    ],
    "reductions": [
        lambda x, y, n, m: (n.sum(0), m.sum(), x.bfloat16().sum(-1), n.sum(-1, dtype=torch.float32), x.sum(dim=())),
        lambda x, y, n, m: (n.mean(dtype=torch.float32), x.mean(dim=()), x.sum().mean(0), m.prod(0), x.amax(())),
        lambda x, y, n, m: (
            x.var(1, correction=-1),
            x.std(1, correction=-1),
            x.detach().var((), unbiased=False),
            x.var(1),
        ),
        lambda x, y, n, m: (
            *torch.var_mean(x, 1, correction=0),
            *torch.std_mean(x),
            x.detach().var(1, correction=7).isinf(),
        ),
        lambda x, y, n, m: (torch.cov(x), torch.cov(x[0], aweights=SMALL), torch.cov(x, correction=0, fweights=COUNTS)),
        lambda x, y, n, m: (m.cumsum(0), n.cumsum(0, dtype=torch.float32), *x.cummax(1), x.logcumsumexp(1), n.any()),
        lambda x, y, n, m: (n.softmax(-1, dtype=torch.float32), x.bfloat16().softmax(-1), x.sum().softmax(0)),
    ],
    "shapes": [
        lambda x, y, n, m: (
            *x.tensor_split([3, 9], 1),
            *torch.tensor_split(x, [-3], 1),
            *x.chunk(5),
            x.t().reshape(-1),
        ),
        lambda x, y, n, m: (
            x.view(torch.int32),
            x.view(torch.int16),
            x.bfloat16().view(torch.int32),
            x.t().view(2, 2, 3),
        ),
        lambda x, y, n, m: (y.clamp(x), n.clamp(0.5), n.clamp(max=y), x.clamp(1.0, -1.0), torch.cat([x, n]), x.mT),
        lambda x, y, n, m: (
            F.pad(n, (1, 2), value=2.5),
            F.pad(x, (-1, 2)),
            x.new_tensor([1.5, 2]),
            n.new_tensor([1.5]),
        ),
        lambda x, y, n, m: (
            F.adaptive_avg_pool2d(x.detach()[None], 0),
            *F.adaptive_max_pool2d(x.detach()[None], 0, True),
        ),
    ],
    "indices": [
        lambda x, y, n, m: (
            x[[0, -1]],
            x[:, n[:2, :2].clamp(0, 3), None],
            x.take(n.abs()),
            x.gather(1, n[:2].clamp(0, 3)),
        ),
        lambda x, y, n, m: (x.index_put((m,), torch.tensor(1.0), accumulate=True), x.index_add(0, LABELS[:2], x[:2])),
        lambda x, y, n, m: (x.scatter_reduce(1, n.clamp(0, 3), x * 2, "amax", include_self=False), x.topk(0, 1)[0]),
        lambda x, y, n, m: F.embedding(n.clamp(0, 2), x, padding_idx=-2),
    ],
    "losses": [
        lambda x, y, n, m: F.cross_entropy(x, LABELS, size_average=False),
        lambda x, y, n, m: F.cross_entropy(x, LABELS, SMALL, label_smoothing=0.2),
        lambda x, y, n, m: F.gaussian_nll_loss(x, y.expand(3, 4), x.exp()[:, :1], full=True),
        lambda x, y, n, m: F.multilabel_margin_loss(x, torch.tensor([[1, 2, -1, 0], [3, 0, 1, 2], [-1, 0, 0, 0]])),
        lambda x, y, n, m: F.multilabel_soft_margin_loss(x, m.float(), reduction="none"),
        lambda x, y, n, m: F.ctc_loss(spoken(x), SPELT, (9, 7), (3, 2)),
        lambda x, y, n, m: F.ctc_loss(
            spoken(x), SPELT, torch.tensor([9, 3]), torch.tensor([3, 3]), 0, "sum", zero_infinity=True
        ),
        lambda x, y, n, m: F.ctc_loss(spoken(x)[:, 0], SPELT[0] - 1, torch.tensor(9), torch.tensor(3), 3, "none"),
        lambda x, y, n, m: F.affine_grid(x[None, :2, :3], (1, 2, 3, 4), align_corners=True),
    ],
}


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:var.*degrees of freedom", "ignore:size_average and reduce")
@pytest.mark.parametrize("group", EQUAL)
def test_values_dtypes_shapes_and_gradients_are_torchs(group):
    module, arrays = Called(*EQUAL[group]), inputs()
    given = [torch.tensor(each, requires_grad=each.dtype == np.float32) for each in arrays]
    expected = [each for each in _pytree.tree_leaves(module(*given)) if isinstance(each, torch.Tensor)]
    follows = [each.requires_grad for each in expected]
    torch.stack([each.float().sin().sum() for each, on in zip(expected, follows, strict=True) if on]).sum().backward()
    function = TorchFunction(module)

    def run(x, y):
        found = jax.tree.leaves(function({}, (x, y, *arrays[2:]), {}))
        terms = (each.astype(np.float32) for each, on in zip(found, follows, strict=True) if on)
        return sum(jax.numpy.sin(each).sum() for each in terms), found

    (_, found), gradients = jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))(*arrays[:2])
    narrow = {"int64": "int32"}
    for k, (value, tensor) in enumerate(zip(found, expected, strict=True)):
        name = str(tensor.dtype).removeprefix("torch.")
        assert (value.dtype.name, value.shape) == (narrow.get(name, name), tuple(tensor.shape)), k
        tolerance = 2e-2 if name in ("bfloat16", "float16") else 1e-5
        if tensor.numel():
            close(value.astype(np.float32), tensor.detach().float().numpy(), tolerance)
    for gradient, tensor in zip(gradients, given[:2], strict=True):
        wanted = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad
        np.testing.assert_allclose(gradient, wanted, rtol=2e-2, atol=2e-2)


REFUSED = {
    "in place dtype": lambda x, y, n, m: n.clone().div_(2),
    "in place sum dtype": lambda x, y, n, m: n.clone().add_(1.5),
    "in place shape": lambda x, y, n, m: y.clone().add_(x),
    "in place overlap": lambda x, y, n, m: y.clone().expand(3, 4).add_(1),
    "matmul dtype": lambda x, y, n, m: x @ y.bfloat16(),
    "linear dtype": lambda x, y, n, m: F.linear(n, x),
    "einsum dtype": lambda x, y, n, m: torch.einsum("ij,kj->ik", x, n),
    "integer softmax": lambda x, y, n, m: n.softmax(-1),
    "integer mean": lambda x, y, n, m: n.mean(),
    "boolean difference": lambda x, y, n, m: m - m,
    "scatter dtype": lambda x, y, n, m: x.scatter(1, n.clamp(0, 3), n),
    "write dtype": lambda x, y, n, m: written(x, torch.tensor([0, 1]), n[0]),
    "twice one dim": lambda x, y, n, m: x.sum((0, 0)),
    "absent dim": lambda x, y, n, m: x.softmax(2),
    "maximum of nothing": lambda x, y, n, m: x[:0].max(),
    "transposed view": lambda x, y, n, m: x.t().view(-1),
    "list beyond": lambda x, y, n, m: x[[0, 7]],
    "tensor beyond": lambda x, y, n, m: x[torch.tensor([0, 7])],
    "write beyond": lambda x, y, n, m: written(x, [0, 7], 2.0),
    "number beyond": lambda x, y, n, m: written(x, 5, 1.0),
    "gathered beyond": lambda x, y, n, m: x.gather(1, torch.tensor([[9]])),
    "selected beyond": lambda x, y, n, m: x.index_select(1, torch.tensor([4])),
    "padding of a pool": lambda x, y, n, m: F.max_pool2d(x[None], 2, padding=2),
    "padding of an output": lambda x, y, n, m: F.conv_transpose1d(x[None], x[:, :2, None], stride=2, output_padding=2),
    "mode of padding": lambda x, y, n, m: F.pad(x, (1, 1), mode="edge"),
    "steps backwards": lambda x, y, n, m: x[0, :3] + torch.arange(0, 3, -1),
    "probability": lambda x, y, n, m: F.dropout(x, 1.5, training=False),
    "sizes": lambda x, y, n, m: x.split([1, 5], 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(name):
    with pytest.raises(Exception) as by_torch:
        REFUSED[name](*(torch.tensor(each) for each in inputs()))
    function = TorchFunction(Called(REFUSED[name]))
    with pytest.raises(type(by_torch.value)) as by_us:
        jax.eval_shape(lambda *given: function({}, given, {}), *inputs())
    assert str(by_us.value).splitlines()[0] == str(by_torch.value).splitlines()[0]


def test_a_refusal_names_the_place():
    class Flattening(nn.Module):
        def forward(self, x):
            return x.t().view(-1)

    with pytest.raises(UserError, match=r"RuntimeError: view size is not compatible .* in Flattening.forward at"):
        from_torch(Flattening(), torch.zeros(3, 4))


def test_repeated_layers_ask_torch_once(monkeypatch):
    asked = []
    outcome = torch_refusals._outcome
    monkeypatch.setattr(torch_refusals, "_known", {})
    monkeypatch.setattr(torch_refusals, "_outcome", lambda *given: asked.append(given[0]) or outcome(*given))
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)))
    from_torch(layers, torch.zeros(2, 4), scan=False)
    assert 2 <= len(asked) <= 4


def test_weights_of_a_compute_dtype_meet_other_floats():
    layers = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))
    program = from_torch(layers, torch.zeros(2, 4), dtype="bfloat16", cast_inputs=False)
    params, batch = program.make_args(0)
    assert jax.eval_shape(program.fn, params, batch).dtype == "float32"
