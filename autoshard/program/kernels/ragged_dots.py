"""Ragged dots on shards: groups of rows, each group multiplied by its own matrix."""

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
"""Factors: rows, contracted dim (for a gradient the left operand's columns), columns, groups."""


@dataclasses.dataclass(frozen=True, slots=True)
class RaggedDot:
    """One ragged dot without batch dims: `[m, k], [g, k, n] -> [m, n]`, or `[m, k], [m, n] -> [g, k, n]`."""

    params: dict[str, Any]
    """Parameters of the equation."""
    sizes: tuple[int, int, int, int]
    """Sizes of the factors `M`, `K`, `N` and `G`."""
    left: tuple[int, ...]
    """Factor of each dim of the left operand."""
    right: tuple[int, ...]
    """Factor of each dim of the right operand."""
    result: tuple[int, ...]
    """Factor of each dim of the result."""

    @classmethod
    def of(cls, operands: Sequence[Any], params: dict[str, Any]) -> "RaggedDot | None":
        """Return the ragged dot of an equation, or None for forms other than the two of the class.

        `operands` are left, right and group sizes; batch dims, a fourth operand and several contracted dims give None.
        """
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
        """FLOPs of the dot on all devices: each row is multiplied by the matrix of its group only."""
        return 2 * math.prod(self.sizes[:G])

    @property
    def rule(self) -> tuple[Sequence[int], Sequence[str], Any, Any]:
        """Sizes and kinds of the sharding rule's factors, and factors of each dim of operands and results.

        Groups are not split. A contracted factor is a reduction.
        """
        kinds = [PARALLEL if f in self.result else REDUCTION for f in (M, K, N)]
        sides = [[(f,) for f in dims] for dims in (self.left, self.right, (G,), self.result)]
        return self.sizes, [*kinds, NEED_REPLICATION], sides[:3], sides[3:]

    def on_shards(self, mesh: Any, into: Sequence[Any], out: Sequence[Any]) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """Return the function that computes the dot on shards, with the specs of operands and results, unchanged.

        If rows are split, each device uses the sizes of the groups within its rows. Partial sums are all-reduced.
        """
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
            product = primitive.bind(left, right, groups, **self.params)
            return jax.lax.psum(product, summed) if summed else product

        return fn, into, out


def _held(groups: Any, part: Any, rows: int) -> Any:
    """Return the sizes of the groups within the rows of part number `part`, each part having `rows` rows."""
    import jax.numpy as jnp

    ends = jnp.cumsum(groups)
    first = part * rows
    inside = jnp.minimum(ends, first + rows) - jnp.maximum(ends - groups, first)
    return jnp.maximum(inside, 0).astype(groups.dtype)


NAME = "grouped_matmul"
"""Name of the op in a program and in a profile."""


def grouped_matmul(rows: Any, weight: Any, sizes: Any, real: int, busiest: float = 1.0) -> Any:
    """Multiply rows by the weights of their experts; return [G, P, R, F].

    - `rows`: [G, P, R, D]; rows of one part follow one another expert by expert, and the rest are padding.
    - `weight`: [E, F, D].
    - `sizes`: rows of each expert in each part, [G, P, E / G] int32; rows beyond them give zeros.
    - `real`: number of all rows without padding, for which FLOPs are counted.
    - `busiest`: load of the busiest device over the mean, where groups are split.

    With one expert in each group this is an einsum over all rows, so that `sizes` and `real` are unused.
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
    """Return the call of the forward product; `owned` is the factor of the experts in its rule."""

    def fn(rows: Any, weight: Any, sizes: Any) -> Any:
        return _products(rows, weight.swapaxes(1, 2), sizes)

    return RuledFunction(fn, _rule(real, f"g p r d, {owned} f d, g p e -> g p r f", "d"), (), _uneven(busiest))


@functools.cache
def _backward(real: int, owned: str, busiest: float) -> RuledFunction:
    """Return the call of the rows' gradient."""
    rule = _rule(real, f"g p r f, {owned} f d, g p e -> g p r d", "f")
    return RuledFunction(_products, rule, (), _uneven(busiest))


def _rule(real: int, text: str, summed: str) -> CallRule:
    """Return the rule of a product that sums over the factor `summed`; rows and experts of a group are not split."""
    return parse_call_rule(NAME, text, reduction=summed, need_replication="r e", flops=f"{2 * real} d f")


@functools.cache
def _of_weight(real: int, owned: str, busiest: float) -> RuledFunction:
    """Return the call of the weights' gradient, in the weights' dtype, summed in fp32 over parts."""

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

        gradients = _each(group, (rows, of, sizes))
        return gradients.reshape(-1, *gradients.shape[2:])

    rule = parse_call_rule(
        NAME,
        f"g p r d, g p r f, g p e -> {owned} f d",
        reduction="p",
        need_replication="r e",
        flops=f"{2 * real} d f",
    )
    return RuledFunction(fn, rule, (), _uneven(busiest))


def _uneven(busiest: float) -> CallWork:
    """Return work with the load of the busiest device over the mean along the rule's first factor, the groups.

    A load of 1 is left out.
    """
    return CallWork(imbalance={0: busiest} if busiest > 1 else {})


def _products(rows: Any, weight: Any, sizes: Any) -> Any:
    """Multiply rows [G, P, R, D] by weights [G e, D, F] of groups with `sizes` [G, P, e]; return [G, P, R, F].

    Rows beyond the sizes give zeros.
    """
    import jax
    import jax.numpy as jnp

    weight = weight.reshape(len(rows), sizes.shape[-1], *weight.shape[1:])

    def group(given: tuple[Any, Any, Any]) -> Any:
        rows, weight, sizes = given

        def part(given: tuple[Any, Any]) -> Any:
            rows, sizes = given
            product = jax.lax.ragged_dot(rows, weight, sizes)
            place = jax.lax.broadcasted_iota(jnp.int32, (rows.shape[0], 1), 0)
            return jnp.where(place < sizes.sum(), product, 0)  # rows of no group are undefined on a device

        return _each(part, (rows, sizes))

    return _each(group, (rows, weight, sizes))


def _outer(rows: Any, of: Any, sizes: Any) -> Any:
    """Sum the outer products of each expert's rows [R, D] and [R, F]; return [e, F, D] in fp32."""
    import jax
    import jax.numpy as jnp

    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return jax.lax.ragged_dot_general(of, rows, sizes, numbers, preferred_element_type=jnp.float32)


def _each(fn: Any, given: tuple[Any, ...]) -> Any:
    """Apply `fn` to the tuple of entries at each index of the first dim, one after another, and stack the results."""
    import jax

    if given[0].shape[0] == 1:
        return fn(tuple(each[0] for each in given))[None]
    return jax.lax.map(fn, given)
