"""Walks through boxes of devices."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.torus import ring, snake


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3)


def _apart(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return sum(abs(i - j) for i, j in zip(a, b, strict=True))


@given(SHAPES)
def test_a_snake_visits_all_points_one_step_at_a_time(shape: list[int]) -> None:
    points = snake(shape)
    assert sorted(points) == list(itertools.product(*map(range, shape)))
    assert all(_apart(a, b) == 1 for a, b in itertools.pairwise(points))


@given(SHAPES.filter(lambda shape: len(shape) > 1))
def test_a_ring_closes_where_the_box_allows_it(shape: list[int]) -> None:
    points = ring(shape, [False] * len(shape))
    assert sorted(points) == list(itertools.product(*map(range, shape)))
    assert all(_apart(a, b) == 1 for a, b in itertools.pairwise(points))
    plane = sum(size > 1 for size in shape) > 1
    if plane and math.prod(shape) % 2 == 0:
        assert _apart(points[0], points[-1]) == 1


@given(SHAPES)
def test_whole_tori_stay_row_major(shape: list[int]) -> None:
    assert ring(shape, [True] * len(shape)) == list(itertools.product(*map(range, shape)))
