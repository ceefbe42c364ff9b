"""Attention whose keys and values go around a ring: one call, in which every device has a part of the sequence.

The call has a sharding rule like any other, in which queries, keys and values share their sequence. If a plan splits
the sequence, each device computes with its present keys while it sends them on, until all keys have passed. Otherwise
the call is attention by blocks of keys.

Under a causal mask device i of n has the parts i and 2n - 1 - i of 2n (zigzag). Every device then has equal work at
every turn, and no fully masked block is computed. Parts are exchanged when the call begins, and back when it ends.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from autoshard.base.call_rules import NEED_REPLICATION, PARALLEL
from autoshard.program import model_flops
from autoshard.program.kernels.attention_masks import computed_share, grid_steps, seen_share
from autoshard.program.kernels.ring_pieces import KEYS, How, added, piece, piece_back, ring_side
from autoshard.program.kernels.splash_attention import LANES


RING = "ring_attention"
"""Common prefix of the calls' names."""

B, K, G, S, D, E, U = range(7)
"""Factors: batch, key heads, query heads for each key head, parts of the sequence, head dims, tokens of a part.

`D` is the head dim of keys, `E` that of values.
"""

_QUERY, _KEY, _VALUE, _MIXED, _ROWS = ((B, K, G, S, D), (B, K, S, D), (B, K, S, E), (B, K, G, S, E), (B, K, G, S))
_SIDES = (
    ((_QUERY, _KEY, _VALUE), (_MIXED, _ROWS)),
    ((_QUERY, _KEY, _VALUE, _MIXED, _ROWS, _MIXED), (_QUERY, _KEY, _VALUE)),
)
"""Factors of operands and results, forward and backward."""


def ring_refusal(query: Sequence[int], key: Sequence[int], *, window: bool, softcap: bool) -> str:
    """Return the first reason why an attention cannot go around a ring; empty if it can.

    As many queries as keys are needed.

    - `query`, `key`: shapes [..., S, D] and [..., T, D].
    - `window`, `softcap`: True if the attention has a window or bounded scores.
    """
    if query[-2] != key[-2]:
        return f"{query[-2]} queries of {key[-2]} keys do not share one sequence"
    if window:
        return "it sees a window only, for which neighbours are enough"
    return "its scores are capped" if softcap else ""


def ring_attention(
    query: Any, key: Any, value: Any, *, causal: bool, scale: float | None = None, kernel: bool = False
) -> Any:
    """Compute softmax attention as a ring call; return [B, K, G, S, E].

    - `query`: [B, K, G, S, D]; each of the K key-value heads serves G query heads.
    - `key`, `value`: [B, K, S, D] and [B, K, S, E].
    - `causal`: True if query s sees only keys up to s.
    - `scale`: factor of the scores; None for D ** -0.5.
    - `kernel`: compute pieces by jax's splash kernel if S is a multiple of 256, two of its least blocks.

    Without the kernel, scores of `KEYS` keys at a time are in memory. Model FLOPs are recorded.
    """
    length, size = query.shape[3], query.shape[4]
    scores = math.prod(query.shape[:4]) * length * seen_share(length, length, causal, None)
    model_flops.record(2.0 * scores * (size + value.shape[3]))
    settings = _Settings(causal, How(kernel and length % (2 * LANES) == 0))
    scaled = (query * (size**-0.5 if scale is None else scale)).astype(query.dtype)
    return _differentiable(settings)(scaled, key, value)


class _Settings(NamedTuple):
    """Mask of a ring call, and the computation of its pieces."""

    causal: bool
    how: How

    @property
    def unit(self) -> int:
        """Least number of tokens that stay on one device: two halves for a causal mask or a kernel.

        Each half is a multiple of a kernel's block. It is 1 without a causal mask and without the kernel.
        """
        return 2 * LANES if self.how.kernel else 2 if self.causal else 1


@functools.cache
def _differentiable(settings: _Settings) -> Any:
    """Return the ring call as a function with a custom gradient."""
    import jax
    from jax.ad_checkpoint import checkpoint_name

    forward, backward = _call(settings, False), _call(settings, True)

    def saving(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
        # If both are saved under this name, the backward pass needs no second forward turn around the ring.
        out, total = (checkpoint_name(each, "context") for each in forward(query, key, value))
        return out, (query, key, value, out, total)

    differentiable = jax.custom_vjp(lambda *given: forward(*given)[0])
    differentiable.defvjp(saving, lambda saved, gradient: tuple(backward(*saved, gradient)))
    return differentiable


@functools.cache
def _call(settings: _Settings, back: bool) -> Any:
    """Return the call as a function of whole tensors that stays one op in a program."""
    from jax.experimental.custom_partitioning import custom_partitioning

    run = functools.partial(_ring_backward if back else _ring_forward, settings=settings, ring=_Ring((), 1))
    partitioned = custom_partitioning(lambda *given: run(*given))
    calls = RingCalls(settings, back)
    partitioned.def_partition(calls, sharding_rule=calls.mlir_rule)
    return partitioned


@dataclasses.dataclass(frozen=True, slots=True)
class RingCall:
    """One ring call with the shapes of its operands."""

    settings: _Settings
    back: bool
    """True for the backward call."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the call's operands, in order."""
    dtype: str
    """Dtype of the queries."""

    @property
    def name(self) -> str:
        """Name of the call in a program."""
        return f"{RING}{'_causal' if self.settings.causal else '_full'}{'_backward' if self.back else ''}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the factors `B` to `U`; a sequence that is no multiple of the unit is one part."""
        query, value = self.shapes[0], self.shapes[2]
        unit = self.settings.unit if query[3] % self.settings.unit == 0 else query[3]
        return (*query[:3], query[3] // unit, query[4], value[3], unit)

    @property
    def rule(self) -> tuple[Sequence[int], Sequence[str], Any, Any]:
        """Sizes and kinds of the sharding rule's factors, and factors of each dim of operands and results."""
        # Gradients of keys are sums over the query heads that share them, so that these heads are not split there.
        kinds = [PARALLEL, PARALLEL, NEED_REPLICATION if self.back else PARALLEL, PARALLEL, *[NEED_REPLICATION] * 3]
        operands, results = (
            [[(f, U) if f == S else (f,) for f in dims] for dims in side] for side in _SIDES[self.back]
        )
        return self.sizes, kinds, operands, results

    @property
    def flops(self) -> int:
        """FLOPs of the matmuls over the scores that are computed, on all devices.

        There are two forward, and backward seven with kernels or five without.
        """
        matmuls = 2 if not self.back else 7 if self.settings.how.kernel else 5
        query, value = self.shapes[0], self.shapes[2]
        return int(matmuls * math.prod(query[:4]) * query[3] * self._share * (query[4] + value[3]))

    @property
    def _side(self) -> int:
        """Number of queries, and of keys, in one block of scores."""
        length = self.shapes[0][3]
        return ring_side(length // 2) if self.settings.how.kernel else min(KEYS, length)

    @property
    def _share(self) -> float:
        """Share of the scores that is computed if one device computes the whole call; 1 without the kernel."""
        length, side = self.shapes[0][3], self._side
        if not self.settings.how.kernel:
            return 1.0  # masked scores are computed too
        return computed_share(length, length, self.settings.causal, None, (side, side))

    @property
    def steps(self) -> int:
        """Grid steps of the kernel if one device computes the whole call; 0 without it. Gradients have two kernels."""
        if not self.settings.how.kernel:
            return 0
        query, side = self.shapes[0], self._side
        each = grid_steps(query[3], query[3], self.settings.causal, None, (side, side))
        return math.prod(query[:3]) * each * (1 + self.back)

    def on_shards(self, mesh: Any, into: Sequence[Any], out: Sequence[Any]) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """Return the function that computes the call on shards with these specs, and the specs, unchanged.

        The ring runs over the axes that split the sequence of the queries.
        """
        axes = _axes_of(into[0], S)
        ring = _Ring(axes, math.prod(mesh.shape[axis] for axis in axes))
        return (
            functools.partial(_ring_backward if self.back else _ring_forward, settings=self.settings, ring=ring),
            into,
            out,
        )


class RingCalls:
    """Callbacks for `custom_partitioning`; autoshard itself uses `of`."""

    def __init__(self, settings: _Settings, back: bool) -> None:
        """Store the call's settings; `back` is True for the backward call."""
        self.settings, self.back = settings, back

    def of(self, operands: Sequence[Any]) -> RingCall:
        """Return the call with these operands."""
        dtype = str(operands[0].dtype)
        return RingCall(self.settings, self.back, tuple(tuple(each.shape) for each in operands), dtype)

    def __call__(self, mesh: Any, operands: Any, results: Any) -> tuple[Any, Callable[..., Any], Any, Any]:
        """Return mesh, function on shards, and shardings of results and operands, for XLA's own split of the queries.

        Keys and values follow the queries, and backward the query heads of a group stay together.
        """
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        spec = (*operands[0].sharding.spec, *[None] * 5)[:4]
        entries = dict(zip((B, K, G, S), spec, strict=True)) | ({G: None} if self.back else {})
        sides = [
            [NamedSharding(mesh, PartitionSpec(*(entries.get(f) for f in dims))) for dims in side]
            for side in _SIDES[self.back]
        ]
        fn, _, _ = self.of(operands).on_shards(mesh, [each.spec for each in sides[0]], [each.spec for each in sides[1]])
        return mesh, fn, jax.tree.unflatten(jax.tree.structure(results), sides[1]), tuple(sides[0])

    def mlir_rule(self, mesh: Any, operands: Any, results: Any) -> Any:
        """Return the rule in the form of JAX's own partitioning, and the factors that need replication."""
        names = ("b", "k", "g", "s", "d", "e")
        texts = [", ".join(" ".join(names[f] for f in dims) for dims in side) for side in _SIDES[self.back]]
        return " -> ".join(texts), {"need_replication_factors": ("g", "d", "e") if self.back else ("d", "e")}


def _axes_of(spec: Any, dim: int) -> tuple[str, ...]:
    """Return the mesh axes that split a dim."""
    entry = spec[dim] if dim < len(spec) else None
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


# Code of one device of a ring.


class _Ring(NamedTuple):
    """Mesh axes that split the sequence, and their number of devices."""

    axes: tuple[str, ...]
    count: int

    def place(self) -> Any:
        """Return the number of the present device in the ring."""
        import jax

        return jax.lax.axis_index(self.axes)

    def on(self, *values: Any) -> tuple[Any, ...]:
        """Send values to the next device, and return those of the previous device."""
        return self.moved([(i, (i + 1) % self.count) for i in range(self.count)], *values)

    def moved(self, pairs: Sequence[tuple[int, int]], *values: Any) -> tuple[Any, ...]:
        """Send values between pairs of devices (from, to), and return those that arrive."""
        import jax

        return tuple(jax.lax.ppermute(value, self.axes, pairs) for value in values)

    def zigzag(self, value: Any, dim: int) -> Any:
        """Send parts of a dim between devices for equal causal work.

        Device i of n has the parts 2i and 2i + 1 of 2n before, and `i` and `2n - 1 - i` afterwards.
        """
        import jax.numpy as jnp

        first, second = jnp.split(value, 2, dim)
        (first,) = self.moved([(i, self._home(2 * i)) for i in range(self.count)], first)
        (second,) = self.moved([(i, self._home(2 * i + 1)) for i in range(self.count)], second)
        even = self.place() % 2 == 0
        return jnp.concatenate([jnp.where(even, first, second), jnp.where(even, second, first)], dim)

    def straight(self, value: Any, dim: int) -> Any:
        """Restore the order of parts before `zigzag`."""
        import jax.numpy as jnp

        low, high = jnp.split(value, 2, dim)
        even = self.place() % 2 == 0
        first, second = jnp.where(even, low, high), jnp.where(even, high, low)
        (first,) = self.moved([(self._home(2 * i), i) for i in range(self.count)], first)
        (second,) = self.moved([(self._home(2 * i + 1), i) for i in range(self.count)], second)
        return jnp.concatenate([first, second], dim)

    def _home(self, part: int) -> int:
        """Return the device of a part in zigzag order."""
        return min(part, 2 * self.count - 1 - part)


def _ring_forward(query: Any, key: Any, value: Any, *, settings: _Settings, ring: _Ring) -> tuple[Any, Any]:
    """Compute attention on one device of the ring, whose shards are consecutive parts of the sequence.

    Returns the result in the dtype of values, and the logarithms of the sums in fp32.
    """
    import jax

    causal, how = settings
    if ring.count == 1:
        out, total = piece(query, key, value, causal, how)
        return out.astype(value.dtype), total
    if causal:
        query, key, value = ring.zigzag(query, 3), ring.zigzag(key, 2), ring.zigzag(value, 2)
    place = ring.place()
    combined = piece(query, key, value, causal, how)
    moving = ring.on(key, value)

    def either(number: Any, given: tuple[Any, ...]) -> Any:
        """Add the piece of one turn under a causal mask, for the keys of an earlier or a later device."""
        return jax.lax.cond(number <= place, lambda: _over_low(how, *given), lambda: _of_high(how, *given))

    def turn(carried: Any, number: Any) -> tuple[Any, None]:
        partial, (keys, values) = carried
        coming = ring.on(keys, values)
        if causal:
            partial = either(number, (query, keys, values, *partial))
        else:
            partial = added(partial[0], partial[1], *piece(query, keys, values, False, how))
        return (partial, coming), None

    numbers = jax.numpy.arange(1, ring.count - 1)
    (combined, moving), _ = jax.lax.scan(turn, (combined, moving), numbers)
    # The keys of the last turn are not sent on.
    if causal:
        out, total = either(ring.count - 1, (query, *moving, *combined))
        return ring.straight(out.astype(value.dtype), 3), ring.straight(total, 3)
    out, total = added(combined[0], combined[1], *piece(query, moving[0], moving[1], False, how))
    return out.astype(value.dtype), total


def _halves(value: Any, dim: int) -> Any:
    """Split a dim into two halves."""
    import jax.numpy as jnp

    return jnp.split(value, 2, dim)


def _over_low(how: How, query: Any, keys: Any, values: Any, out: Any, total: Any) -> tuple[Any, Any]:
    """Add the keys of an earlier device, of which all queries see the lower half; return result and sums."""
    return added(out, total, *piece(query, _halves(keys, 2)[0], _halves(values, 2)[0], False, how))


def _of_high(how: How, query: Any, keys: Any, values: Any, out: Any, total: Any) -> tuple[Any, Any]:
    """Add the keys of a later device, all of which the upper half of the queries sees; return result and sums."""
    import jax.numpy as jnp

    (low, high), (low_total, high_total) = _halves(out, 3), _halves(total, 3)
    high, high_total = added(high, high_total, *piece(_halves(query, 3)[1], keys, values, False, how))
    return jnp.concatenate([low, high], 3), jnp.concatenate([low_total, high_total], 3)


def _ring_backward(
    query: Any, key: Any, value: Any, out: Any, total: Any, gradient: Any, *, settings: _Settings, ring: _Ring
) -> tuple[Any, Any, Any]:
    """Compute the gradients of queries, keys and values on one device of the ring, in their dtypes.

    The gradients of keys and values travel around the ring with them, in fp32, until they are back on their own device.
    """
    import jax
    import jax.numpy as jnp

    causal, how = settings
    dtypes = [each.dtype for each in (query, key, value)]
    if ring.count == 1:
        grads = piece_back(query, key, value, out, total, gradient, causal, how)
        return tuple(each.astype(dtype) for each, dtype in zip(grads, dtypes, strict=True))  # type: ignore[return-value]
    rows = (query, out, total, gradient)
    if causal:
        rows = tuple(ring.zigzag(each, 3) for each in rows)
        key, value = ring.zigzag(key, 2), ring.zigzag(value, 2)
    place = ring.place()

    def back(rows: Any, keys: Any, values: Any, masked: bool = False) -> tuple[Any, Any, Any]:
        query, out, total, gradient = rows
        return piece_back(query, keys, values, out, total, gradient, masked, how)

    def over_low(keys: Any, values: Any) -> tuple[Any, Any, Any]:
        of_query, *of_low = back(rows, _halves(keys, 2)[0], _halves(values, 2)[0])
        return of_query, *(jnp.concatenate([each, jnp.zeros_like(each)], 2) for each in of_low)  # type: ignore[return-value]

    def of_high(keys: Any, values: Any) -> tuple[Any, Any, Any]:
        of_query, *others = back([_halves(each, 3)[1] for each in rows], keys, values)
        return jnp.concatenate([jnp.zeros_like(of_query), of_query], 3), *others  # type: ignore[return-value]

    def add_turn(of_query: Any, of_keys: Any, moving: Any, number: Any) -> tuple[Any, Any]:
        """Add the gradients of one turn; the partial gradients of the present keys arrive from the previous device."""
        of_keys = ring.on(*of_keys)
        if causal:
            mine, *theirs = jax.lax.cond(number <= place, lambda: over_low(*moving), lambda: of_high(*moving))
        else:
            mine, *theirs = back(rows, *moving)
        return of_query + mine, tuple(a + b for a, b in zip(of_keys, theirs, strict=True))

    def turn(carried: Any, number: Any) -> tuple[Any, None]:
        of_query, of_keys, moving = carried
        coming = ring.on(*moving)
        return (*add_turn(of_query, of_keys, moving, number), coming), None

    of_query, *of_keys = back(rows, key, value, causal)
    start = (of_query, tuple(of_keys), ring.on(key, value))
    (of_query, of_keys, last), _ = jax.lax.scan(turn, start, jnp.arange(1, ring.count - 1))
    of_query, of_keys = add_turn(of_query, of_keys, last, ring.count - 1)
    grads = tuple(each.astype(dtype) for each, dtype in zip((of_query, *ring.on(*of_keys)), dtypes, strict=True))
    if causal:
        grads = (ring.straight(grads[0], 3), *(ring.straight(each, 2) for each in grads[1:]))
    return grads  # type: ignore[return-value]
