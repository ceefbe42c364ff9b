"""Shares of attention's scores that a causal mask or a window leaves: of single scores, and of blocks in kernels."""

from typing import Any


def seen_share(length: int, keys: int, causal: bool, window: int | None) -> float:
    """Return the share of `length` x `keys` scores that are not masked; masks are those of `_computed`.

    Half of the diagonal counts, so that a causal mask over as many queries as keys leaves 0.5.
    """
    if not causal and window is None:
        return 1.0
    # A query at position p sees the keys from p - window to p, or to p + window without a causal mask.
    ahead, behind = 0 if causal else window or 0, keys if window is None else window
    first = keys - length

    def twice_below(end: int) -> int:
        """Return twice the integral of the number of keys below a position, over positions up to `end`."""
        inside = min(max(end, 0), keys)
        # integral from 0 to x of min(p, keys) dp = m (x - m / 2), with m = min(x, keys)
        return inside * (2 * max(end, 0) - inside)

    upper = twice_below(keys + ahead) - twice_below(first + ahead)
    lower = twice_below(keys - behind) - twice_below(first - behind)
    return (upper - lower) / (2 * length * keys)


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

    The last query is at the last key. Under a causal mask queries see keys up to their position, and with a window only
    the last `window` of them. Other queries with a window see keys less than `window` away on both sides.
    """
    high, wide = block
    rows, columns = -(-length // high), -(-keys // wide)
    late = keys - length
    counts = []
    for row in range(rows):
        first, last = row * high + late, min((row + 1) * high, length) - 1 + late
        begin = 0 if window is None else max(0, first - window + 1) // wide
        seen = last if causal else keys - 1 if window is None else last + window - 1
        counts.append(max(0, min(columns - 1, seen // wide) - begin + 1))
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
