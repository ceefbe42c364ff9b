"""Causes for which architectures of transformers were refused, each in the smallest form that shows it."""

import inspect

import jax
import numpy as np
import pytest
import torch
from hf_reference import close
from torch import nn

from autoshard.program import from_torch


def both(module, *given):
    """What a module computes itself, and what its program does."""
    empty = tuple(torch.tensor(each).to("meta") for each in given)
    program = from_torch(module, empty)
    params, batch, *buffers = program.make_args(0)
    params = {key: value.detach().numpy() for key, value in module.named_parameters()}
    names = list(inspect.signature(module.forward).parameters)
    assert batch.keys() == set(names)
    found = jax.jit(program.fn)(params, dict(zip(names, given, strict=True)), *buffers)
    with torch.no_grad():
        wanted = module(*(torch.tensor(each) for each in given))
    return program, jax.tree.leaves(found), jax.tree.leaves(wanted)


def test_linear_of_one_row_and_indices_of_32_bits():
    class Scores(nn.Module):
        def forward(self, x, row):
            best = x.argsort(-1)
            return nn.functional.linear(x, row), torch.take_along_dim(x, best, dim=1), x.take_along_dim(best, 1)

    x, row = np.random.default_rng(0).standard_normal((3, 4), np.float32), np.arange(4, dtype=np.float32)
    _, found, wanted = both(Scores(), x, row)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs.numpy(), 1e-6)


def test_values_of_buffers_that_decide_what_is_computed():
    """EoMT masks attention only in layers whose probability is not zero, which a buffer says."""

    class Scheduled(nn.Module):
        def __init__(self):
            super().__init__()
            self.probability = nn.Buffer(torch.tensor([0.0, 1.0]))
            self.shift = nn.Buffer(torch.ones(3))

        def forward(self, x):
            for step in range(2):
                x = x * 3 if self.probability[step] > 0 else x - self.shift
            return x

    program, found, wanted = both(Scheduled(), np.arange(6, dtype=np.float32).reshape(2, 3))
    close(found[0], wanted[0].numpy())
    assert any("follows from values of its buffers: `probability` and 1 more" in note for note in program.notes)


def test_what_is_written_into_known_values_is_known(monkeypatch):
    """Longformer writes into a slice of a large mask, and then asks whether there is anything in it."""
    from autoshard.program import _environment

    monkeypatch.setattr(_environment, "_FOLDED_ELEMENTS", 4)

    class Marking(nn.Module):
        def forward(self, x):
            mask = torch.zeros(2, 3, x.shape[-1])
            mask[mask == 5] = 7.0
            part = mask[:, 0, :]
            part[part == 0] = 2.0
            return x * 2 if part.min().item() == 2 and mask.max().item() == 2 else x

    _, found, wanted = both(Marking(), np.arange(6, dtype=np.float32).reshape(2, 3))
    close(found[0], wanted[0].numpy())


def test_of_parts_that_take_turns_the_first_is_planned():
    from autoshard.program._hf_model import acting

    class Part(nn.Module):
        from_pretrained = None

        def forward(self, x):
            return x

    class Second(Part):
        pass

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.first, self.second = nn.LayerNorm(2), Part(), Second()

    whole = Whole()
    part, said = acting(whole)
    assert part is whole.first
    assert "`Part`. `architectures` may name another: Second." in said[0]
    assert acting(part) == (part, ())
    assert acting(nn.Module())[1] == ()


@pytest.mark.full
def test_experts_of_dbrx_equal_their_own():
    from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
    from transformers.models.dbrx.modeling_dbrx import DbrxExperts

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            config = DbrxFFNConfig(hidden_size=8, ffn_hidden_size=6, moe_num_experts=4, moe_top_k=2)
            config.hidden_size = 8
            self.experts = DbrxExperts(config)
            for each in self.experts.parameters():
                nn.init.normal_(each)

        def forward(self, x, chosen, share):
            return self.experts(x, chosen, share)

    rng = np.random.default_rng(0)
    x, share = rng.standard_normal((2, 3, 8), np.float32), rng.random((6, 2), np.float32)
    chosen = np.array([[0, 1], [2, 3], [1, 2], [3, 0], [1, 3], [2, 0]])
    _, found, wanted = both(Experts(), x, chosen, share)
    close(found[0], wanted[0].numpy(), 1e-5)


@pytest.mark.parametrize(("rope", "refused"), [(0, False), (8, True)])
def test_heads_that_positions_do_not_turn_may_be_none(rope, refused):
    from autoshard.errors import UserError
    from autoshard.program._config import read_config

    fields = {"model_type": "glm5_next", "text_config": {"head_dim": 0, "qk_rope_head_dim": rope}}
    if refused:
        with pytest.raises(UserError, match="head_dim is '0'"):
            read_config(fields)
    else:
        read_config(fields)
