"""Ragged dots on shards: groups of rows, each times a matrix of its own."""

import dataclasses
import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

from autoshard.base.call_rules import NEED_REPLICATION, PARALLEL, REDUCTION, CallRule, parse_call_rule
from autoshard.mlir import CallWork
from autoshard.program.registered_rules import RuledFunction


M, K, N, G = range(4)
"""Factors: rows, contracted (or, of a gradient, columns of the left), columns, groups."""


@dataclasses.dataclass(frozen=True, slots=True)
class RaggedDot:
    """One ragged dot without batch dims: `[m, k], [g, k, n] -> [m, n]`, or `[m, k], [m, n] -> [g, k, n]`."""

    params: dict[str, Any]
    sizes: tuple[int, int, int, int]
    left: tuple[int, ...]
    """The factor of each dim of the left operand."""
    right: tuple[int, ...]
    result: tuple[int, ...]

    @classmethod
    def of(cls, operands: Sequence[Any], params: dict[str, Any]) -> "RaggedDot | None":
        """None for the forms with batch dims, or with an offset."""
        numbers = params["ragged_dot_dimension_numbers"]
        (left_over, right_over), (batch, _) = numbers.dot_dimension_numbers
        left, right, groups = (operand.shape for operand in operands[:3])
        if batch or len(operands) != 3 or len(left) != 2 or len(groups) != 1 or len(left_over) != 1:
            return None
        (ragged,) = numbers.lhs_ragged_dimensions
        if len(right) == 3 and ragged not in left_over and len(numbers.rhs_group_dimensions) == 1:
            of_left = {ragged: M, left_over[0]: K}
            of_right = dict.fromkeys(range(3), N) | {numbers.rhs_group_dimensions[0]: G, right_over[0]: K}
            result = (M, N)
        elif len(right) == 2 and ragged in left_over:
            of_left = dict.fromkeys(range(2), K) | {ragged: M}
            of_right = dict.fromkeys(range(2), N) | {right_over[0]: M}
            result = (G, K, N)
        else:
            return None
        sizes = {of_left[d]: size for d, size in enumerate(left)} | {of_right[d]: size for d, size in enumerate(right)}
        every = (sizes[M], sizes[K], sizes[N], groups[0])
        return cls(
            params, every, tuple(of_left[d] for d in range(2)), tuple(of_right[d] for d in range(len(right))), result
        )

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.sizes[:G])

    @property
    def rule(self) -> tuple[Sequence[int], Sequence[str], Any, Any]:
        """(sizes, kinds, operands, results) of the sharding rule; groups stay whole."""
        kinds = [PARALLEL if f in self.result else REDUCTION for f in (M, K, N)]
        sides = [[(f,) for f in dims] for dims in (self.left, self.right, (G,), self.result)]
        return self.sizes, [*kinds, NEED_REPLICATION], sides[:3], sides[3:]

    def on_shards(self, mesh: Any, into: Sequence[Any], out: Sequence[Any]) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        axes: dict[int, tuple[str, ...]] = {}
        for dims, spec in zip((self.left, self.right, (G,), self.result), (*into, *out), strict=True):
            for factor, entry in zip(dims, spec, strict=False):
                axes.setdefault(factor, entry if isinstance(entry, tuple) else (entry,) if entry else ())
        rows = axes.get(M, ())
        summed = tuple(a for f in (M, K) if f not in self.result for a in axes.get(f, ()))

        def fn(left: Any, right: Any, groups: Any) -> Any:
            import jax

            if rows:
                groups = _held(groups, jax.lax.axis_index(rows), left.shape[self.left.index(M)])
            primitive = importlib.import_module("jax._src.lax.lax").ragged_dot_general_p
            found = primitive.bind(left, right, groups, **self.params)
            return jax.lax.psum(found, summed) if summed else found

        return fn, into, out


def _held(groups: Any, part: Any, rows: int) -> Any:
    """Sizes of the groups within one part's rows."""
    import jax.numpy as jnp

    ends = jnp.cumsum(groups)
    first = part * rows
    inside = jnp.minimum(ends, first + rows) - jnp.maximum(ends - groups, first)
    return jnp.maximum(inside, 0).astype(groups.dtype)


NAME = "grouped_matmul"
"""What the op is called in a program, and in a profile."""


def grouped_matmul(rows: Any, weight: Any, sizes: Any, real: int, busiest: float = 1.0) -> Any:
    """Rows [G, P, R, D] times the weights [E, F, D] of their experts: [G, P, R, F].

    `sizes` [G, P, E / G] (int32) counts the rows of each expert, which follow one another from the first row of a part
    on; rows beyond them give zeros. `real` is how many rows there are in all, beside those that only fill up: what
    matmuls are counted for. `busiest`: where groups are split, the busiest device has so many times their mean. With
    an expert in each group this is an einsum, of all rows.
    """
    import jax
    import jax.numpy as jnp

    if sizes.shape[-1] == 1:
        return jnp.einsum("gprd,gfd->gprf", rows, weight)

    owned = "(g e)" if len(rows) > 1 else "e"

    @jax.custom_vjp
    def times(rows: Any, weight: Any, sizes: Any) -> Any:
        return _forward(real, owned, busiest)(rows, weight, sizes)

    def gradient(kept: tuple[Any, Any, Any], of: Any) -> tuple[Any, Any, None]:
        rows, weight, sizes = kept
        return (
            _backward(real, owned, busiest)(of, weight, sizes),
            _of_weight(real, owned, busiest)(rows, of, sizes),
            None,
        )

    times.defvjp(lambda rows, weight, sizes: (times(rows, weight, sizes), (rows, weight, sizes)), gradient)
    return times(rows, weight, sizes)


@functools.cache
def _forward(real: int, owned: str, busiest: float) -> RuledFunction:
    def fn(rows: Any, weight: Any, sizes: Any) -> Any:
        return _products(rows, weight.swapaxes(1, 2), sizes)

    return RuledFunction(fn, _rule(real, f"g p r d, {owned} f d, g p e -> g p r f", "d"), (), _uneven(busiest))


@functools.cache
def _backward(real: int, owned: str, busiest: float) -> RuledFunction:
    """The gradient of the rows."""
    rule = _rule(real, f"g p r f, {owned} f d, g p e -> g p r d", "f")
    return RuledFunction(_products, rule, (), _uneven(busiest))


def _rule(real: int, text: str, summed: str) -> CallRule:
    """The rule of a product of rows, which is summed over one factor; rows and experts of a group stay whole."""
    return parse_call_rule(NAME, text, reduction=summed, need_replication="r e", flops=f"{2 * real} d f")


@functools.cache
def _of_weight(real: int, owned: str, busiest: float) -> RuledFunction:
    """The gradient of the weights, in their dtype, summed in f32 over parts."""

    def fn(rows: Any, of: Any, sizes: Any) -> Any:
        import jax
        import jax.numpy as jnp

        def group(given: tuple[Any, Any, Any]) -> Any:
            rows, of, sizes = given
            if len(rows) == 1:
                return _outer(rows[0], of[0], sizes[0]).astype(rows.dtype)

            def part(total: Any, given: tuple[Any, Any, Any]) -> tuple[Any, None]:
                return total + _outer(*given), None

            zeros = jnp.zeros((sizes.shape[-1], of.shape[-1], rows.shape[-1]), jnp.float32)
            return jax.lax.scan(part, zeros, given)[0].astype(rows.dtype)

        found = _each(group, (rows, of, sizes))
        return found.reshape(-1, *found.shape[2:])

    rule = parse_call_rule(
        NAME,
        f"g p r d, g p r f, g p e -> {owned} f d",
        reduction="p",
        need_replication="r e",
        flops=f"{2 * real} d f",
    )
    return RuledFunction(fn, rule, (), _uneven(busiest))


def _uneven(busiest: float) -> CallWork:
    """Of the first factor of each rule: the groups."""
    return CallWork(uneven={0: busiest} if busiest > 1 else {})


def _products(rows: Any, weight: Any, sizes: Any) -> Any:
    """Rows [G, P, R, D] times weights [G e, D, F] by `sizes` [G, P, e]."""
    import jax
    import jax.numpy as jnp

    weight = weight.reshape(len(rows), sizes.shape[-1], *weight.shape[1:])

    def group(given: tuple[Any, Any, Any]) -> Any:
        rows, weight, sizes = given

        def part(given: tuple[Any, Any]) -> Any:
            rows, sizes = given
            found = jax.lax.ragged_dot(rows, weight, sizes)
            place = jax.lax.broadcasted_iota(jnp.int32, (rows.shape[0], 1), 0)
            return jnp.where(place < sizes.sum(), found, 0)  # what no group has may be anything on a device

        return _each(part, (rows, sizes))

    return _each(group, (rows, weight, sizes))


def _outer(rows: Any, of: Any, sizes: Any) -> Any:
    """The sum over each expert's rows [R, D] and [R, F] of their outer products [e, F, D], in f32."""
    import jax
    import jax.numpy as jnp

    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(of, rows, sizes, numbers, preferred_element_type=jnp.float32)


def _each(fn: Any, given: tuple[Any, ...]) -> Any:
    """`fn` of each first index, one after the other."""
    import jax

    if given[0].shape[0] == 1:
        return fn(tuple(each[0] for each in given))[None]
    return jax.lax.map(fn, given)
