"""Rows that lie by groups of experts go to the devices of their experts, and only those that are real.

One call changes the order of rows [B, G, R, D] of sequences and groups to [G, B, R, D], or back. Its rule lets a plan
split sequences on one side and groups on the other over the same mesh axes: then the call is an all-to-all in which a
device sends what each group of each sequence has (`jax.lax.ragged_all_to_all`), not what it has room for. Rows beyond
them are zeros where they arrive. CPUs have no such collective and send all rows.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from autoshard.base.call_rules import NEED_REPLICATION, PARALLEL


RAGGED = "ragged_exchange"
"""Beginning of the calls' names, which end with the share of their rows that is real."""

B, P, G, Q, R, D = range(6)
"""Factors: sequences that stay on a device, those that it exchanges for groups, groups and sequences of a side that has
all of them, rows of a group, features."""

_BY_SEQUENCE: tuple[tuple[int, ...], ...] = ((B, P), (G,), (R,), (D,))
_BY_GROUP: tuple[tuple[int, ...], ...] = ((P,), (B, Q), (R,), (D,))
_FILLED: tuple[tuple[int, ...], ...] = ((B, Q), (G,))


def ragged_exchange(rows: Any, filled: Any, real: int, busiest: float = 1.0) -> Any:
    """Rows [B, G, R, D] as [G, B, R, D]; the first `filled` [B, G] (int32) of each R are real, the others zeros.

    `real` of the B G R rows are so on average; the busiest of the devices that groups are split over has `busiest`
    times their mean number. B is a multiple of G.
    """
    return _exchanged(_RealRows(real / math.prod(rows.shape[:3]), busiest), True)(rows, filled)


def ragged_return(rows: Any, filled: Any, real: int, busiest: float = 1.0) -> Any:
    """The way back: rows [G, B, R, D] as [B, G, R, D]."""
    return _exchanged(_RealRows(real / math.prod(rows.shape[:3]), busiest), False)(rows, filled)


@dataclasses.dataclass(frozen=True, slots=True)
class _RealRows:
    share: float
    """The share of the rows that is real."""
    busiest: float


@functools.cache
def _exchanged(settings: _RealRows, there: bool) -> Any:
    import jax

    @jax.custom_vjp
    def exchanged(rows: Any, filled: Any) -> Any:
        return _call(settings, there)(rows, filled)

    exchanged.defvjp(
        lambda rows, filled: (exchanged(rows, filled), filled),
        lambda filled, of: (_call(settings, not there)(of, filled), None),
    )
    return exchanged


@functools.cache
def _call(settings: _RealRows, there: bool) -> Any:
    """The call as a function of whole tensors that stays one op in a program."""
    from jax.experimental.custom_partitioning import custom_partitioning

    found = custom_partitioning(lambda rows, filled: rows.swapaxes(0, 1))
    calls = RaggedCalls(settings, there)
    found.def_partition(calls, sharding_rule=calls.mlir_rule)
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class RaggedCall:
    """One call with its shapes."""

    settings: _RealRows
    there: bool
    shape: tuple[int, ...]
    """The shape of its rows."""
    dtype: str

    @property
    def name(self) -> str:
        return f"{RAGGED}{'' if self.there else '_back'}_{self.settings.share:.4g}"

    @property
    def rule(self) -> tuple[Sequence[int], Sequence[str], Any, Any]:
        """(sizes, kinds, operands, results) of the sharding rule."""
        batch, groups = self.shape[:2] if self.there else self.shape[1::-1]
        sizes = (batch // groups, groups, groups, groups, *self.shape[2:])
        kinds = (PARALLEL, PARALLEL, NEED_REPLICATION, NEED_REPLICATION, NEED_REPLICATION, PARALLEL)
        sides = (_BY_SEQUENCE, _BY_GROUP) if self.there else (_BY_GROUP, _BY_SEQUENCE)
        return sizes, kinds, (sides[0], _FILLED), (sides[1],)

    @property
    def sent(self) -> float:
        """Share of a device's rows that it sends, or keeps for itself."""
        return self.settings.share

    @property
    def uneven(self) -> dict[int, float]:
        """Times the mean that the busiest part has, by factor."""
        return {P: self.settings.busiest} if self.settings.busiest > 1 else {}

    def on_shards(self, mesh: Any, into: Sequence[Any], out: Sequence[Any]) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """The call on shards with these specs."""
        by_group = out[0] if self.there else into[0]
        entry = by_group[0] if len(by_group) else None
        axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        count = math.prod(mesh.shape[axis] for axis in axes)
        if count == 1:
            return (lambda rows, filled: rows.swapaxes(0, 1)), into, out
        return functools.partial(_sent, axes=axes, count=count, there=self.there), into, out


class RaggedCalls:
    """What `custom_partitioning` asks for; a program of ours asks for `of`."""

    def __init__(self, settings: _RealRows, there: bool) -> None:
        self.settings, self.there = settings, there

    def of(self, operands: Sequence[Any]) -> RaggedCall:
        """The call with these operands."""
        return RaggedCall(self.settings, self.there, tuple(operands[0].shape), str(operands[0].dtype))

    def __call__(self, mesh: Any, operands: Any, results: Any) -> tuple[Any, Any, Any, Any]:
        """As XLA has split the sequences, which stay where they are."""
        from jax.sharding import NamedSharding, PartitionSpec

        spec = (*operands[0].sharding.spec, *[None] * 4)[:4]
        batch = spec[0 if self.there else 1]
        by_sequence = NamedSharding(mesh, PartitionSpec(batch, None, None, spec[3]))
        by_group = NamedSharding(mesh, PartitionSpec(None, batch, None, spec[3]))
        filled = NamedSharding(mesh, PartitionSpec(batch, None))
        into, out = (by_sequence, by_group) if self.there else (by_group, by_sequence)
        return mesh, lambda rows, filled: rows.swapaxes(0, 1), out, (into, filled)

    def mlir_rule(self, mesh: Any, operands: Any, results: Any) -> Any:
        """The rule as JAX's own partitioning takes it, in which nothing is exchanged."""
        sides = ("b g r d", "g b r d") if self.there else ("g b r d", "b g r d")
        return f"{sides[0]}, b g -> {sides[1]}", {"need_replication_factors": ("g", "r")}


def _sent(rows: Any, filled: Any, *, axes: tuple[str, ...], count: int, there: bool) -> Any:
    """On one of `count` devices: its sequences' rows [b, G, R, D] for its groups' [G / count, count b, R, D], or back.

    `filled` [count b, G] is of all sequences that take part.
    """
    import jax

    return jax.lax.platform_dependent(
        rows,
        filled,
        cpu=functools.partial(_all_rows, axes=axes, count=count, there=there),
        default=functools.partial(_real_rows, axes=axes, count=count, there=there),
    )


def _all_rows(rows: Any, filled: Any, *, axes: tuple[str, ...], count: int, there: bool) -> Any:
    import jax

    # Either way the second dim is taken apart, and the first one put together.
    return jax.lax.all_to_all(rows, axes, 1, 0, tiled=True).swapaxes(0, 1)


def _real_rows(rows: Any, filled: Any, *, axes: tuple[str, ...], count: int, there: bool) -> Any:
    import jax
    import jax.numpy as jnp

    place, room, width = jax.lax.axis_index(axes), rows.shape[2], rows.shape[3]
    batch, groups = filled.shape[0] // count, filled.shape[1] // count
    of_mine = jax.lax.dynamic_slice_in_dim(filled, place * batch, batch, 0)  # [b, G]
    for_me = jax.lax.dynamic_slice_in_dim(filled, place * groups, groups, 1)  # [count b, G / count]
    # Slices in the order of (other device, its or my group, its or my sequence).
    theirs = of_mine.reshape(batch, count, groups).transpose(1, 2, 0)
    mine = for_me.reshape(count, batch, groups).transpose(0, 2, 1)
    other, group, sequence = (jax.lax.broadcasted_iota(jnp.int32, (count, groups, batch), dim) for dim in range(3))
    by_sequence = (sequence * (count * groups) + other * groups + group) * room
    by_group = (group * (count * batch) + other * batch + sequence) * room
    # What I send lies at another device as if it were the other side of mine.
    at_groups = (group * (count * batch) + place * batch + sequence) * room
    at_sequences = (sequence * (count * groups) + place * groups + group) * room
    begins, sizes, ends, comes, shape = (
        (by_sequence, theirs, at_groups, mine, (groups, count * batch))
        if there
        else (by_group, mine, at_sequences, theirs, (batch, count * groups))
    )
    flat = jax.lax.ragged_all_to_all(
        rows.reshape(-1, width),
        jnp.zeros((math.prod(shape) * room, width), rows.dtype),
        *(each.reshape(-1) for each in (begins, sizes, ends, comes)),
        axis_name=axes,
    )
    return flat.reshape(*shape, room, width)
