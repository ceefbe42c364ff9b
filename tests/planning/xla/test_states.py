"""Assignments of mesh axes to factors: enumeration, relabelling, and passage through reshapes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.planning.xla.axis_assignments import (
    MAX_PADDING,
    PARTIAL,
    WHOLE,
    decompose,
    distinct,
    enumerate_states,
    extents,
    local_elements,
    relabel,
)


def rows(states: np.ndarray) -> set[tuple[int, ...]]:
    return {tuple(map(int, row)) for row in states}


def test_all_states_of_two_axes_and_three_dims() -> None:
    states = enumerate_states((16, 32, 64), (4, 2))
    assert len(states) == 16 == len(rows(states))
    assert tuple(states[0]) == (WHOLE, WHOLE), "whole comes first"
    assert rows(states) == {(a, b) for a in (WHOLE, 0, 1, 2) for b in (WHOLE, 0, 1, 2)}


def test_blocked_dims_and_dims_of_one_are_never_split() -> None:
    assert rows(enumerate_states((8, 1, 8), (2,), blocked=[0])) == {(WHOLE,), (2,)}


@pytest.mark.parametrize(
    ("size", "parts", "even", "uneven"),
    [
        (8, 4, True, True),
        (9, 4, False, True),  # 12 of 9
        (5, 4, False, False),  # 8 of 5
        (4, 3, False, True),  # 6 of 4, the most that is allowed
        (4, 8, False, False),
        (6, 4, False, True),  # 8 of 6
        (50257, 16, False, True),
    ],
)
def test_uneven_splits_are_for_intermediates_and_may_pad_a_little(
    size: int, parts: int, even: bool, uneven: bool
) -> None:
    assert ((0,) in rows(enumerate_states((size,), (parts,), even=True))) == even
    assert ((0,) in rows(enumerate_states((size,), (parts,)))) == uneven


@given(
    st.lists(st.integers(1, 48), min_size=0, max_size=3),
    st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3),
    st.booleans(),
)
def test_enumerated_states_are_exactly_those_that_fit(sizes: list[int], axes: list[int], even: bool) -> None:
    found = rows(enumerate_states(sizes, axes, even=even))
    for code in np.ndindex(*[len(sizes) + 1] * len(axes)):
        state = tuple(c - 1 for c in code)
        fits = all(d == WHOLE or (sizes[d] > 1 and n > 1) for d, n in zip(state, axes, strict=True))
        for dim, size in enumerate(sizes):
            parts = math.prod(n for d, n in zip(state, axes, strict=True) if d == dim)
            padded = math.ceil(size / parts) * parts
            fits = fits and (padded == size or (not even and parts <= size and padded <= MAX_PADDING * size))
        assert (state in found) == fits


def test_local_elements_count_padding() -> None:
    states = np.array([[WHOLE, WHOLE], [0, WHOLE], [0, 0], [0, 1], [PARTIAL, 1]])
    assert local_elements(states, (10, 6), (4, 2)).tolist() == [60, 3 * 6, 2 * 6, 3 * 3, 10 * 3]
    assert local_elements(enumerate_states((), (4, 2)), (), (4, 2)).tolist() == [1]


def test_the_last_two_dims_are_split_by_the_axes_on_them() -> None:
    states = np.array([[WHOLE, WHOLE], [0, WHOLE], [1, WHOLE], [PARTIAL, 1], [1, 1]])
    assert extents(states, (10, 64), (4, 2)).tolist() == [[10, 64], [2.5, 64], [10, 16], [10, 32], [10, 8]]
    assert extents(states[:1], (10,), (4, 2)).tolist() == [[1, 10]]


@pytest.mark.parametrize("axes", [1, 3, 30])
def test_distinct_rows_come_in_order(axes: int) -> None:
    states = np.random.default_rng(0).integers(PARTIAL - 1, 4, (200, axes))
    states[100:] = states[np.random.default_rng(1).integers(0, 100, 100)]
    _, first, place = np.unique(states, axis=0, return_index=True, return_inverse=True)
    found = distinct(states)
    assert found[0].tolist() == first.tolist() and found[1].tolist() == place.ravel().tolist()


def test_relabelling_keeps_what_is_negative() -> None:
    states = np.array([[WHOLE, 0], [1, PARTIAL - 3], [2, 2]])
    assert relabel(states, [2, WHOLE, 0]).tolist() == [[WHOLE, 2], [WHOLE, PARTIAL - 3], [0, 0]]


# Reshapes


def passed(state: tuple[int, ...], dims: list[list[int]], factors: list[int], axes: list[int]) -> tuple[list, list]:
    through, kept = decompose(np.array([state]), dims, factors, axes)
    return through[0].tolist(), kept[0].tolist()


@pytest.mark.parametrize(
    ("state", "through", "kept"),
    [
        ((WHOLE, WHOLE), [WHOLE, WHOLE], [WHOLE, WHOLE]),
        ((0, 1), [0, 3], [0, 1]),
        ((0, 0), [0, 1], [0, 0]),  # 4 of the major factor's 4, then 2 of the minor one's 6
        ((1, 0), [3, 0], [1, 0]),  # 2 of 4
        ((PARTIAL - 3, 0), [PARTIAL - 3, 0], [PARTIAL - 3, 0]),
    ],
)
def test_a_merged_dim_fills_its_major_factor_first(state: tuple[int, ...], through: list, kept: list) -> None:
    # [batch 4 x heads 6, width 8], as [batch, heads, width]
    assert passed(state, [[0, 1], [3]], [4, 6, 1, 8], [4, 2]) == (through, kept)


def test_an_axis_that_does_not_divide_the_major_factor_is_dropped() -> None:
    assert passed((0,), [[0, 1]], [3, 8], [4]) == ([WHOLE], [WHOLE])
    assert passed((0, 0), [[0, 1]], [2, 8], [2, 4]) == ([0, 1], [0, 0])
    assert passed((0, 0), [[0, 1]], [4, 8], [2, 4]) == ([0, WHOLE], [0, WHOLE]), "two are left, four do not fit"


def test_factors_of_one_are_passed_over() -> None:
    assert passed((0,), [[0, 1, 2]], [1, 8, 4], [4]) == ([1], [0])


def test_a_dim_without_factors_takes_no_axis() -> None:
    assert passed((0, 1), [[], [0]], [8], [4, 2]) == ([WHOLE, 0], [WHOLE, 1])


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3),
    st.integers(0, 3),
)
def test_what_passes_a_reshape_splits_the_same_elements(factors: list[int], axes: list[int], cut: int) -> None:
    cut = min(cut, len(factors))
    dims = [list(range(cut)), list(range(cut, len(factors)))]
    sizes = [math.prod(factors[f] for f in dim) for dim in dims]
    states = enumerate_states(sizes, axes, even=True)
    through, kept = decompose(states, dims, factors, axes)
    shape = [*sizes]
    index = np.arange(math.prod(sizes))
    for row in range(len(states)):
        assert all(k in (WHOLE, s) for k, s in zip(kept[row], states[row], strict=True))
        for device in (0, -1):  # first or last along every axis
            whole, part = index.reshape(shape), index.reshape(factors)
            for axis, n in enumerate(axes):
                if kept[row, axis] >= 0:
                    whole = np.split(whole, n, axis=kept[row, axis])[device]
                    part = np.split(part, n, axis=through[row, axis])[device]
            assert whole.ravel().tolist() == part.ravel().tolist()
