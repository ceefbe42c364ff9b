"""Dispatch of tokens to their experts and back by sorting: each sequence's tokens are ordered by groups of experts.

Every group has the same number of rows in each sequence, so that a mesh can split first sequences and then groups of
experts. Between the two is an all-to-all, of all padded rows or of the real ones. Within a group tokens are ordered by
expert.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from autoshard.program.kernels.ragged_exchange import ragged_exchange, ragged_return


class Dispatch(NamedTuple):
    """The destinations of the tokens of each sequence."""

    to_groups: Callable[[Any], Any]
    """Function from tokens [B, S, D] to rows [B, G, R, D]; unused rows of a group are zeros."""
    from_groups: Callable[[Any], Any]
    """Function from rows [B, G, R, D] to results of each token's experts [B, S, K, D]; dropped ones are zeros."""
    sizes: Callable[[], Any]
    """Function that returns the rows of each expert [B, G, E / G] (int32), without dropped ones.

    A group's experts are contiguous.
    """

    def by_group(self, real: int | None, busiest: float = 1.0) -> "ByGroup":
        """Return the dispatch with groups before sequences, so that a mesh exchanges the one for the other.

        `real` is the expected number of real rows of all sequences; only real ones are sent. None: all rows are sent.
        `busiest` is the load of the busiest device over the mean, for the price of sending real rows.
        """
        sizes = self.sizes()
        if real is None:
            return ByGroup(
                lambda x: self.to_groups(x).swapaxes(0, 1),
                lambda out: self.from_groups(out.swapaxes(0, 1)),
                sizes.swapaxes(0, 1),
            )
        filled = sizes.sum(-1)
        return ByGroup(
            lambda x: ragged_exchange(self.to_groups(x), filled, real, busiest),
            lambda out: self.from_groups(ragged_return(out, filled, real, busiest)),
            sizes.swapaxes(0, 1),
        )


class ByGroup(NamedTuple):
    """The dispatch of tokens with groups of experts as the first dim."""

    to_rows: Callable[[Any], Any]
    """Function from tokens [B, S, D] to rows [G, B, R, D]; unused rows of a group are zeros."""
    from_rows: Callable[[Any], Any]
    """Function from rows [G, B, R, D] to results of each token's experts [B, S, K, D]; dropped ones are zeros."""
    sizes: Any
    """Rows of each expert [G, B, E / G] (int32)."""


def rows_for_all(length: int, active: int, experts: int, groups: int) -> int:
    """Return the rows that a group of experts needs so that no token of a sequence is ever dropped.

    - `length`: tokens of a sequence.
    - `active`: experts of a token.
    - `experts`, `groups`: numbers of experts and of their groups.
    """
    return length * min(active, experts // groups)


def rows_of(length: int, active: int, experts: int, groups: int, factor: float | None) -> int:
    """Return the rows of a group in a sequence: `factor` times the mean number, rounded up, at least 1.

    The result is never more than `rows_for_all`.
    `factor` None stands for `rows_for_all`; the other arguments are those of `rows_for_all`.
    """
    most = rows_for_all(length, active, experts, groups)
    return most if factor is None else min(most, max(1, math.ceil(length * active * factor / groups)))


def dispatch(chosen: Any, experts: int, groups: int, rows: int) -> Dispatch:
    """Return the dispatch by `chosen` [B, S, K], the experts of each token, with `rows` rows for each group.

    The first tokens of a group get its rows (lower experts first, then earlier tokens); tokens beyond are dropped.
    `groups` must divide `experts`. One group has no more than S K rows.
    """
    import jax
    import jax.numpy as jnp

    batch, length, count = chosen.shape
    pairs, each = length * count, experts // groups
    flat = chosen.reshape(batch, pairs)
    order = jnp.argsort(flat, axis=1, stable=True)
    first = jax.vmap(lambda row: jnp.searchsorted(jnp.take(row[0], row[1]), jnp.arange(experts + 1)))((flat, order))
    if rows >= pairs and groups == 1:
        to_pairs, to_rows = _Places(order, None), _Places(jnp.argsort(order, axis=1), None)
    else:
        begins, group = (first, flat) if each == 1 else (first[:, ::each], flat // each)
        place = begins[:, :-1, None] + jnp.arange(rows)
        used = place < begins[:, 1:, None]
        of = jnp.take_along_axis(order, jnp.minimum(place, pairs - 1).reshape(batch, -1), axis=1)
        to_pairs = _Places(of, used.reshape(batch, -1))
        rank = jnp.argsort(order, axis=1) - jnp.take_along_axis(begins, group, axis=1)
        to_rows = _Places(group * rows + jnp.minimum(rank, rows - 1), rank < rows)
    there, back = _exchange(count, to_pairs, to_rows)

    def sizes() -> Any:
        begins = first[:, :-1:each, None]
        ends = jnp.minimum(first[:, 1:].reshape(batch, groups, each) - begins, rows)
        return jnp.diff(ends, axis=2, prepend=0).astype(jnp.int32)

    return Dispatch(
        lambda x: there(x).reshape(batch, groups, -1, x.shape[-1]),
        lambda out: back(out.reshape(batch, -1, out.shape[-1])).reshape(batch, length, count, out.shape[-1]),
        sizes,
    )


class _Places(NamedTuple):
    """The position of each row [B, N] in another order, and a mask of the real rows (None: all are)."""

    of: Any
    real: Any


def _exchange(count: int, pairs: _Places, slots: _Places) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return functions from tokens [B, S, D] to slots [B, N, D], and from slots to pairs [B, S K, D].

    `pairs` has the pair of each slot, and `slots` the slot of each pair. Each function is the gradient of the other. So
    the gradient contains no scatter-add, which TPUs execute row by row.
    """
    import jax
    import jax.numpy as jnp

    def taken(rows: Any, places: _Places, each: int = 1) -> Any:
        moved = jnp.take_along_axis(rows, (places.of // each)[..., None], axis=1)
        return moved if places.real is None else jnp.where(places.real[..., None], moved, 0)

    @jax.custom_vjp
    def there(x: Any, pairs: _Places, slots: _Places) -> Any:
        return taken(x, pairs, count)

    @jax.custom_vjp
    def back(rows: Any, pairs: _Places, slots: _Places) -> Any:
        return taken(rows, slots)

    def there_gradient(kept: tuple[_Places, _Places], of: Any) -> tuple[Any, None, None]:
        moved = taken(of, kept[1])
        return moved.reshape(moved.shape[0], -1, count, moved.shape[-1]).sum(2), None, None

    there.defvjp(lambda x, pairs, slots: (there(x, pairs, slots), (pairs, slots)), there_gradient)
    back.defvjp(
        lambda rows, pairs, slots: (back(rows, pairs, slots), (pairs, slots)),
        lambda kept, of: (taken(of, kept[0]), None, None),
    )
    return lambda x: there(x, pairs, slots), lambda rows: back(rows, pairs, slots)
