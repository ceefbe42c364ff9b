"""Optimizers of traced steps: the dtypes of their state, and of their arithmetic."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import torch
from torch import nn

from autoshard.program import from_torch
from autoshard.program.jax.optimizers import LEARNING_RATE, make_optimizer


STORED = [("adamw", 2), ("momentum", 1), ("lion", 1), ("sgd", 0)]


def of_role(program, role):
    return [a for a in program.arguments if a.role.value == role and a.shape]


def in_bytes(arguments):
    return sum(math.prod(a.shape) * np.dtype(getattr(ml_dtypes, a.dtype, a.dtype)).itemsize for a in arguments)


@pytest.mark.parametrize(("optimizer", "moments"), STORED)
@pytest.mark.parametrize("asked", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("how", ["module", "option"])
def test_moments_are_stored_as_asked_with_narrow_parameters(optimizer, moments, asked, how):
    module = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    x = torch.ones(2, 8)
    if how == "module":
        module, x = module.bfloat16(), x.bfloat16()
    options = {"param_dtype": "bfloat16"} if how == "option" else {}
    program = from_torch(module, x, train=True, optimizer=optimizer, state_dtype=asked, **options)
    count = 8 * 16 + 16 + 16 * 4 + 4
    assert in_bytes(of_role(program, "parameter")) == 2 * count
    assert in_bytes(of_role(program, "optimizer_state")) == moments * count * (2 if asked == "bfloat16" else 4)
    updated = {r.name: r.dtype for r in program.results}
    assert all(updated[a.name] == a.dtype for a in program.arguments if a.name in updated)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_steps_of_narrow_parameters_are_those_of_torch_with_wide_moments(optimizer):
    torch.manual_seed(0)
    module, x = nn.Linear(8, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    program = from_torch(module, x, train=True, optimizer=optimizer)
    params, state, _ = program.make_args(0)
    batch = {key: x.float().numpy().astype(ml_dtypes.bfloat16) for key in program.args[2]}
    wide = [p.detach().float().clone().requires_grad_() for p in module.parameters()]
    rule = (
        torch.optim.AdamW(wide, LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        if optimizer == "adamw"
        else torch.optim.SGD(wide, LEARNING_RATE, momentum=0.9)
    )
    step = jax.jit(program.fn)
    for _ in range(3):
        module.zero_grad()
        module(x).float().square().mean().backward()
        for exact, own in zip(wide, module.parameters(), strict=True):
            exact.data, exact.grad = own.detach().float(), own.grad.float()
        rule.step()
        for exact, own in zip(wide, module.parameters(), strict=True):
            own.data = exact.detach().bfloat16()
        params, state, _ = step(params, state, batch)
    for name, own in module.named_parameters():
        assert params[name].dtype == jnp.bfloat16
        # The difference is one rounding of bf16, as for gradients that are summed in another order.
        np.testing.assert_allclose(params[name].astype(np.float32), own.detach().float().numpy(), rtol=2**-7)
    mine = jax.tree.leaves(state[0].mu if optimizer == "adamw" else state[0].trace)
    key = "exp_avg" if optimizer == "adamw" else "momentum_buffer"
    for value in mine:
        assert value.dtype == jnp.float32
        (want,) = (rule.state[p][key].numpy() for p in wide if p.shape == value.shape)
        np.testing.assert_allclose(value, want, rtol=0.03, atol=1e-4)


def test_a_pair_of_dtypes_is_that_of_first_and_second_moments():
    params = {"mu": jnp.ones((3, 2), jnp.bfloat16)}
    optimizer = make_optimizer("adamw", ("bfloat16", "float32"))
    state = optimizer.init(params)
    for _ in range(2):
        assert [x.dtype for x in jax.tree.leaves((state[0].mu, state[0].nu))] == [jnp.bfloat16, jnp.float32]
        updates, state = optimizer.update(params, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(state[0].nu["mu"], 0.0975, rtol=0.01)


def of_even_scales(rng, *shape):
    """Return matrices whose singular values are within a factor of 4: small ones would show rounding of bf16."""
    left, _, right = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    return (left * rng.uniform(0.25, 1, left.shape[:-2] + (1, left.shape[-1])) @ right).astype(np.float32)


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_muon_updates_each_matrix_of_a_stack_as_torchs_does(shape):
    rng = np.random.default_rng(0)
    start = rng.standard_normal((3, *shape)).astype(np.float32)
    theirs = [nn.Parameter(torch.tensor(each)) for each in start]
    rule = torch.optim.Muon(theirs, LEARNING_RATE, weight_decay=0.1, momentum=0.95)
    optimizer = make_optimizer("muon", "float32")
    params: Any = {"layers.*.weight": jnp.array(start)}
    state = optimizer.init(params)
    for _ in range(3):
        gradients = of_even_scales(rng, 3, *shape)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = torch.tensor(gradient)
        rule.step()
        updates, state = optimizer.update({"layers.*.weight": jnp.array(gradients)}, state, params)
        params = optax.apply_updates(params, updates)
    moved = np.stack([parameter.detach().numpy() for parameter in theirs]) - start
    np.testing.assert_allclose(params["layers.*.weight"] - start, moved, atol=0.03 * np.abs(moved).max())


def test_muon_leaves_embeddings_heads_norms_and_biases_to_adamw():
    names = {
        "model.embed_tokens.weight": (256, 64),
        "lm_head.weight": (256, 64),
        "transformer.wte.weight": (256, 64),
        "model.layers.*.input_layernorm.weight": (4, 64),
        "model.layers.*.mlp.up_proj.bias": (4, 128),
        "patch.weight": (8, 3, 4, 4),
        "model.layers.*.mlp.up_proj.weight": (4, 128, 64),
        "model.layers.*.mlp.experts.gate_up_proj": (4, 8, 64, 128),
        "mixer.weight": (64, 64),
    }
    params = {name: jnp.ones(shape) for name, shape in names.items()}
    inner = make_optimizer("muon").init(params).inner_states
    assert {name for name, leaf in inner["muon"].inner_state[0].trace.items() if isinstance(leaf, jax.Array)} == {
        "model.layers.*.mlp.up_proj.weight",
        "model.layers.*.mlp.experts.gate_up_proj",
        "mixer.weight",
    }


def test_adafactor_stores_a_row_and_a_column_of_each_matrix():
    program = from_torch(nn.Linear(256, 512), torch.ones(2, 256), train=True, optimizer="adafactor")
    shapes = sorted(a.shape for a in of_role(program, "optimizer_state") if math.prod(a.shape) > 1)
    assert shapes == [(256,), (512,), (512,)]  # row and column of the matrix, moments of the bias
