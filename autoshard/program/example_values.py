"""Plausible concrete values for abstract arguments, so that a program can be run before there is a checkpoint."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autoshard.program.program_record import WEIGHTS, Role


def fill(
    args: tuple[Any, ...],
    names: Sequence[str],
    roles: Sequence[Role],
    id_limit: Callable[[str], int] | None = None,
    *,
    std: float = 0.02,
) -> Callable[[int], tuple[Any, ...]]:
    """`make_args(seed)` for `args`: concrete leaves are kept, abstract ones are drawn by role and name.

    Parameters: ones for scales of norms, normal(0, `std`) otherwise; biases too, since one that starts at zero and
    whose gradient vanishes (of attention keys) would be nothing but rounding after a step. Optimizer state and other
    state: zeros, running variances ones. Batch: normal(0, 1) for floats, integers below `id_limit(name)`.
    """

    def make_args(seed: int) -> tuple[Any, ...]:
        import jax

        leaves, treedef = jax.tree_util.tree_flatten(args)
        rng = np.random.default_rng(seed)
        made = [
            _value(rng, leaf, name, role, id_limit(name) if id_limit else 2, std)
            for leaf, name, role in zip(leaves, names, roles, strict=True)
        ]
        return jax.tree_util.tree_unflatten(treedef, made)

    return make_args


DRAWN = 16_777_213
"""Numbers drawn for one array: a prime, so that no two rows, layers or shards of a larger one begin alike."""


def smallest_table(shapes: Sequence[tuple[int, ...]]) -> int:
    """A bound that every table in the program can be indexed with: the smallest leading size of a matrix."""
    rows = [shape[0] for shape in shapes if len(shape) >= 2 and shape[0] > 1]
    return min(rows, default=2)


def is_scale(name: str) -> bool:
    """True for the multiplicative weight of a norm, by its name."""
    parts = name.lower().split(".")
    owner = parts[-2] if len(parts) > 1 else ""
    last = parts[-1]
    if last in ("scale", "gamma") or last.endswith(("_scale", "norm")):
        return True
    return last == "weight" and ("norm" in owner or owner.startswith(("ln", "bn")) or owner.endswith("_ln"))


def _value(rng: np.random.Generator, leaf: Any, name: str, role: Role, limit: int, std: float) -> Any:
    if not _abstract(leaf):
        return leaf
    dtype = leaf.dtype
    shape = tuple(leaf.shape)
    if str(dtype).startswith("key<"):
        import jax

        impl = jax.random.key_impl(jax.numpy.zeros((), dtype))  # a shape alone is not asked for its generator
        key = jax.random.key(int(rng.integers(2**31)), impl=impl)
        return jax.random.split(key, shape) if shape else key
    kind = np.dtype(dtype).kind
    if role is Role.BATCH:
        if kind == "b":
            return np.ones(shape, dtype)
        if kind in "iu":
            return rng.integers(0, max(limit, 1), shape).astype(dtype)
        return _normal(rng, shape, dtype)
    if role in WEIGHTS and kind not in "iub":
        if is_scale(name):
            return np.ones(shape, dtype)
        return _normal(rng, shape, dtype, std)
    return np.ones(shape, dtype) if name.endswith("running_var") else np.zeros(shape, dtype)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, std: float = 1.0) -> Any:
    """Return normal numbers; of more than `DRAWN`, the same numbers again and again."""
    count = math.prod(shape)
    drawn = rng.standard_normal(min(count, DRAWN), np.float32)
    return np.resize((drawn * np.float32(std)).astype(dtype), shape)


def _abstract(leaf: Any) -> bool:
    import jax

    return isinstance(leaf, jax.ShapeDtypeStruct)
