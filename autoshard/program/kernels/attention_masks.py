"""Which of attention's scores a causal mask or a window leaves: each, all told, and in blocks that kernels compute."""

from typing import Any


def seen_share(length: int, keys: int, causal: bool, window: int | None) -> float:
    """Share of `length` x `keys` scores that are not masked."""
    if not causal:
        return 1.0
    if window is None or window >= keys:
        return 0.5
    return window * (1 - window / (2 * keys)) / keys


def computed_share(length: int, keys: int, causal: bool, window: int | None, block: tuple[int, int]) -> float:
    """Share of the scores that a kernel computes which skips only blocks (queries, keys) that are masked whole."""
    computed, whole = _computed(length, keys, causal, window, block), -(-keys // block[1])
    return sum(computed) / (len(computed) * whole)


def grid_steps(length: int, keys: int, causal: bool, window: int | None, block: tuple[int, int]) -> int:
    """Steps of such a kernel's grid for one head that compute something."""
    return sum(_computed(length, keys, causal, window, block))


def _computed(length: int, keys: int, causal: bool, window: int | None, block: tuple[int, int]) -> list[int]:
    """Blocks that are not masked whole, of each row of blocks."""
    high, wide = block
    rows, columns = -(-length // high), -(-keys // wide)
    if not causal:
        return [columns] * rows
    late = keys - length  # the last query sees the last key
    found = []
    for row in range(rows):
        first, last = row * high + late, min((row + 1) * high, length) - 1 + late
        begin = 0 if window is None else max(0, first - window + 1) // wide
        found.append(max(0, min(columns - 1, last // wide) - begin + 1))
    return found


def visible_scores(length: int, keys: int, causal: bool, window: int | None, first: Any) -> Any:
    """[1, 1, 1, S, T] boolean, true where query s + `first` sees key t; None if every one sees all."""
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
