"""Calls of torch that model libraries make, against their meaning, and calls that cannot be planned."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

from autoshard.errors import UserError
from autoshard.program import from_torch
from autoshard.program.torch_ops.op_lowerings import embedding_bag


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x, counts):
        return torch.ops.aten._grouped_mm(x, self.w, offs=torch.cumsum(counts, 0, dtype=torch.int32))


def test_grouped_matmul_is_one_of_each_group_and_differentiates():
    torch.manual_seed(0)
    module, x, counts = Experts(), torch.randn(7, 4), torch.tensor([2, 0, 4])
    program = from_torch(module, (x, counts), train=True, optimizer="momentum")
    params, state, _ = program.make_args(0)
    batch = {"x": x.numpy(), "counts": counts.numpy().astype(np.int32)}
    _, after, loss = jax.jit(program.fn)(params, state, batch)
    parts = [x[:2] @ module.w[0], x[2:2] @ module.w[1], x[2:6] @ module.w[2], torch.zeros(1, 5)]
    wanted = torch.cat(parts).square().mean()
    wanted.backward()
    assert module.w.grad is not None
    assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-5)
    np.testing.assert_allclose(after[0].trace["w"], module.w.grad.numpy(), atol=1e-6)
    assert program.model_flops == pytest.approx(3 * 2 * 7 * 4 * 5)


@pytest.mark.parametrize(
    ("mode", "options"),
    [("mean", {"padding_idx": 1}), ("sum", {}), ("max", {}), ("sum", {"include_last_offset": True})],
)
@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 2, 2, 5])], ids=["rows", "offsets"])
def test_bags_of_embeddings_are_torchs_own(mode, options, offsets):
    torch.manual_seed(0)
    if offsets is None and "include_last_offset" in options:
        offsets = torch.tensor([0, 1, 5])
    module = nn.EmbeddingBag(6, 4, mode=mode, **{**options})
    ids = torch.tensor([1, 4, 3, 1, 5]) if offsets is not None else torch.tensor([[1, 4], [3, 0]])
    inputs = (ids,) if offsets is None else (ids, offsets)
    program = from_torch(module, inputs)
    params, _ = program.make_args(0)
    batch = {key: value.numpy() for key, value in zip(program.args[1], inputs, strict=True)}
    np.testing.assert_allclose(jax.jit(program.fn)(params, batch), module(*inputs).detach(), rtol=1e-6)


def test_bags_of_weighted_rows_are_torchs_own():
    rng = np.random.default_rng(0)
    table, weights = (rng.standard_normal(shape).astype(np.float32) for shape in ((7, 5), (3, 4)))
    ids = rng.integers(0, 7, (3, 4))
    given = [torch.tensor(each) for each in (ids, table, weights)]
    wanted = nn.functional.embedding_bag(*given[:2], mode="sum", per_sample_weights=given[2])
    found = embedding_bag(ids, jax.numpy.asarray(table), mode="sum", per_sample_weights=weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", [None, 2, -1, -6])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_padding_of_bags_may_count_from_the_end(mode, padding):
    ids, table = torch.tensor([[1, 5, 2], [0, 5, 5]]), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    wanted = nn.functional.embedding_bag(ids, table, mode=mode, padding_idx=padding)
    found = embedding_bag(ids.numpy(), jax.numpy.asarray(table.numpy()), mode=mode, padding_idx=padding)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("padding", [None, 2, -1])
def test_the_row_of_padding_has_no_gradient_as_in_torch(padding):
    torch.manual_seed(0)
    module, ids = nn.Embedding(6, 4, padding_idx=padding), torch.tensor([[2, 4, 5], [2, 0, 0]])
    nn.init.normal_(module.weight)  # torch initialises a row of zeros for padding, whose gradient is zero here anyway
    program = from_torch(module, ids, train=True, optimizer="momentum")
    params, state, _ = program.make_args(0)
    batch = {key: ids.numpy() for key in program.args[2]}
    _, after, _ = jax.jit(program.fn)(params, state, batch)
    module(ids).square().mean().backward()
    np.testing.assert_allclose(after[0].trace["weight"], module.weight.grad.numpy(), atol=1e-7)
    assert padding is None or not after[0].trace["weight"][padding].any()


def test_a_triton_kernel_is_refused_with_what_works():
    triton = pytest.importorskip("triton")

    @triton.jit
    def kernel(x):
        pass

    class Calling(nn.Module):
        def forward(self, x):
            kernel[(1,)](x)
            return x

    with pytest.raises(
        UserError, match=r"calls a Triton kernel in Calling.forward .* call the equal torch code instead"
    ):
        from_torch(Calling(), torch.zeros(3))
