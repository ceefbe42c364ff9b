"""The reductions' compiled loops against numpy's."""

from collections.abc import Callable

import numpy as np
import pytest

from autoshard.solver import FORBIDDEN
from autoshard.solver.dominance_kernels import dominators, fold_between
from autoshard.solver.reductions import _dominators_plainly, _fold_between_plainly


def random_table(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Draw small costs with many ties, some of them forbidden. The least of every row is 0."""
    table = rng.integers(0, 3, (rows, columns))
    table -= table.min(axis=1, keepdims=True)
    return np.where(rng.random(table.shape) < 0.1, FORBIDDEN, table)


@pytest.mark.parametrize("seed", range(40))
def test_dominators_are_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 30))
    cost = rng.integers(0, 4, count)
    usages = [rng.integers(0, 3, count) for _ in range(rng.integers(0, 3))]
    tables = [random_table(rng, count, int(rng.integers(1, 4))) for _ in range(rng.integers(0, 4))]
    found = dominators(cost, usages, tables)
    assert (found == _dominators_plainly(cost, usages, tables)).all()
    assert not found.diagonal().any()


def test_some_alternatives_dominate_and_some_do_not() -> None:
    found = dominators(np.array([1, 0, 0]), [np.array([2, 2, 1])], [np.array([[0, 1], [0, 1], [0, 5]])])
    assert found.tolist() == [[False, True, False], [False, False, False], [False, False, False]]


@pytest.mark.parametrize("seed", range(10))
def test_folding_is_the_same_also_in_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, left, right = (int(n) for n in rng.integers(1, 20, 3))
    from_left, table = random_table(rng, count, left), random_table(rng, count, right)
    best, answer = _fold_between_plainly(from_left, table)
    other, whose = fold_between(from_left, table)
    assert (best == other).all() and (answer == whose).all()


@pytest.mark.parametrize("fold", [fold_between, _fold_between_plainly])
def test_folding_names_the_last_of_many_alternatives(fold: Callable[..., tuple[np.ndarray, np.ndarray]]) -> None:
    from_left, right = np.ones((40_000, 2), dtype=np.int64), np.ones((40_000, 2), dtype=np.int64)
    from_left[-1] = 0
    best, answer = fold(from_left, right)
    assert best.tolist() == [[1, 1], [1, 1]] and answer.tolist() == [[39_999, 39_999], [39_999, 39_999]]
