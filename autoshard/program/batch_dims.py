"""Positions of examples in the values of a trace: the dim along which they lie, through ops that do not mix them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleDim:
    """The dim of a value that holds examples, with `outer` x examples x `inner` elements in this order."""

    dim: int
    outer: int = 1
    """Number of repetitions of all examples along the dim, outside of them."""
    inner: int = 1
    """Number of consecutive positions along the dim that belong to one example."""
    alike: bool = False
    """True if elements are equal along `dim`."""
    numbers: frozenset[int] = frozenset()
    """Columns of the last dim that number the positions along `dim`; -1 stands for the whole value."""


_CALLS = ("while", "cond", "pallas_call")
"""Operations whose bodies are not analysed."""
_SCATTERS = ("scatter", *(f"scatter{mark}{kind}" for mark in "-_" for kind in ("add", "sub", "mul", "min", "max")))
"""Names of operations that write rows by index."""
_EVERYWHERE = frozenset({-1})
"""Value of `ExampleDim.numbers` for a value that numbers positions as a whole."""


def example_position(eqn: Any, places: Sequence[ExampleDim | None], dim: int, result: int) -> ExampleDim | None:
    """Return the position of examples in a result of `eqn`; None if examples may be mixed, or lie on another dim than
    `dim`.

    - `places`: positions in the operands.
    - `dim`: dim of the result that grows with the batch.
    - `result`: number of the result.

    Calls in `_CALLS` are assumed to mix no examples. Ops without a rule in `_RULES` count as elementwise. An iota or
    broadcast without examples has a position whose elements are alike. A value without examples that is repeated once
    for each has a position too.
    """
    name = eqn.primitive.name
    if any(place is not None and place.numbers for place in places):
        return _numbers(eqn, places, dim)
    if name in _CALLS:
        shape = eqn.outvars[result].aval.shape
        same = [p for v, p in zip(eqn.invars, places, strict=True) if p is not None and v.aval.shape == shape]
        return next((p for p in same if p.dim == dim and not p.alike), ExampleDim(dim))
    if name == "iota":
        return ExampleDim(dim, alike=True, numbers=_EVERYWHERE if eqn.params["dimension"] == dim else frozenset())
    if all(place is None for place in places):
        inner = eqn.invars[0].aval.shape[dim] if name == "tile" else 1
        return ExampleDim(dim, inner=inner, alike=inner == 1) if name in ("broadcast_in_dim", "tile") else None
    place = _RULES.get(name, _elementwise)(eqn, places)
    return place if place is not None and place.dim == dim else None


def common_position(places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the common position of examples in operands of one shape; None if there is none.

    Operands without examples (None) are ignored. Operands that are alike along the dim must agree in the dim only, if
    others are not alike.
    """
    given = [place for place in places if place is not None]
    own = [place for place in given if not place.alike] or given
    agree = own and len({place.dim for place in given}) == 1 and len(set(own)) == 1
    return own[0] if agree else None


def sums_over_examples(*places: ExampleDim | None) -> bool:
    """Return True if a sum over the dims of examples, or of products along these dims, is a sum over examples.

    Every operand must have a position without numbered columns, in one order of examples; the dims may differ.
    """
    plain = [dataclasses.replace(place, dim=0) for place in places if place is not None and not place.numbers]
    return len(plain) == len(places) and common_position(plain) is not None


def _numbers(eqn: Any, places: Sequence[ExampleDim | None], dim: int) -> ExampleDim | None:
    """Return the position in a result if elements of an operand number the positions of examples; None if unknown.

    The result still numbers them after a broadcast, reshape, integer cast, wrap of negative indices, or concatenation
    into columns of indices. A comparison with 0 is alike for all examples. Gathers and scatters follow their own rules.
    """
    name, plain = eqn.primitive.name, [place for place in places if place is not None]
    if name in ("gather", *_SCATTERS):
        place = _RULES[name](eqn, places)
        return place if place is not None and place.dim == dim else None
    if name == "concatenate" and eqn.params["dimension"] == len(eqn.outvars[0].aval.shape) - 1 != dim:
        columns: set[int] = set()
        start = 0
        for operand, place in zip(eqn.invars, places, strict=True):
            width = operand.aval.shape[-1]
            if place is not None and place.numbers == _EVERYWHERE:
                columns.update(range(start, start + width))
            elif place is not None and place.numbers:
                return None
            start += width
        bare = common_position([place and dataclasses.replace(place, numbers=frozenset()) for place in places])
        return bare and dataclasses.replace(bare, numbers=frozenset(columns))
    if any(place.numbers != _EVERYWHERE for place in plain if place.numbers):
        return None
    if name in ("lt", "ge") and _literal(eqn.invars[1]) == 0:
        return ExampleDim(dim, alike=True)
    # Negative indices count from the end: `select_n(number < 0, number, number + rows)`.
    rows = eqn.outvars[0].aval.shape[dim]
    steps = {"add": (0, rows), "mul": (1,)}
    numbered = name in ("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy", "select_n")
    if name in steps:
        numbered = len(plain) == 1 and any(_literal(each) in steps[name] for each in eqn.invars)
    if name == "select_n":
        numbered = all(place is not None and place.numbers for place in places[1:])
    if name == "convert_element_type":
        numbered = eqn.params["new_dtype"].kind in "iu"
    first = next(place for place in plain if place.numbers)
    size = max(operand.aval.shape[first.dim] for operand, p in zip(eqn.invars, places, strict=True) if p is first)
    return ExampleDim(dim, alike=True, numbers=_EVERYWHERE) if numbered and size == rows else None


def _literal(operand: Any) -> Any:
    """Return the value of an operand that is a scalar literal of the jaxpr, else None."""
    return operand.val if hasattr(operand, "val") and not operand.aval.shape else None


def _elementwise(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the common position of the operands; None if an operand is no scalar and has another rank than the result.

    This is the rule of every op that `_RULES` lacks.
    """
    rank = len(eqn.outvars[0].aval.shape)
    return common_position(places) if all(len(operand.aval.shape) in (0, rank) for operand in eqn.invars) else None


def _reshaped(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position after a reshape, on the dim of the result that contains all examples; None without one."""
    before, after, place = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, places[0]
    assert place is not None
    # Elements of an example are contiguous, and examples have equal distances, so a dim that splits them mixes nothing.
    outer, inner = place.outer * math.prod(before[: place.dim]), place.inner * math.prod(before[place.dim + 1 :])
    for dim in range(len(after)):
        front, back = math.prod(after[:dim]), math.prod(after[dim + 1 :])
        if outer % front == 0 and inner % back == 0 and after[dim] > (outer // front) * (inner // back):
            outer, inner = outer // front, inner // back
            return dataclasses.replace(
                place, dim=dim, outer=outer, inner=inner, alike=place.alike and outer * inner == 1
            )
    return None


def _broadcast(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position after a broadcast, on the dim of the result to which the dim of the examples is mapped."""
    place = places[0]
    assert place is not None
    return dataclasses.replace(place, dim=eqn.params["broadcast_dimensions"][place.dim])


def _tiled(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position after repetitions, which add outer ones along the dim of the examples."""
    place = places[0]
    assert place is not None
    return dataclasses.replace(place, outer=place.outer * eqn.params["reps"][place.dim])


def _transposed(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position after a transpose, on the dim to which the dim of the examples is permuted."""
    place = places[0]
    assert place is not None
    return dataclasses.replace(place, dim=eqn.params["permutation"].index(place.dim))


def _reduced(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position after a reduction; None if it reduces the dim of the examples."""
    place, axes = common_position(places), eqn.params["axes"]
    if place is None or place.dim in axes:
        return None
    return dataclasses.replace(place, dim=place.dim - sum(axis < place.dim for axis in axes))


def _along(*names: str) -> Any:
    """Return the rule of ops that move or accumulate along the dims given by the parameters `names`.

    The rule returns the operands' common position; None if the examples lie along one of these dims. An op without any
    of the parameters gives None too.
    """

    def rule(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
        """Return the common position, unless it is along one of the parameters' dims."""
        place = common_position(places)
        along = [eqn.params[name] for name in names if name in eqn.params]
        dims = {dim for each in along for dim in (each if isinstance(each, (tuple, list)) else (each,))}
        return None if place is None or not along or place.dim in dims else place

    return rule


def _sliced(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position after a slice or an update of one; None unless all operands and the result have every
    example.

    Return None also if start indices have a position. Such indices are the last operands of dynamic ops.
    """
    count = 2 if eqn.primitive.name == "dynamic_update_slice" else 1
    if any(place is not None for place in places[count:]):
        return None
    place = common_position(places[:count])
    unsliced = place is not None and len({v.aval.shape[place.dim] for v in (*eqn.invars[:count], *eqn.outvars)}) == 1
    return place if unsliced else None


def _matrices(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position for ops on the last dims (FFTs, decompositions); None if examples lie along one of these."""
    place, own = common_position(places), len(eqn.params.get("fft_lengths", (0, 0)))
    return place if place is not None and place.dim < len(eqn.outvars[0].aval.shape) - own else None


def _joined(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position after a concatenation.

    Along the dim of the examples each operand repeats them, so `outer` becomes the number of operands. Return None
    there if an operand has no position, or if `outer` is not 1 before.
    """
    place = common_position(places)
    if place is None or place.dim != eqn.params["dimension"]:
        return place
    if place.outer != 1 or any(each is None for each in places):
        return None
    return dataclasses.replace(place, outer=len(places), alike=False)


def _stacked(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position after arrays are stacked along a new dim."""
    place = common_position(places)
    return None if place is None else dataclasses.replace(place, dim=place.dim + (eqn.params["axis"] <= place.dim))


def _unstacked(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position in the slices along a dim; None for slices of one example each."""
    place, axis = places[0], eqn.params["axis"]
    if place is None or place.dim == axis:
        return None
    return dataclasses.replace(place, dim=place.dim - (axis < place.dim))


def _padded(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position after padding; None if the dim of the examples is padded, or only the value has examples."""
    place = places[0]
    return place if place is not None and eqn.params["padding_config"][place.dim] == (0, 0, 0) else None


def _windowed(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position after a windowed reduction; None if a window covers several examples."""
    place = common_position(places)
    return place if place is not None and eqn.params["window_dimensions"][place.dim] == 1 else None


def _multiplied(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position in a `dot_general`; None if it contracts the dim of the examples.

    None also if both operands have examples, but not on one dim of the result.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    results: list[ExampleDim | None] = []
    free = len(batch[0])
    for operand, place, over, shared in zip(eqn.invars, places, contracted, batch, strict=True):
        others = [dim for dim in range(len(operand.aval.shape)) if dim not in over and dim not in shared]
        if place is not None:
            if place.dim in over:
                return None
            dim = shared.index(place.dim) if place.dim in shared else free + others.index(place.dim)
            results.append(dataclasses.replace(place, dim=dim))
        free += len(others)
    return common_position(results)


def _convolved(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position in a convolution, whose kernel has no examples; None unless they lie along its batch dim."""
    place, numbers = places[0], eqn.params["dimension_numbers"]
    if place is None or places[1] is not None or eqn.params["batch_group_count"] != 1:
        return None
    return dataclasses.replace(place, dim=numbers.out_spec[0]) if place.dim == numbers.lhs_spec[0] else None


def _own_row(
    place: ExampleDim | None,
    dim: int,
    indices: ExampleDim | None,
    columns: Sequence[int],
    batching: Sequence[Sequence[int]],
) -> bool:
    """Return True if every example indexes its own row on `dim`, or an equal one.

    The dims are batched together, a column of the indices numbers the rows, or all rows are alike. Return False if the
    indices have no examples, or do not address `dim`.

    - `place`: position of examples in the operand; None if it has none.
    - `dim`: dim of the operand that the rows lie on.
    - `indices`: position of examples in the indices.
    - `columns`: dims of the operand that each column of the indices addresses.
    - `batching`: batched dims of the operand, and those of the indices.
    """
    if indices is None:
        return False
    if dim in batching[0]:
        return batching[1][batching[0].index(dim)] == indices.dim
    if dim not in columns:
        return False
    return bool(indices.numbers & {-1, columns.index(dim)}) or (place is not None and place.alike)


def _gathered(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position in a gather: whole examples are gathered, or each example indexes its own row.

    If only the indices have examples, as in a lookup in a table, the result follows them; None if they number
    positions.
    """
    numbers, place, indices = eqn.params["dimension_numbers"], places[0], places[1]
    rows = [dim for dim in range(len(eqn.outvars[0].aval.shape)) if dim not in numbers.offset_dims]
    if place is None:
        assert indices is not None
        return None if indices.numbers else dataclasses.replace(indices, dim=rows[indices.dim])
    shape, dim = eqn.invars[0].aval.shape, place.dim
    batching = (numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    if indices is not None and _own_row(place, dim, indices, numbers.start_index_map, batching):
        own = common_position([dataclasses.replace(each, dim=rows[indices.dim]) for each in _bare(place, indices)])
        return own if eqn.outvars[0].aval.shape[rows[indices.dim]] == shape[dim] else None
    if indices is not None or eqn.params["slice_sizes"][dim] != shape[dim]:
        return None
    left = [d for d in range(len(shape)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    return dataclasses.replace(place, dim=numbers.offset_dims[left.index(dim)])


def _scattered(eqn: Any, places: Sequence[ExampleDim | None]) -> ExampleDim | None:
    """Return the position in a scatter: updates lie inside an example, or each example writes its own row.

    None otherwise, and if the operand has no examples.
    """
    numbers = eqn.params["dimension_numbers"]
    place, indices, updates = places
    batching = (numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)
    if place is None:
        return None
    given = () if updates is None else (dataclasses.replace(updates, dim=place.dim),)
    if indices is None:
        inner = place.dim not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        return common_position([place, *given]) if inner else None
    rows = {eqn.invars[0].aval.shape[place.dim], eqn.invars[1].aval.shape[indices.dim]}
    unmarked = dataclasses.replace(place, alike=False)
    if len(rows) > 1 or not _own_row(unmarked, place.dim, indices, numbers.scatter_dims_to_operand_dims, batching):
        return None
    return common_position([*_bare(place, dataclasses.replace(indices, dim=place.dim)), *given])


def _bare(*places: ExampleDim) -> list[ExampleDim]:
    """Return the positions without their numbered columns."""
    return [dataclasses.replace(place, numbers=frozenset()) for place in places]


# Rule by name of the primitive: a function of the equation and the operands' positions.
_RULES = {
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshaped),
    "broadcast_in_dim": _broadcast,
    "tile": _tiled,
    "transpose": _transposed,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"), _reduced
    ),
    **dict.fromkeys(("argmax", "argmin", "reduce"), _reduced),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(("sort", "rev"), _along("dimension", "dimensions")),
    **dict.fromkeys(("top_k", "split", "approx_top_k"), _along("axis", "reduction_dimension")),
    **dict.fromkeys(
        ("fft", "cholesky", "triangular_solve", "eigh", "lu", "qr", "svd", "householder_product"), _matrices
    ),
    **dict.fromkeys(("slice", "dynamic_slice", "dynamic_update_slice"), _sliced),
    "concatenate": _joined,
    "stack": _stacked,
    "unstack": _unstacked,
    "pad": _padded,
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window"), _windowed),
    **dict.fromkeys(("select_and_gather_add", "select_and_scatter_add"), _windowed),
    "dot_general": _multiplied,
    "conv_general_dilated": _convolved,
    "gather": _gathered,
    **dict.fromkeys(_SCATTERS, _scattered),
}
