"""Arguments at the edges of what a step's ops define: indices at and past the ends, equal numbers, and NaN.

Example arguments lie in range, where a wrong clamp or a wrong order of equal elements is never seen.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from autoshard import mlir
from autoshard.program import Program, Role


ENDS, BEYOND, UNDEFINED = "ends and ties", "indices past the ends", "NaN"
"""Names of the edges, in the order in which they are compared."""
_EXTREME = re.compile(r"=[^=\n]* (?:maximum|minimum)\(")


def edge_arguments(program: Program, leaves: Sequence[Any], seed: int) -> dict[str, list[Any]]:
    """Return flat arguments for each edge that the program has, from those of an ordinary step.

    `ENDS`: half of the indices are the first or the last of their dim, and floats of the batch repeat. `BEYOND`: half
    of them lie before or past the ends, which JAX clamps, drops or wraps; PyTorch refuses them, so that programs of
    modules have none. `UNDEFINED`: one element of each float argument of the batch is NaN.
    """
    with mlir.new_context() as context:
        sizes = mlir.indexed_sizes(mlir.parse_module(program.module, context))
    batch = [n for n, argument in enumerate(program.arguments) if argument.role is Role.BATCH]
    given = [n for n, argument in enumerate(program.arguments) if argument.role in (Role.BATCH, Role.OTHER)]
    indices = {n: sizes[n] for n in given if n in sizes and _has_dtype(leaves[n], "integer")}
    floats = [n for n in batch if _has_dtype(leaves[n], "floating")]
    draw = np.random.default_rng(seed)
    edges: dict[str, list[Any]] = {}
    if indices or floats:
        edges[ENDS] = list(leaves)
        for n, dims in indices.items():
            edges[ENDS][n] = _replaced(draw, leaves[n], [0, min(dims) - 1])
        for n in floats:
            edges[ENDS][n] = (np.round(np.asarray(leaves[n], np.float32) * 2) / 2).astype(leaves[n].dtype)
    if indices and program.eager is None:
        edges[BEYOND] = list(leaves)
        for n, dims in indices.items():
            edges[BEYOND][n] = _replaced(draw, leaves[n], [-1, max(dims), max(dims) + 3, -max(dims) - 1])
    if floats:
        edges[UNDEFINED] = list(leaves)
        for n in floats:
            edges[UNDEFINED][n] = _with_nan(draw, leaves[n])
    return edges


def drops_nan(compiled_text: str, platform: str) -> bool:
    """Return True if a compiled step takes the largest or smallest number over devices that drop NaN.

    XLA's collectives of CPUs do, also in plain JAX.
    """
    if platform != "cpu":
        return False
    reducers = set(re.findall(r" all-reduce(?:-start)?\(.*to_apply=(%?[\w.-]+)", compiled_text))
    bodies = re.findall(r"^(%?[\w.-]+) \([^\n]*\{\n(.*?)^\}", compiled_text, re.MULTILINE | re.DOTALL)
    return any(name in reducers and _EXTREME.search(body) for name, body in bodies)


def _has_dtype(leaf: Any, kind: str) -> bool:
    """Return True for an array with elements of this kind of dtype, also of one that numpy lacks."""
    import jax.numpy as jnp

    dtype = jnp.result_type(leaf) if not hasattr(leaf, "dtype") else leaf.dtype
    return bool(jnp.issubdtype(dtype, getattr(jnp, kind))) and math.prod(np.shape(leaf)) > 0


def _replaced(draw: np.random.Generator, leaf: Any, numbers: Sequence[int]) -> Any:
    """Return the array with half of its elements replaced by these numbers, as far as its dtype has them."""
    import jax.numpy as jnp

    array = np.array(leaf)
    limits = jnp.iinfo(array.dtype)
    given = [number for number in numbers if limits.min <= number <= limits.max] or [0]
    places = draw.permutation(array.size)[: -(-array.size // 2)]
    array.reshape(-1)[places] = draw.choice(given, places.size)
    return array


def _with_nan(draw: np.random.Generator, leaf: Any) -> Any:
    array = np.array(leaf)
    array.reshape(-1)[int(draw.integers(array.size))] = np.nan
    return array
