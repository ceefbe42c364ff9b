"""Concrete values of abstract arguments: the same for the same seed, and quick for arrays of any size."""

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
from autoshard.program.example_values import DRAWN


def made(*shape: int, dtype=jnp.float32):
    program = autoshard.trace(lambda batch: 2.0 * batch, (jax.ShapeDtypeStruct(shape, dtype),))
    assert program.make_args is not None
    return program.make_args(3)[0]


def test_small_arrays_are_drawn_whole() -> None:
    drawn = made(64, 32)
    assert drawn.shape == (64, 32)
    assert len(np.unique(drawn)) == drawn.size
    np.testing.assert_array_equal(drawn, made(64, 32))


def test_large_arrays_repeat_numbers_but_no_row_of_a_shard_is_another_one() -> None:
    drawn = np.asarray(made(8, 4096, 1024, dtype=jnp.bfloat16))
    assert drawn.size > DRAWN
    flat = drawn.reshape(-1)
    np.testing.assert_array_equal(flat[DRAWN:], flat[: flat.size - DRAWN])
    rows = drawn.reshape(-1, 1024)[:, :64].astype(np.float32)
    assert len(np.unique(rows, axis=0)) == len(rows)
