"""Compiled inner loops of the reductions, for large nodes: they give what numpy gives there, entry by entry."""

import numpy as np

from autoshard.base.numba_jit import njit
from autoshard.solver.problem import FORBIDDEN
from autoshard.solver.residual_graph import Ints


_FORBIDDEN = int(FORBIDDEN)


def dominators(cost: Ints, usages: list[Ints], tables: list[Ints]) -> np.ndarray:
    """[a, b] whether moving from alternative a to b costs nothing whatever the neighbours chose, and uses no more.

    `tables` [alternatives, of a neighbour] each have a 0 in every row that allows anything.
    """
    wide = np.concatenate(tables, axis=1) if tables else np.zeros((len(cost), 0), dtype=np.int64)
    ends = np.cumsum([table.shape[1] for table in tables], dtype=np.int64)
    memory = np.stack(usages, axis=1) if usages else np.zeros((len(cost), 0), dtype=np.int64)
    found = np.zeros((len(cost), len(cost)), dtype=bool)
    _dominators(cost, memory, wide, ends, found)
    return found


@njit(cache=True, nogil=True)
def _dominators(cost, memory, wide, ends, found):
    count = len(cost)
    for a in range(count):
        for b in range(count):
            if a != b and cost[b] <= cost[a]:
                found[a, b] = _dominates(cost[b] - cost[a], memory[a], memory[b], wide[a], wide[b], ends)


@njit(cache=True, nogil=True)
def _dominates(bound, memory, memory_there, row, there, ends):
    """Whether a move that saves `-bound` by itself is free; as soon as one neighbour can make it dearer it is not."""
    for term in range(len(memory)):
        if memory_there[term] > memory[term]:
            return False
    column = 0
    for end in ends:
        worst = -_FORBIDDEN
        while column < end:
            # Where a is forbidden nothing is lost by moving; both forbidden gives 0, which is the same.
            if row[column] < _FORBIDDEN:
                worst = max(worst, there[column] - row[column])
                if bound + worst > 0:
                    return False
            column += 1
        bound += worst
    return True


def fold_between(from_left: Ints, right: Ints) -> tuple[Ints, np.ndarray]:
    """[left, right] the least of `from_left` [alternatives, left] plus `right` [alternatives, right], and whose it is.

    The first alternative that comes to it.
    """
    best = from_left[0][:, None] + right[0][None, :]
    answer = np.zeros(best.shape, dtype=np.int16)
    _fold_between(from_left, right, best, answer)
    return best, answer


@njit(cache=True, nogil=True)
def _fold_between(from_left, right, best, answer):
    for alternative in range(1, len(from_left)):
        for one in range(best.shape[0]):
            add = from_left[alternative, one]
            row, whose, other = best[one], answer[one], right[alternative]
            for two in range(len(row)):
                total = add + other[two]
                if total < row[two]:
                    row[two] = total
                    whose[two] = alternative
