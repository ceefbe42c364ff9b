"""Tests of modules that compute something else in training."""

import random

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from autoshard import UserError
from autoshard.exec.run.eager_check import check_eager
from autoshard.program import from_torch


class Sampling(nn.Module):
    """A layer with noise in both modes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x) + torch.randn_like(x)


def test_noise_in_both_modes_is_noted():
    said = "The module draws random numbers, which are the same ones in every planned step: give them as an input."
    for module, noted in ((Sampling(), True), (nn.Linear(6, 6), False)):
        program = from_torch(module, (torch.ones(4, 6),), train=True, loss=lambda out: out.square().mean())
        assert (said in program.notes) == noted


class Codebook(nn.Module):
    """Codes that follow the averages of their inputs in training."""

    codes: torch.Tensor
    count: torch.Tensor
    steps: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 6))
        self.register_buffer("count", torch.ones(5))
        self.register_buffer("steps", torch.tensor(0), persistent=False)

    def forward(self, x):
        near = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            self.update(x, near)
        return x + (self.codes[near] - x).detach()

    @torch.no_grad()
    def update(self, x, near):
        hot = functional.one_hot(near, 5).to(x.dtype)
        self.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        self.codes.copy_(0.9 * self.codes + 0.1 * (hot.t() @ x) / self.count.unsqueeze(1))
        self.steps += 1


class Gated(nn.Module):
    """A layer with another factor and dropout in training."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = x + torch.tanh(self.linear(x)) * (0.5 if self.training else 1.0)
        return functional.dropout(x, 0.5, self.training)


class Paths(nn.Module):
    """A residual that is dropped at random in training."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x + (self.linear(x) * x.new_empty(len(x), 1).bernoulli_(0.5) if self.training else self.linear(x))


class Counted(Paths):
    """A residual that is dropped at random, and counted."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.steps += 1
        return super().forward(x)


class Noisy(nn.Module):
    """Noise in both modes, and a count in training."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.steps += 1
        return self.linear(x) + torch.randn_like(x)


class Skipping(nn.Module):
    """A layer that Python skips at random in training."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x if self.training and random.random() < 0.5 else self.linear(x)


def step_of(*layers, **options):
    torch.manual_seed(0)
    return from_torch(nn.Sequential(*layers), (torch.randn(16, 6),), train=True, **options)


@pytest.mark.parametrize("evaluated", (False, True))
def test_a_training_step_is_that_of_a_module_in_training_mode(evaluated):
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), Codebook(), Gated()]
    module = nn.Sequential(*layers).train(not evaluated)
    x = torch.randn(16, 6)
    program = from_torch(module, (x,), train=True)
    assert module.training is not evaluated and layers[2].training is not evaluated
    params, state, _, buffers = program.make_args(0)
    before = {name: value.clone() for name, value in module.named_buffers()}
    *_, updated, loss = jax.jit(program.fn)(params, state, {"input": x.numpy()}, buffers)
    module.train()
    layers[3].training = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "dropout", lambda x, p, training: x)
        wanted = module(x).square().mean()
    np.testing.assert_allclose(float(loss), wanted.item(), rtol=1e-5)
    for name, value in module.named_buffers():
        assert not torch.equal(value, before[name])
        np.testing.assert_allclose(np.asarray(updated[name]), value.numpy(), rtol=2e-5, atol=1e-6)
    assert "Dropout is off in the planned step." in program.notes
    assert check_eager(program).agrees


@pytest.mark.parametrize("scan", (False, True))
def test_layers_in_training_mode_are_scanned(scan):
    program = step_of(*[Gated() for _ in range(4)], scan=scan)
    assert bool(program.layers) is scan
    found = check_eager(program)
    assert found.agrees and not found.skipped


def test_a_batch_norm_that_the_user_froze_keeps_its_statistics():
    frozen, trained = nn.BatchNorm1d(6).eval(), nn.BatchNorm1d(6)
    program = step_of(nn.Linear(6, 6), frozen, trained)
    result = check_eager(program)
    assert result.agrees and result.compared["buffer"] == 6
    buffers = program.make_args(0)[-1]
    updated = jax.jit(program.fn)(*program.make_args(0))[2]
    changed = [name for name in buffers if not np.array_equal(buffers[name], updated[name])]
    assert sorted(changed) == ["2.num_batches_tracked", "2.running_mean", "2.running_var"]
    assert not frozen.training and trained.training


def test_random_paths_of_training_are_left_out_with_a_note():
    program = step_of(Paths(), nn.Linear(6, 6))
    note = next(note for note in program.notes if "`Paths` runs in evaluation mode" in note)
    assert "test_module_mode.py:" in note
    assert check_eager(program).agrees


def test_a_class_that_draws_and_updates_buffers_is_refused_with_the_line():
    with pytest.raises(UserError, match=r"`Counted` updates its buffer `0.steps` and draws .* at test_module_mode.py:"):
        step_of(Counted())


def test_noise_of_both_modes_keeps_the_training_mode():
    program = step_of(Noisy())
    assert not any("evaluation" in note for note in program.notes)
    assert any(result.name.endswith("0.steps") for result in program.results)


def test_layers_that_python_skips_at_random_are_not_skipped():
    before = random.getstate()
    program = step_of(Skipping())
    assert any("draws random numbers by Python's `random`" in note for note in program.notes)
    assert random.getstate() == before and check_eager(program).agrees
