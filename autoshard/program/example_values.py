"""Plausible concrete values for abstract arguments, so that a program can run without a checkpoint."""

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
    """Return `make_args(seed)` for `args`: concrete leaves are unchanged, abstract ones are drawn by role and name.

    Parameters are ones for scales of norms, and otherwise normal(0, `std`). Biases are drawn too: one that starts at
    zero and whose gradient vanishes (of attention keys) would be only rounding after a step. Optimizer state and other
    state are zeros, running variances ones. Codes of frozen weights are drawn from -127 to 127. A batch is normal(0, 1)
    for floats, integers from 0 below `id_limit(name)`, and True for booleans. Random keys are drawn for any role.

    - `args`: pytree whose abstract leaves are `jax.ShapeDtypeStruct`.
    - `names`, `roles`: name and role of each leaf.
    - `id_limit`: bound, exclusive, of integers by name; default: 2 for all.
    - `std`: standard deviation of weights.
    """

    def make_args(seed: int) -> tuple[Any, ...]:
        """Return the arguments with values drawn from a generator of this seed."""
        import jax

        leaves, treedef = jax.tree_util.tree_flatten(args)
        rng = np.random.default_rng(seed)
        values = [
            _value(rng, leaf, name, role, id_limit(name) if id_limit else 2, std)
            for leaf, name, role in zip(leaves, names, roles, strict=True)
        ]
        return jax.tree_util.tree_unflatten(treedef, values)

    return make_args


DRAWN = 16_777_213
"""Most numbers drawn for one array: a prime, so that rows, layers or shards of a larger one begin differently."""


def smallest_table(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return a bound for indices that every table of the program has: the smallest leading size above 1 of a matrix.

    `shapes` are those of the arguments, with two dims or more for a matrix. The result is 2 without matrices.
    """
    rows = [shape[0] for shape in shapes if len(shape) >= 2 and shape[0] > 1]
    return min(rows, default=2)


def is_scale(name: str) -> bool:
    """Return True if the dotted name is that of a norm's multiplicative weight, in any case of letters.

    The last part is `scale` or `gamma`, or ends with `_scale` or `norm`, or is the `weight` of a norm module.
    """
    parts = name.lower().split(".")
    owner = parts[-2] if len(parts) > 1 else ""
    last = parts[-1]
    if last in ("scale", "gamma") or last.endswith(("_scale", "norm")):
        return True
    return last == "weight" and ("norm" in owner or owner.startswith(("ln", "bn")) or owner.endswith("_ln"))


def _value(rng: np.random.Generator, leaf: Any, name: str, role: Role, limit: int, std: float) -> Any:
    """Return a concrete value for one leaf by its role and name; a concrete leaf is returned unchanged.

    - `rng`: random generator.
    - `limit`: upper bound, exclusive, of integers in a batch.
    - `std`: standard deviation of weights.
    """
    if not _abstract(leaf):
        return leaf
    dtype = leaf.dtype
    shape = tuple(leaf.shape)
    if str(dtype).startswith("key<"):
        import jax

        impl = jax.random.key_impl(jax.numpy.zeros((), dtype))  # a shape alone has no generator
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
    if role is Role.FROZEN and kind == "i":
        return rng.integers(-127, 128, shape).astype(dtype)
    return np.ones(shape, dtype) if name.endswith("running_var") else np.zeros(shape, dtype)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, std: float = 1.0) -> Any:
    """Return normal(0, `std`) numbers of a shape and dtype; an array of more than `DRAWN` repeats them."""
    count = math.prod(shape)
    drawn = rng.standard_normal(min(count, DRAWN), np.float32)
    return np.resize((drawn * np.float32(std)).astype(dtype), shape)


def _abstract(leaf: Any) -> bool:
    """Return True if a leaf is a `jax.ShapeDtypeStruct`."""
    import jax

    return isinstance(leaf, jax.ShapeDtypeStruct)
