"""How tokens get to their experts and back by sorting: each sequence's tokens lie by groups of experts, in order.

Every group has the same number of rows in each sequence, so that a mesh can split sequences first and groups of experts
then: between the two lies an all-to-all, padded to those rows, or of those that are real. Within a group tokens lie by
expert.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from autoshard.program.kernels.ragged_exchange import ragged_exchange, ragged_return


class Dispatch(NamedTuple):
    """Where the tokens of each sequence go."""

    to_groups: Callable[[Any], Any]
    """Tokens [B, S, D] to rows [B, G, R, D]; zeros where a group has fewer."""
    from_groups: Callable[[Any], Any]
    """Rows [B, G, R, D] to what became of each pair of token and expert [B, S, K, D]; zeros for what was dropped."""
    sizes: Callable[[], Any]
    """Rows of each expert [B, G, E / G] (int32): within a group those of its experts follow one another."""

    def by_group(self, real: int | None, busiest: float = 1.0) -> "ByGroup":
        """The same with groups before sequences, which is where a mesh exchanges one for the other.

        `real`: of all rows so many are real, and only these are sent, up to `busiest` times their mean to a device;
        None: all are.
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
    """What tokens of a group are."""

    there: Callable[[Any], Any]
    """Tokens [B, S, D] to rows [G, B, R, D]; zeros where a group has fewer."""
    back: Callable[[Any], Any]
    """Rows [G, B, R, D] to what became of each pair of token and expert [B, S, K, D]; zeros for what was dropped."""
    sizes: Any
    """Rows of each expert [G, B, E / G] (int32)."""


def rows_for_all(length: int, active: int, experts: int, groups: int) -> int:
    """Rows that a group of experts needs so that no token of a sequence is ever dropped."""
    return length * min(active, experts // groups)


def rows_of(length: int, active: int, experts: int, groups: int, factor: float | None) -> int:
    """Rows of a group in a sequence: `factor` times the mean number, if given, and never more than all may need."""
    most = rows_for_all(length, active, experts, groups)
    return most if factor is None else min(most, max(1, math.ceil(length * active * factor / groups)))


def dispatch(chosen: Any, experts: int, groups: int, rows: int) -> Dispatch:
    """By `chosen` [B, S, K], the experts of each token; each group of experts has `rows` rows in a sequence.

    The first tokens of a group have them (lower experts first); those beyond are dropped.
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
    """For each row [B, N] the one of another order that it is, and whether it is one at all (None: all are)."""

    of: Any
    real: Any


def _exchange(count: int, pairs: _Places, slots: _Places) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """How tokens [B, S, D] come into slots [B, N, D], and what slots hold to pairs of token and expert [B, S K, D].

    `pairs`: for each slot its pair; `slots`: for each pair its slot. Each way is the gradient of the other, so that
    nothing is added where it may meet, which TPUs do row by row.
    """
    import jax
    import jax.numpy as jnp

    def taken(rows: Any, places: _Places, each: int = 1) -> Any:
        found = jnp.take_along_axis(rows, (places.of // each)[..., None], axis=1)
        return found if places.real is None else jnp.where(places.real[..., None], found, 0)

    @jax.custom_vjp
    def there(x: Any, pairs: _Places, slots: _Places) -> Any:
        return taken(x, pairs, count)

    @jax.custom_vjp
    def back(rows: Any, pairs: _Places, slots: _Places) -> Any:
        return taken(rows, slots)

    def there_gradient(kept: tuple[_Places, _Places], of: Any) -> tuple[Any, None, None]:
        found = taken(of, kept[1])
        return found.reshape(found.shape[0], -1, count, found.shape[-1]).sum(2), None, None

    there.defvjp(lambda x, pairs, slots: (there(x, pairs, slots), (pairs, slots)), there_gradient)
    back.defvjp(
        lambda rows, pairs, slots: (back(rows, pairs, slots), (pairs, slots)),
        lambda kept, of: (taken(of, kept[0]), None, None),
    )
    return lambda x: there(x, pairs, slots), lambda rows: back(rows, pairs, slots)
