"""Edge-case inputs of a step, and the noise floor of its results."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autoshard import mlir
from autoshard.graph import OpClass, cached_graph
from autoshard.planning import batch_dims
from autoshard.program import WEIGHTS, Program, Role


ENDS, BEYOND, UNDEFINED = "ends and ties", "indices past the ends", "NaN"
"""Names of the edge cases, in the order in which they are compared."""
_EXTREME = re.compile(r"=[^=\n]* (?:maximum|minimum)\(")
"""A maximum or minimum op in HLO text."""


def edge_arguments(program: Program, leaves: Sequence[Any], seed: int) -> dict[str, list[Any]]:
    """Return flat arguments for each edge case that the program has, derived from those of an ordinary step.

    - `ENDS`: half of the indices are the first or the last of their dim, and floats of the batch repeat.
    - `BEYOND`: half of the indices lie before or past the ends. JAX clamps, drops or wraps such indices. PyTorch
      refuses them, so that programs of torch modules have no such case.
    - `UNDEFINED`: one element of each float argument of the batch is NaN.

    Indices are integer arguments, neither weights nor state, that index a tensor in the module. `leaves` stay
    unchanged, and `seed` decides which elements are replaced.
    """
    with mlir.new_context() as context:
        sizes = mlir.indexed_sizes(mlir.parse_module(program.module, context))
    batch = [n for n, argument in enumerate(program.arguments) if argument.role is Role.BATCH]
    data = [n for n, argument in enumerate(program.arguments) if argument.role in (Role.BATCH, Role.OTHER)]
    indices = {n: sizes[n] for n in data if n in sizes and _has_dtype(leaves[n], "integer")}
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
    """Return True if a compiled step reduces a maximum or minimum over devices whose collectives drop NaN.

    - `compiled_text`: optimised HLO.
    - `platform`: `cpu`, `gpu` or `tpu`. XLA's collectives of CPUs drop NaN, also in plain JAX; the others never do.
    """
    if platform != "cpu":
        return False
    reducers = set(re.findall(r" all-reduce(?:-start)?\(.*to_apply=(%?[\w.-]+)", compiled_text))
    bodies = re.findall(r"^(%?[\w.-]+) \([^\n]*\{\n(.*?)^\}", compiled_text, re.MULTILINE | re.DOTALL)
    return any(name in reducers and _EXTREME.search(body) for name, body in bodies)


def _has_dtype(leaf: Any, kind: str) -> bool:
    """Return True for a nonempty array whose dtype is of a kind of `jax.numpy` (`integer`), including dtypes that numpy
    lacks.
    """
    import jax.numpy as jnp

    dtype = jnp.result_type(leaf) if not hasattr(leaf, "dtype") else leaf.dtype
    return bool(jnp.issubdtype(dtype, getattr(jnp, kind))) and math.prod(np.shape(leaf)) > 0


def _replaced(draw: np.random.Generator, leaf: Any, numbers: Sequence[int]) -> Any:
    """Return a copy of the array with half of its elements, rounded up, replaced by random ones of `numbers`.

    Numbers that its dtype cannot represent are left out; 0 stands in if none remains.
    """
    import jax.numpy as jnp

    array = np.array(leaf)
    limits = jnp.iinfo(array.dtype)
    representable = [number for number in numbers if limits.min <= number <= limits.max] or [0]
    places = draw.permutation(array.size)[: -(-array.size // 2)]
    array.reshape(-1)[places] = draw.choice(representable, places.size)
    return array


def _with_nan(draw: np.random.Generator, leaf: Any) -> Any:
    """Return a copy of the array with one random element replaced by NaN."""
    array = np.array(leaf)
    array.reshape(-1)[int(draw.integers(array.size))] = np.nan
    return array


ORDERS = 8
"""Most orders of the examples that are run. Only some orders put a ReLU's input on the other side of 0, so the noise
comes in steps. For a small ResNet's moments it was 0.1 % in three orders of eight and 1.8 % in the other five.
"""
ROUNDINGS = 4
"""Most runs from rounded arguments."""
ROUNDING = {
    "bfloat16": 2.0**-9,
    "float16": 2.0**-12,
    "float8_e3m4": 2.0**-6,
    **dict.fromkeys(("float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz"), 2.0**-5),
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz"), 2.0**-4),
}
"""Half a unit in the last place of float types narrower than 32 bits, relative."""
INDIFFERENT = 1e-3
"""Largest relative change, under another order of examples, of a result that is no updated state. A step that exceeds
it does not treat all examples alike.
"""


def noise_floor(
    program: Program,
    run: Callable[[list[Any]], list[Any]],
    leaves: Sequence[Any],
    unplanned: Sequence[Any],
    enough: Callable[[list[float]], bool] = lambda noise: False,
) -> tuple[list[float], str]:
    """Return the largest difference of every result between orders of the examples, or the reason why it is unknown.

    - `run`: the unplanned step over flat arguments.
    - `leaves`: flat arguments of the ordinary step.
    - `unplanned`: results of the unplanned step for `leaves`.
    - `enough`: True if a noise suffices, which ends the search before `ORDERS` orders.

    Results with a batch dim are put back into order before they are compared. With a reason all differences are 0; else
    the reason is empty. The noise is unknown without a batch of 2, and if the order changes a result by more than
    `INDIFFERENT`.
    """
    none = [0.0] * len(program.results)
    size, argument_dims, result_dims = batch_dims(program)
    data = [d for a, d in zip(program.arguments, argument_dims, strict=True) if a.role is Role.BATCH]
    if size < 2 or not any(data):
        return none, "the program has no batch whose examples could be put in another order"
    noise = none
    random = np.random.default_rng(0)
    for number in range(ORDERS):
        order = random.permutation(size) if number else np.arange(size)[::-1]
        back = np.argsort(order)
        reordered = run([_reordered(leaf, order, dims) for leaf, dims in zip(leaves, argument_dims, strict=True)])
        reordered = [_reordered(value, back, dims) for value, dims in zip(reordered, result_dims, strict=True)]
        noise = [max(n, distance(a, b)) for n, a, b in zip(noise, reordered, unplanned, strict=True)]
        for result, size_of, n in zip(program.results, map(_largest, unplanned), noise, strict=True):
            if result.argument is None and n > INDIFFERENT * size_of:
                return none, f"another order of its examples changes the result `{result.name}`"
        if enough(noise):
            break
    return noise, ""


def narrow_rounding(program: Program) -> float:
    """Return half a unit in the last place, relative, of the narrowest floats that the program multiplies; 0 if all
    have 32 bits.
    """
    graph = cached_graph(program.module)
    heavy = (t for op in graph.ops if op.op_class is OpClass.HEAVY for t in op.operands)
    return max((ROUNDING.get(graph.tensors[t].dtype, 0.0) for t in heavy), default=0.0)


def rounding_floor(
    program: Program,
    run: Callable[[list[Any]], list[Any]],
    leaves: Sequence[Any],
    unplanned: Sequence[Any],
    noise: Sequence[float],
    enough: Callable[[list[float]], bool] = lambda noise: False,
    unit: float | None = None,
) -> list[float]:
    """Return the noise, raised to that of steps whose float arguments have a rounding error of the multiplied dtype.

    - `unit`: largest relative error; None for that of the narrowest multiplied dtype below 32 bits.
    - `run`, `leaves`, `unplanned`, `enough`: as in `noise_floor`; at most `ROUNDINGS` steps run.
    - `noise`: noise of each result so far, which is not modified.

    For an updated parameter the update is compared, since the parameter itself starts elsewhere. Weights and batch are
    rounded; without float arguments or narrow floats the noise is returned as it is.
    """
    raised = list(noise)
    unit = narrow_rounding(program) if unit is None else unit
    moved = [
        a.role in (*WEIGHTS, Role.BATCH) and np.issubdtype(np.asarray(leaf).dtype, np.floating)
        for a, leaf in zip(program.arguments, leaves, strict=True)
    ]
    if not unit or not any(moved):
        return raised
    random = np.random.default_rng(0)
    for _ in range(ROUNDINGS):
        nudged = [_rounded(leaf, unit, random) if move else leaf for leaf, move in zip(leaves, moved, strict=True)]
        results = run(nudged)
        for i, result in enumerate(program.results):
            value = results[i]
            if result.argument is not None and moved[result.argument]:
                value = np.asarray(value) - (np.asarray(nudged[result.argument]) - np.asarray(leaves[result.argument]))
            raised[i] = max(raised[i], distance(value, unplanned[i]))
        if enough(raised):
            break
    return raised


def _rounded(leaf: Any, unit: float, random: np.random.Generator) -> Any:
    """Return a copy of the array with each element changed by a random factor within 1 - `unit` and 1 + `unit`."""
    array = np.asarray(leaf)
    return (array * (1 + unit * random.uniform(-1, 1, array.shape))).astype(array.dtype)


def _reordered(value: Any, order: Any, dims: Sequence[int]) -> Any:
    """Return an array with its elements permuted by `order` along each of `dims`; itself if there are none."""
    for dim in dims:
        value = np.take(np.asarray(value), order, axis=dim)
    return value


def distance(a: Any, b: Any) -> float:
    """Return the largest finite difference of two arrays of floats; 0 for whole numbers, which have no noise."""
    one, two = np.asarray(a), np.asarray(b)
    if one.dtype.kind in "biu":
        return 0.0
    kind = np.complex128 if one.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore"):
        distance = np.abs(one.astype(kind) - two.astype(kind))
    return float(distance[np.isfinite(distance)].max(initial=0.0))


def _largest(value: Any) -> float:
    """Return the largest finite magnitude in an array; 0 if there is none."""
    array = np.asarray(value)
    sizes = np.abs(array if array.dtype.kind == "c" else array.astype(np.float64))
    return float(sizes[np.isfinite(sizes)].max(initial=0.0))
