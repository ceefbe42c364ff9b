"""Operands of scans in the installed jax."""

import jax
import jax.numpy as jnp

from autoshard.program import scan_operands


def test_constant_and_carried_operands_are_distinguished_from_sliced_ones():
    def run(weight, bias, x, rows):
        return jax.lax.scan(lambda c, row: ((c[0] @ weight + bias, c[1] + 1), row * 2), (x, 0), rows)

    jaxpr = jax.make_jaxpr(run)(jnp.ones((4, 4)), jnp.ones(4), jnp.ones((2, 4)), jnp.ones((3, 5))).jaxpr
    (equation,) = [each for each in jaxpr.eqns if each.primitive.name == "scan"]
    assert scan_operands(equation) == (2, 2)
    assert [each.aval.shape for each in equation.invars] == [(4, 4), (4,), (2, 4), (), (3, 5)]
