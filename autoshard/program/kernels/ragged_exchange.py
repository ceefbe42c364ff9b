"""An exchange of rows, grouped by experts, that sends only the real rows to the devices of their experts.

One call changes the order of rows [B, G, R, D] of sequences and groups to [G, B, R, D], or back. Its rule lets a plan
split sequences on one side and groups on the other over the same mesh axes. The call is then an all-to-all that sends
only the filled rows of each group and sequence (`jax.lax.ragged_all_to_all`), not the free slots. The other rows are
zeros at the receiver. CPUs have no such collective and send all rows.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from autoshard.base.call_rules import NEED_REPLICATION, PARALLEL


RAGGED = "ragged_exchange"
"""Common prefix of the calls' names, which end with the real share of their rows."""

B, P, G, Q, R, D = range(6)
"""Factors of the exchange's rule.

`B` are sequences that stay on a device, and `P` those that it exchanges for groups. `G` and `Q` are groups and
sequences of the side that has all of them, `R` rows of a group and `D` features.
"""

# Factors of each dim of rows by sequence, rows by group, and numbers of real rows.
_BY_SEQUENCE: tuple[tuple[int, ...], ...] = ((B, P), (G,), (R,), (D,))
_BY_GROUP: tuple[tuple[int, ...], ...] = ((P,), (B, Q), (R,), (D,))
_FILLED: tuple[tuple[int, ...], ...] = ((B, Q), (G,))


def ragged_exchange(rows: Any, filled: Any, real: int, busiest: float = 1.0) -> Any:
    """Transpose rows [B, G, R, D] to [G, B, R, D], where B is a multiple of G.

    - `filled`: number of real rows among each R, [B, G] int32; the other rows are zeros.
    - `real`: average number of real rows among all B G R, for the price.
    - `busiest`: rows of the busiest device over the mean, where groups are split, for the price.
    """
    return _exchanged(_RealRows(real / math.prod(rows.shape[:3]), busiest), True)(rows, filled)


def ragged_return(rows: Any, filled: Any, real: int, busiest: float = 1.0) -> Any:
    """Transpose rows [G, B, R, D] back to [B, G, R, D]; the arguments are those of `ragged_exchange`."""
    return _exchanged(_RealRows(real / math.prod(rows.shape[:3]), busiest), False)(rows, filled)


@dataclasses.dataclass(frozen=True, slots=True)
class _RealRows:
    """Expected load of an exchange."""

    share: float
    """Share of the rows that is real."""
    busiest: float
    """Rows of the busiest device over the mean."""


@functools.cache
def _exchanged(settings: _RealRows, there: bool) -> Any:
    """Return the exchange as a function of rows and `filled` whose gradient is the exchange back.

    `there` is True from sequences to groups.
    """
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
    """Return the call as a function of whole tensors that stays one op in a program."""
    from jax.experimental.custom_partitioning import custom_partitioning

    partitioned = custom_partitioning(lambda rows, filled: rows.swapaxes(0, 1))
    calls = RaggedCalls(settings, there)
    partitioned.def_partition(calls, sharding_rule=calls.mlir_rule)
    return partitioned


@dataclasses.dataclass(frozen=True, slots=True)
class RaggedCall:
    """One exchange with the shape of its rows."""

    settings: _RealRows
    there: bool
    """True from sequences to groups."""
    shape: tuple[int, ...]
    """Shape of the rows, the first operand."""
    dtype: str

    @property
    def name(self) -> str:
        """Name of the call in a program."""
        return f"{RAGGED}{'' if self.there else '_back'}_{self.settings.share:.4g}"

    @property
    def rule(self) -> tuple[Sequence[int], Sequence[str], Any, Any]:
        """Sizes and kinds of the sharding rule's factors, and factors of each dim of operands and results."""
        batch, groups = self.shape[:2] if self.there else self.shape[1::-1]
        sizes = (batch // groups, groups, groups, groups, *self.shape[2:])
        kinds = (PARALLEL, PARALLEL, NEED_REPLICATION, NEED_REPLICATION, NEED_REPLICATION, PARALLEL)
        sides = (_BY_SEQUENCE, _BY_GROUP) if self.there else (_BY_GROUP, _BY_SEQUENCE)
        return sizes, kinds, (sides[0], _FILLED), (sides[1],)

    @property
    def sent(self) -> float:
        """Share of a device's rows that are real, sent or not."""
        return self.settings.share

    @property
    def uneven(self) -> dict[int, float]:
        """Load of the busiest part over the mean, by factor; empty if it is 1."""
        return {P: self.settings.busiest} if self.settings.busiest > 1 else {}

    def on_shards(self, mesh: Any, into: Sequence[Any], out: Sequence[Any]) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """Return the function that computes the call on shards with these specs, and the specs, unchanged.

        Without a split of groups it is a transpose.
        """
        by_group = out[0] if self.there else into[0]
        entry = by_group[0] if len(by_group) else None
        axes = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        count = math.prod(mesh.shape[axis] for axis in axes)
        if count == 1:
            return (lambda rows, filled: rows.swapaxes(0, 1)), into, out
        return functools.partial(_sent, axes=axes, count=count, there=self.there), into, out


class RaggedCalls:
    """Callbacks for `custom_partitioning`; autoshard itself uses `of`."""

    def __init__(self, settings: _RealRows, there: bool) -> None:
        """Store the expected load; `there` is True from sequences to groups."""
        self.settings, self.there = settings, there

    def of(self, operands: Sequence[Any]) -> RaggedCall:
        """Return the call with these operands."""
        return RaggedCall(self.settings, self.there, tuple(operands[0].shape), str(operands[0].dtype))

    def __call__(self, mesh: Any, operands: Any, results: Any) -> tuple[Any, Any, Any, Any]:
        """Return mesh, function on shards, and shardings of result and operands, for XLA's own split of the sequences.

        Sequences stay on their devices, so that the function is a transpose.
        """
        from jax.sharding import NamedSharding, PartitionSpec

        spec = (*operands[0].sharding.spec, *[None] * 4)[:4]
        batch = spec[0 if self.there else 1]
        by_sequence = NamedSharding(mesh, PartitionSpec(batch, None, None, spec[3]))
        by_group = NamedSharding(mesh, PartitionSpec(None, batch, None, spec[3]))
        filled = NamedSharding(mesh, PartitionSpec(batch, None))
        into, out = (by_sequence, by_group) if self.there else (by_group, by_sequence)
        return mesh, lambda rows, filled: rows.swapaxes(0, 1), out, (into, filled)

    def mlir_rule(self, mesh: Any, operands: Any, results: Any) -> Any:
        """Return the rule in the form of JAX's own partitioning, without an exchange."""
        sides = ("b g r d", "g b r d") if self.there else ("g b r d", "b g r d")
        return f"{sides[0]}, b g -> {sides[1]}", {"need_replication_factors": ("g", "r")}


def _sent(rows: Any, filled: Any, *, axes: tuple[str, ...], count: int, there: bool) -> Any:
    """Send the rows of one of `count` devices: [b, G, R, D] become [G / count, count b, R, D], or back.

    - `filled`: real rows of all sequences that take part, [count b, G] int32.
    - `axes`: mesh axes of the devices.
    - `there`: True from sequences to groups.
    """
    import jax

    return jax.lax.platform_dependent(
        rows,
        filled,
        cpu=functools.partial(_all_rows, axes=axes, count=count, there=there),
        default=functools.partial(_real_rows, axes=axes, count=count, there=there),
    )


def _all_rows(rows: Any, filled: Any, *, axes: tuple[str, ...], count: int, there: bool) -> Any:
    """Send all rows, real or not, for devices without a ragged all-to-all."""
    import jax

    # In both directions the second dim is split, and the first one concatenated.
    return jax.lax.all_to_all(rows, axes, 1, 0, tiled=True).swapaxes(0, 1)


def _real_rows(rows: Any, filled: Any, *, axes: tuple[str, ...], count: int, there: bool) -> Any:
    """Send the real rows only, by `ragged_all_to_all`; the arguments are those of `_sent`."""
    import jax
    import jax.numpy as jnp

    place, room, width = jax.lax.axis_index(axes), rows.shape[2], rows.shape[3]
    batch, groups = filled.shape[0] // count, filled.shape[1] // count
    of_mine = jax.lax.dynamic_slice_in_dim(filled, place * batch, batch, 0)  # [b, G]
    for_me = jax.lax.dynamic_slice_in_dim(filled, place * groups, groups, 1)  # [count b, G / count]
    # Slices are ordered by (other device, group, sequence), where group or sequence is the other device's or this
    # one's.
    theirs = of_mine.reshape(batch, count, groups).transpose(1, 2, 0)
    mine = for_me.reshape(count, batch, groups).transpose(0, 2, 1)
    other, group, sequence = (jax.lax.broadcasted_iota(jnp.int32, (count, groups, batch), dim) for dim in range(3))
    by_sequence = (sequence * (count * groups) + other * groups + group) * room
    by_group = (group * (count * batch) + other * batch + sequence) * room
    # Offsets of the sent slices in the other device's result.
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
