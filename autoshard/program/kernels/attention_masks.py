"""Shares of attention's scores that a causal mask or a window leaves: of single scores, and of blocks in kernels."""

from typing import Any


def seen_share(length: int, keys: int, causal: bool, window: int | None) -> float:
    """Return the share of `length` x `keys` scores that are not masked; as many queries as keys are assumed.

    It is 1 without a causal mask, even with a window, and 0.5 under a causal mask without a window below `keys`.
    """
    if not causal:
        return 1.0
    if window is None or window >= keys:
        return 0.5
    # The first `window` rows see half a window each on average, all others a whole one.
    return window * (1 - window / (2 * keys)) / keys


def computed_share(length: int, keys: int, causal: bool, window: int | None, block: tuple[int, int]) -> float:
    """Return the share of the scores that a kernel computes, if the kernel skips only fully masked blocks.

    - `length`, `keys`: numbers of queries and keys.
    - `causal`, `window`: masks of the scores, as in `_computed`.
    - `block`: (queries, keys) of one block.
    """
    computed, columns = _computed(length, keys, causal, window, block), -(-keys // block[1])
    return sum(computed) / (len(computed) * columns)


def grid_steps(length: int, keys: int, causal: bool, window: int | None, block: tuple[int, int]) -> int:
    """Return the number of blocks of scores that the kernel of `computed_share` computes, for one head."""
    return sum(_computed(length, keys, causal, window, block))


def _computed(length: int, keys: int, causal: bool, window: int | None, block: tuple[int, int]) -> list[int]:
    """Return the number of blocks that are not fully masked, for each row of blocks.

    Under a causal mask the last query sees the last key, and with a window only the last `window` keys. Without a
    causal mask all blocks count, even with a window.
    """
    high, wide = block
    rows, columns = -(-length // high), -(-keys // wide)
    if not causal:
        return [columns] * rows
    late = keys - length  # the last query sees the last key
    counts = []
    for row in range(rows):
        first, last = row * high + late, min((row + 1) * high, length) - 1 + late
        begin = 0 if window is None else max(0, first - window + 1) // wide
        counts.append(max(0, min(columns - 1, last // wide) - begin + 1))
    return counts


def visible_scores(length: int, keys: int, causal: bool, window: int | None, first: Any) -> Any:
    """Return [1, 1, 1, S, T] booleans, true where a query sees key t; None if all queries see all keys.

    Query s of `length` is at position s + `first`. Causal queries see keys up to their position, and with a window
    only the last `window` of them. Other queries with a window see keys less than `window` away on both sides.
    """
    import jax
    import jax.numpy as jnp

    if not causal and window is None:
        return None
    shape = (1, 1, 1, length, keys)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 3) + first
    column = jax.lax.broadcasted_iota(jnp.int32, shape, 4)
    visible = row >= column if causal else None
    if window is not None:
        near = row - column < window if causal else abs(row - column) < window
        visible = near if visible is None else visible & near
    return visible
