"""A top-k of an operand that is split over devices: each device selects of its shard, and their results are merged."""

from collections.abc import Callable, Sequence
from typing import Any


def top_k_on_shards(count: int) -> Callable[[Any, Sequence[Any], Sequence[Any]], tuple[Any, Any, Any]]:
    """Return the function of mesh, operand specs and result specs that gives the code of one device, and the specs.

    The code selects the `count` largest elements along the last dim, and their places, as `jax.lax.top_k` does on one
    device. The first of equal elements is selected, since shards are merged in their order. Devices exchange `count`
    elements and places of each shard, not the shards.
    """
    import jax
    import jax.numpy as jnp

    def on_shards(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Return the code of one device, and the specs that are given, whose tuples have an entry for each dim."""
        axes = operands[0][-1]

        def select(operand: Any) -> tuple[Any, Any]:
            size = operand.shape[-1]
            values, places = jax.lax.top_k(operand, min(count, size))
            if not axes:
                return values, places
            places = places + jax.lax.axis_index(axes).astype(places.dtype) * size
            values, places = (jax.lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True) for x in (values, places))
            values, merged = jax.lax.top_k(values, count)
            return values, jnp.take_along_axis(places, merged, axis=-1)

        return select, operands, results

    return on_shards
