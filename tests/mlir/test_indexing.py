"""Guards of indexed ops: inserted only where XLA needs them."""

import jax.numpy as jnp
import pytest
from jax import lax

import autoshard


def planned_text(fn, *args, **pins: str) -> str:
    plan = autoshard.plan(autoshard.trace(fn, args), topology="cpu:8", mesh={"d": 8}, pins=pins)
    return plan.jit(fn).lower(*args).as_text()


X, START = jnp.zeros((16, 8)), jnp.int32(3)


def row(x, u, i):
    return lax.dynamic_update_slice(x, u, (i, 0))


@pytest.mark.parametrize(
    ("fn", "args", "pins", "clamps", "barriers"),
    [
        (lambda x, i: lax.dynamic_slice(x, (i, 0), (4, 8)), (X, START), {}, 1, 0),
        (lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 8)), (X, START), {}, 0, 0),  # one row is no dim to split
        (lambda x: lax.dynamic_slice(x, (2, 0), (4, 8)), (X,), {}, 0, 0),
        (lambda x: lax.dynamic_slice(x, (13, 0), (4, 8)), (X,), {}, 1, 0),
        (lambda x, i: jnp.take(x, jnp.array([1, 2]), 0, mode="clip") + i, (X, START), {}, 0, 0),  # rows
        (row, (X.T, X.T[:1], START), {"x": "None,d"}, 0, 0),
        (lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)), (X.T, X.T[:, :1], START), {"x": "None,d"}, 1, 0),
        # a scan's stacks stay whole
        (lambda x: lax.scan(lambda c, t: (c + t, c * t), x[0], x), (X,), {"x": "None,d"}, 0, 0),
        (lambda x: jnp.roll(x, 1, 0).at[0].set(0), (X,), {"x": "None,None", "result": "d,None"}, 0, 1),
        (lambda x: x.at[0].set(0), (X,), {"x": "d,None"}, 0, 0),
        (lambda x, i: jnp.zeros_like(x).at[i].add(x[0]), (X, START), {"result": "d,None"}, 0, 0),  # nothing is cut
    ],
)
def test_guards_stand_only_where_they_are_needed(fn, args, pins, clamps: int, barriers: int):
    names = {f"{name}": spec for name, spec in pins.items()}
    text = planned_text(fn, *args, **names)
    assert (text.count("stablehlo.clamp"), text.count("stablehlo.optimization_barrier")) == (clamps, barriers), text


@pytest.mark.heavy
def test_arguments_of_four_bits_can_be_given():
    def fn(x, w):
        return x @ w.astype(jnp.float32), w + w

    x, w = jnp.ones((16, 16)), (jnp.arange(256).reshape(16, 16) % 4).astype("int4")
    plan = autoshard.plan(autoshard.trace(fn, (x, w)), topology="cpu:8", mesh={"d": 8})
    product, doubled = plan.jit(fn)(x, w)
    assert (product == x @ w.astype(jnp.float32)).all() and (doubled == w + w).all()
    assert (plan.jit(fn)(x, doubled)[1] == 2 * doubled).all()  # a result of the doubled index as well
