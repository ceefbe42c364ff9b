"""JAX's explicit meshes, whose axes are part of the types of arrays, around a planned step."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


def explicit_mesh(leaves: Iterable[Any]) -> Any:
    """Return the mesh in the types of arrays or shapes, else that of the context; None if neither is explicit."""
    import jax

    for leaf in leaves:
        sharding = in_type(leaf)
        if sharding is not None:
            return sharding.mesh
    context = jax.sharding.get_mesh()
    return context if context.abstract_mesh.explicit_axes else None


def in_type(leaf: Any) -> Any:
    """Return the sharding that is part of the type of an array or shape, None if there is none."""
    from jax.sharding import NamedSharding

    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.abstract_mesh.explicit_axes else None


def on_mesh(results: Any, mesh: Any) -> Any:
    """Return results of a step with types of an explicit mesh, as `jax.jit` types them; no data moves.

    A result stays on the plan's mesh where no spec over this one splits it over the same devices alike.
    """
    import jax

    leaves, tree = jax.tree.flatten(results)
    shardings = [_spelled(leaf.sharding, leaf.shape, mesh) for leaf in leaves]
    return tree.unflatten(jax.device_put(leaves, shardings))


@functools.lru_cache(maxsize=4096)
def _spelled(sharding: Any, shape: tuple[int, ...], mesh: Any) -> Any:
    """Return the sharding over another mesh that places shards alike; the given one if there is none."""
    from jax.sharding import NamedSharding, PartitionSpec

    counts = [whole // part if part else 1 for whole, part in zip(shape, sharding.shard_shape(shape), strict=True)]
    axes = {name: size for name, size in mesh.shape.items() if size > 1}
    for entries in _entries(counts, axes):
        made = NamedSharding(mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind)
        if made.is_equivalent_to(sharding, len(shape)):
            return made
    return sharding


def _entries(counts: Sequence[int], axes: dict[str, int]) -> Iterator[tuple[Any, ...]]:
    """Yield the ways to split dims into so many shards each, every axis used once at most."""
    if not counts:
        yield ()
        return
    for number in range(len(axes) + 1):
        for names in itertools.permutations(axes, number):
            if math.prod(axes[name] for name in names) == counts[0]:
                left = {name: size for name, size in axes.items() if name not in names}
                first: Any = names[0] if len(names) == 1 else names or None
                yield from ((first, *others) for others in _entries(counts[1:], left))
