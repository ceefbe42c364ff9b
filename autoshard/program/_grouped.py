"""Matmuls of rows that lie by expert, each expert's rows with its own weight, as one op that a mesh can split.

Rows belong to parts (sequences) and to groups of experts; both can be split, and so can the contracted dim and the
columns. On a device every part of every group that it has is one `jax.lax.ragged_dot`.
"""

import functools
from typing import Any

from autoshard.mlir import CallWork
from autoshard.program._register import RuledFunction
from autoshard.rules import CallRule, parse_call_rule


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
