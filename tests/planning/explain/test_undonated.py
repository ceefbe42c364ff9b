"""Warnings about memory: state that a step replaces but does not donate, and caches copied to another layout."""

import jax
import jax.numpy as jnp
import pytest

import autoshard


def step(params, x):
    grads = jax.grad(lambda params: jnp.mean(jnp.tanh(x @ params["w"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


ARGS = {"w": jax.ShapeDtypeStruct((16384, 16384), jnp.float32)}, jax.ShapeDtypeStruct((8, 16384), jnp.float32)


@pytest.mark.parametrize(("donated", "count"), [((), 1), ((0,), 0)])
def test_state_that_is_not_donated_is_named_with_what_that_saves(donated, count: int) -> None:
    program = autoshard.trace(step, ARGS, donate_argnums=donated)
    plan = autoshard.plan(program, topology="v5e:1x1", mesh={"data": 1})
    lines = [line for line in plan.warnings if "not donated" in line]
    assert len(lines) == count
    if count:
        assert lines[0].startswith(
            "`params.w` is replaced by results and not donated: donate_argnums saves up to 1.00 GiB"
        )


def test_small_state_is_not_worth_a_warning() -> None:
    args = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, jax.ShapeDtypeStruct((8, 64), jnp.float32)
    plan = autoshard.plan(autoshard.trace(step, args), topology="v5e:1x1", mesh={"data": 1})
    assert not any("not donated" in line for line in plan.warnings)


def test_a_cache_whose_batch_dims_do_not_lead_is_named_with_a_better_shape() -> None:
    layers, batch, places, heads, size = 8, 16, 4096, 8, 128

    def decode(keys, x):
        def layer(x, k):
            chances = jax.nn.softmax(jnp.einsum("bkgd,bpkd->bkgp", x, k))
            return jnp.einsum("bkgp,bpkd->bkgd", chances, k), None

        return jax.lax.scan(layer, x, keys)[0]

    cache = jax.ShapeDtypeStruct((layers, batch, places, heads, size), jnp.bfloat16)
    program = autoshard.trace(decode, (cache, jax.ShapeDtypeStruct((batch, heads, 4, size), jnp.bfloat16)))
    for topology, count in (("h100:1", 1), ("v5e:1x1", 0)):
        lines = [line for line in autoshard.plan(program, topology=topology).warnings if "needs no copy" in line]
        assert len(lines) == count
        if count:
            assert "`keys` of shape [8, 16, 4096, 8, 128]" in lines[0] and "[8, 16, 8, 4096, 128]" in lines[0]
