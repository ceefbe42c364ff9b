"""`autoshard.sample_tokens` on one device, against sorting the probabilities in numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import UserError, sample_tokens
from autoshard.program.jax import token_sampling


KEY = jax.random.key(7)


def logits(rows: int = 4, vocabulary: int = 1000, dtype: Any = jnp.float32, scale: float = 3.0) -> Any:
    values = np.random.default_rng(rows).normal(size=(rows, vocabulary)) * scale
    return jnp.asarray(values, dtype)


def drawn(given: Any, count: int = 400, **options: Any) -> list[set[int]]:
    """Draw `count` tokens for each row; return the set of each."""
    keys = jax.random.split(KEY, count)
    tokens = jax.vmap(lambda key: sample_tokens(given, key, **options))(keys)
    return [set(row) for row in np.asarray(tokens).T.tolist()]


def nucleus(given: Any, share: float) -> list[set[int]]:
    """Return the fewest most likely tokens of each row whose probabilities sum to `share`, with ties, in float64."""
    found = []
    for row in np.asarray(given, np.float64):
        order = np.argsort(-row, kind="stable")
        shares = np.exp(row[order] - row.max())
        shares /= shares.sum()
        last = int(np.argmax(np.cumsum(shares) >= share))
        found.append(set(np.flatnonzero(row >= row[order[last]]).tolist()))
    return found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_nucleus_is_that_of_sorted_probabilities(dtype: Any, share: float):
    given = logits(dtype=dtype)
    kept = token_sampling._likely(given, given.astype(jnp.float32), share)
    assert [set(np.flatnonzero(row).tolist()) for row in np.asarray(kept)] == nucleus(given, share)


def test_a_nucleus_keeps_ties_and_negative_zero_equals_zero():
    given = jnp.array([[0.0, -0.0, -5.0, 0.0], [1.0, 1.0, 1.0, 1.0], [9.0, -jnp.inf, -jnp.inf, 0.0]])
    assert drawn(given, top_p=0.3) == [{0, 1, 3}, {0, 1, 2, 3}, {0}]


def test_tokens_are_drawn_by_their_probabilities():
    given = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    keys = jax.random.split(KEY, 4000)

    def shares(**options: Any) -> Any:
        tokens = jax.vmap(lambda key: sample_tokens(given, key, **options))(keys)
        return np.bincount(np.asarray(tokens)[:, 0], minlength=4) / len(keys)

    np.testing.assert_allclose(shares(), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(shares(top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(top_p=0.9), np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.03)
    np.testing.assert_allclose(shares(top_k=3, top_p=0.8), [0.625, 0.375, 0, 0], atol=0.03)
    squared = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    np.testing.assert_allclose(shares(temperature=0.5), squared / squared.sum(), atol=0.03)


def test_a_temperature_of_zero_and_one_token_are_the_most_likely():
    given = logits()
    wanted = jnp.argmax(given, axis=-1)
    assert (sample_tokens(given, temperature=0) == wanted).all()
    assert (sample_tokens(given, KEY, top_k=1) == wanted).all()
    assert (sample_tokens(given, KEY, top_p=1e-9) == wanted).all()


def test_rows_may_have_temperatures_of_their_own():
    given = logits(rows=2)
    cold, hot = drawn(given, temperature=jnp.array([1e-4, 50.0]))
    assert cold == {int(given[0].argmax())} and len(hot) > 100


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((1000,), {}, r"logits are float32\[1000\]; give floating-point logits \[batch, vocabulary\]"),
        ((4, 1, 1000), {}, r"logits are float32\[4, 1, 1000\]"),
        ((4, 1000), {"top_k": 1001}, "top_k is 1001; give 1 to 1000, the size of the vocabulary"),
        ((4, 1000), {"top_k": 0}, "top_k is 0; give 1 to 1000"),
        ((4, 1000), {"top_p": 0.0}, "top_p is 0.0; give a number above 0 and at most 1"),
        ((4, 1000), {"top_p": 1.5}, "top_p is 1.5; give a number above 0 and at most 1"),
        ((4, 1000), {"temperature": -1.0}, "temperature is -1.0; give 0 for the most likely token, or more"),
    ],
)
def test_other_arguments_are_refused(shape: tuple[int, ...], options: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        sample_tokens(jnp.zeros(shape), KEY, **options)


def test_integer_logits_and_a_missing_key_are_refused():
    with pytest.raises(UserError, match=r"logits are int32\[4, 10\]; give floating-point"):
        sample_tokens(jnp.zeros((4, 10), jnp.int32), KEY)
    with pytest.raises(UserError, match="key is missing; give a key of `jax.random`, or temperature=0"):
        sample_tokens(jnp.zeros((4, 10)))
