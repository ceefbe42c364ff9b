"""Losses that are no plain mean, in microbatches and groups: equal to eager torch's step of the whole batch."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

from autoshard.program import from_torch


functional = nn.functional


def entropy(out, targets, **options):
    return functional.cross_entropy(out.flatten(0, 1), targets.flatten(), **options)


LOSSES = {
    "ignored": entropy,
    "ignored, scaled": lambda out, targets: -0.5 * (-entropy(out, targets, label_smoothing=0.1)),
    "weighted": lambda out, targets: entropy(out, targets, weight=torch.linspace(0.5, 2, 12)),
    "counted": lambda out, targets: (out.square().mean(-1) * (targets >= 0)).sum() / (targets >= 0).sum(),
    "sum of squares": lambda out, targets: out.square().sum(),
    "summed entropy": lambda out, targets: entropy(out, targets, reduction="sum") / 8 + 0.1 * out.sum(),
    "product": lambda out, targets: out.flatten() @ out.flatten(),
    "mean": lambda out, targets: out.square().mean() + 0.1 * out.abs().mean((1, 2)).mean(),
    "by rows": lambda out, targets: out.square().sum() / len(out),
    "over examples first": lambda out, targets: out.sigmoid().mean(0).mean() + 1,
    "picked": lambda out, targets: -out.log_softmax(-1)[torch.arange(len(out)), 0, targets[:, 0].clamp(min=0)].mean(),
    "picked from rows of all": lambda out, targets: out.flatten(0, 1)[
        torch.arange(targets.numel()), targets.flatten() % 12
    ].mean(),
    "one-hot": lambda out, targets: (torch.zeros_like(out).scatter(-1, targets[..., None] % 12, 1.0) * out).sum(),
    "joined": lambda out, targets: torch.cat([out, out.sin()]).square().mean(),
    "dims merged": lambda out, targets: out.transpose(0, 1).flatten(0, 1).view(4, -1, 2, 6).exp().mean(),
    "dims cut": lambda out, targets: out.reshape(-1, 24).softmax(-1).square().mean(),
}


def steps(loss, **options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 12))
    x, targets = torch.randn(8, 4, 8), torch.randint(12, (8, 4))
    targets[2:4] = -100  # all targets of a microbatch that has every fourth row of two
    targets[0::4] = -100  # all targets of one microbatch
    targets[1, 1:] = -100
    value = loss(module(x), targets)
    value.backward()
    program = from_torch(module, x, train=True, loss=loss, targets=targets, optimizer="momentum", **options)
    params, state, batch = program.make_args(0)
    batch = dict(zip(batch, (x.numpy(), targets.numpy().astype(np.int32)), strict=True))
    _, state, found = jax.jit(program.fn)(params, state, batch)
    return program, (float(value.detach()), dict(module.named_parameters())), (float(found), state[0].trace)


@pytest.mark.few(9)
@pytest.mark.parametrize("options", [{"microbatches": 4}, {"gradient_groups": 2, "microbatches": 2}], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_give_the_step_of_the_whole_batch(name, options):
    program, (value, parameters), (found, gradients) = steps(LOSSES[name], **options)
    assert found == pytest.approx(value, rel=1e-5)
    for key, parameter in parameters.items():
        np.testing.assert_allclose(gradients[key], parameter.grad, rtol=1e-4, atol=1e-6, err_msg=key)
    assert not any("no plain mean" in note for note in program.notes)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("loss", "seen"),
    [
        (lambda out, targets: out.square().mean().sqrt(), "`sqrt`"),
        (lambda out, targets: out.max(), "`reduce_max`"),
        (lambda out, targets: entropy(out, targets) + 0.1 * out.square().mean(), "`add`"),
        (lambda out, targets: out.square().sum() / (targets >= 0).sum().clamp(min=1), "divisor"),
        (lambda out, targets: out.square().sum() / out.detach().abs().sum(), "divisor"),
        (lambda out, targets: (out - out.mean(0)).square().mean(), "mixes examples"),
        (lambda out, targets: (out[: len(out) // 2] - out[len(out) // 2 :]).square().mean(), "`slice`, which mixes"),
        (lambda out, targets: (out[:, 0] @ out[:, 1].T).square().mean(), "mixes examples"),
        (lambda out, targets: torch.cat([out[:, 0], torch.ones(1, 12)]).square().sum(), "mixes examples"),
        (lambda out, targets: out.cumsum(0).mean(), "mixes examples"),
        (lambda out, targets: out[0].square().mean(), "reduced over examples"),
        (lambda out, targets: torch.fft.fft(out.mean(2), dim=0).abs().mean(), "mixes examples"),
        (lambda out, targets: out.view(-1, 2, 48).diff(dim=1).square().mean(), "`reshape`, which mixes"),
        (lambda out, targets: out.view(2, -1, 48).diff(dim=0).square().mean(), "`reshape`, which mixes"),
        (lambda out, targets: (out - out.index_select(0, targets[:, 0] % 2)).square().mean(), "`gather`, which mixes"),
        (lambda out, targets: (out.mean((1, 2)) * torch.arange(len(out))).mean(), "mixes examples"),
        (lambda out, targets: functional.avg_pool1d(out.mean((1, 2))[None], 2).square().mean(), "mixes examples"),
        (lambda out, targets: (out.sum(-1) * (targets >= 0)).sum(0).div((targets >= 0).sum(0)).sum(), "divisor"),
    ],
)
def test_a_loss_that_is_no_sum_over_examples_is_noted(loss, seen):
    program, *_ = steps(loss, microbatches=4)
    (note,) = [note for note in program.notes if "no plain mean" in note]
    assert seen in note and "4 parts" in note
    whole, *_ = steps(loss)
    assert not any("no plain mean" in note for note in whole.notes)


def test_means_are_accumulated_as_without_a_loss_of_ones_own():
    module, x = nn.Linear(8, 8), torch.randn(8, 8)
    own = from_torch(module, x, train=True, loss=lambda out: out.float().square().mean(), microbatches=2)
    kinds = [str(eqn.primitive) for eqn in jax.make_jaxpr(own.fn)(*own.args).eqns]
    default = from_torch(module, x, train=True, microbatches=2)
    assert kinds == [str(eqn.primitive) for eqn in jax.make_jaxpr(default.fn)(*default.args).eqns]


def test_flops_are_those_of_the_whole_batch():
    parts, *_ = steps(entropy, microbatches=4)
    whole, *_ = steps(entropy)
    assert parts.model_flops == whole.model_flops > 0


def test_a_decoders_own_loss_is_that_of_the_whole_batch():
    import transformers

    torch.manual_seed(0)
    fields = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, **fields)
    module = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(32, (4, 8))
    labels = ids.clone()
    labels[::2, 3:] = -100
    inputs = {"input_ids": ids, "labels": labels}
    value = module(**inputs)["loss"]
    value.backward()
    options = {"train": True, "loss": lambda out: out["loss"], "optimizer": "momentum", "remat": "full"}
    program = from_torch(module, (), inputs, microbatches=2, **options)
    params, state, batch = program.make_args(0)
    batch = {key: inputs[key].numpy().astype(leaf.dtype) for key, leaf in batch.items()}
    _, state, found = jax.jit(program.fn)(params, state, batch)
    assert float(found) == pytest.approx(float(value.detach()), rel=1e-5)
    expected = module.model.layers[1].mlp.up_proj.weight.grad
    gradient = state[0].trace["model.layers.*.mlp.up_proj.weight"][1]
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-6)
