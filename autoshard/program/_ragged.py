"""`jax.lax.ragged_dot` on shards: groups of rows, each times a matrix of its own, as in mixtures of experts.

Rows may be split although groups reach across shards: every device cuts the groups' sizes to the rows that it holds.
"""

import dataclasses
import importlib
import math
from collections.abc import Sequence
from typing import Any

from autoshard.rules import NEED_REPLICATION, PARALLEL, REDUCTION


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
