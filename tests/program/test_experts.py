"""Experts by einsum: a step of one token a sequence beside a pass over the same tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.program._experts import mix


BATCH, DIM, INNER, EXPERTS = 6, 8, 5, 4


def arguments() -> tuple[Any, ...]:
    """Tokens [6, 1, 8], weights and mask [6, 1, 4] of two experts each, and the weights of the experts."""
    random = np.random.default_rng(0)
    x, gate_up, down = (
        jnp.asarray(random.standard_normal(shape), jnp.float32)
        for shape in ((BATCH, 1, DIM), (EXPERTS, 2 * INNER, DIM), (EXPERTS, DIM, INNER))
    )
    scores = random.random((BATCH, 1, EXPERTS))
    mask = scores >= np.sort(scores, -1)[..., -2:-1]
    return x, jnp.asarray(scores * mask, jnp.float32), jnp.asarray(mask), gate_up, down


def experts(*values: Any) -> Any:
    return mix(*values, jax.nn.silu, EXPERTS)  # as many slots as tokens: none is dropped


def test_a_token_of_each_sequence_gets_what_its_experts_make_of_it() -> None:
    x, weights, mask, gate_up, down = arguments()
    gate, up = (jnp.einsum("bsd,eid->bsei", x, half) for half in jnp.split(gate_up, 2, axis=1))
    expected = jnp.einsum("bse,bsei,edi->bsd", weights, jax.nn.silu(gate) * up, down)
    np.testing.assert_allclose(experts(x, weights, mask, gate_up, down), expected, rtol=1e-5, atol=1e-5)
    along = experts(*(jnp.swapaxes(value, 0, 1) for value in (x, weights, mask)), gate_up, down)
    np.testing.assert_allclose(jnp.swapaxes(along, 0, 1), expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_sliced_of_weights_where_one_token_is_decoded() -> None:
    program = jax.make_jaxpr(experts)(*arguments())
    weight = program.jaxpr.invars[3]
    assert [eqn.primitive.name for eqn in program.jaxpr.eqns if weight in eqn.invars] == ["dot_general"]
