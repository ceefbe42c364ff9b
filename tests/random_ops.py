"""Kinds of op of the random programs: one template each, a line of JAX that computes an array (`random_ops.txt`).

Fields of a template are existing values, each with its least rank after it:

- `f` float32, `g` like `f` and of its shape, `x` any float, `y` like `x`, `t` float32 with exactly equal elements;
- `i` integers, `j` like `i`, `b` booleans, `c` complex numbers, `v` any dtype;
- `d` a vector of indices, half of them out of range.

`at` is an axis of the preceding value, `size` its size there, `order` an order of its axes. `start` is an index near an
end of that axis or past it, either constant or traced. `k` is a number from 1 to 3, `mode` is JAX's mode for indices
out of range.

Values stay small and finite. Discontinuous ops (comparing, rounding, the largest) get integers or `t`, so that rounding
decides nothing.
"""

from pathlib import Path


PRELUDE = """
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.custom_vjp
def halved(x):
    return 0.5 * jnp.tanh(x)


halved.defvjp(lambda x: (halved(x), x), lambda x, g: (0.5 * g * (1 - jnp.tanh(x) ** 2),))


@jax.custom_jvp
def bent(x):
    return jnp.sin(x)


bent.defjvp(lambda primals, tangents: (jnp.sin(*primals), jnp.cos(*primals) * tangents[0]))


def positive(x):
    rows = jnp.tanh(x)
    return rows @ jnp.swapaxes(rows, -1, -2) / x.shape[-1] + 2.0 * jnp.eye(x.shape[-2])


def clipped(x):
    return jnp.tanh(jnp.nan_to_num(x))


def kernel(*shape):
    return jnp.asarray(np.linspace(-1, 1, int(np.prod(shape))).reshape(shape), "float32")


def windows(x, init, reducer, size, stride=1, padding="VALID", dilation=1, base=1):
    def all_but_last(last):
        return (*[1] * (x.ndim - 1), last)

    return lax.reduce_window(
        x, np.asarray(init, x.dtype), reducer, all_but_last(size), all_but_last(stride), padding,
        base_dilation=all_but_last(base), window_dilation=all_but_last(dilation),
    )


def largest_first(pair, other):
    first = (pair[0] > other[0]) | ((pair[0] == other[0]) & (pair[1] < other[1]))
    return jnp.where(first, pair[0], other[0]), jnp.where(first, pair[1], other[1])


def write_cache(cache, rows, at):
    return lax.dynamic_update_slice(cache, rows, (at, *[0] * (cache.ndim - 1)))
"""

KINDS = tuple(
    line
    for line in (Path(__file__).parent / "random_ops.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
"""Templates, one for each kind of op."""
