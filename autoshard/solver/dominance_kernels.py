"""Compiled inner loops of the reductions, for large nodes; results equal those of the numpy versions entry by entry."""

import numpy as np

from autoshard.base.numba_jit import njit
from autoshard.solver.problem import FORBIDDEN
from autoshard.solver.residual_graph import Ints


_FORBIDDEN = int(FORBIDDEN)


def dominators(cost: Ints, usages: list[Ints], tables: list[Ints]) -> np.ndarray:
    """Return a mask [a, b], True if moving from alternative a to b never costs more and never uses more memory.

    The comparison covers all choices of the neighbours. Two equal alternatives dominate each other; none dominates
    itself.

    - `cost`: costs of a node, [alternatives].
    - `usages`: bytes in each of its memory terms, [alternatives] each.
    - `tables`: costs of its edges, [alternatives, of a neighbour] each, with a 0 in every row that allows anything.
    """
    wide = np.concatenate(tables, axis=1) if tables else np.zeros((len(cost), 0), dtype=np.int64)
    ends = np.cumsum([table.shape[1] for table in tables], dtype=np.int64)
    memory = np.stack(usages, axis=1) if usages else np.zeros((len(cost), 0), dtype=np.int64)
    mask = np.zeros((len(cost), len(cost)), dtype=bool)
    _dominators(cost, memory, wide, ends, mask)
    return mask


@njit(cache=True, nogil=True)
def _dominators(cost, memory, wide, ends, found):
    """Set to True the entries of `found`, the mask of `dominators`, that it should have; others are left unchanged.

    - `memory`: [alternatives, terms] bytes.
    - `wide`: the edge tables in one row for each alternative.
    - `ends`: last column plus one of each table in `wide`.
    """
    count = len(cost)
    for a in range(count):
        for b in range(count):
            if a != b and cost[b] <= cost[a]:
                found[a, b] = _dominates(cost[b] - cost[a], memory[a], memory[b], wide[a], wide[b], ends)


@njit(cache=True, nogil=True)
def _dominates(bound, memory, memory_there, row, there, ends):
    """Return True if a move that saves `-bound` in node cost costs nothing in total for any choices of the neighbours.

    `memory` and `row` are bytes and edge costs of the alternative that is left, `memory_there` and `there` those of the
    new one. A term with more bytes than before gives False.
    """
    for term in range(len(memory)):
        if memory_there[term] > memory[term]:
            return False
    column = 0
    for end in ends:
        worst = -_FORBIDDEN
        while column < end:
            # If a is forbidden, moving loses nothing; if both are forbidden the difference is 0, which is equivalent.
            if row[column] < _FORBIDDEN:
                worst = max(worst, there[column] - row[column])
                if bound + worst > 0:
                    return False
            column += 1
        bound += worst
    return True


def fold_between(from_left: Ints, right: Ints) -> tuple[Ints, np.ndarray]:
    """Compute the minimum of `from_left` [alternatives, left] plus `right` [alternatives, right] over the alternatives.

    Returns the minimum [left, right], not clipped to `FORBIDDEN`, and the first alternative that reaches it. The latter
    is int16 if that can store all numbers of alternatives, else int32.
    """
    best = from_left[0][:, None] + right[0][None, :]
    answer = np.zeros(best.shape, dtype=np.int16 if len(from_left) <= 2**15 else np.int32)
    _fold_between(from_left, right, best, answer)
    return best, answer


@njit(cache=True, nogil=True)
def _fold_between(from_left, right, best, answer):
    """Lower `best` and set `answer` of `fold_between` in place; both start with alternative 0."""
    for alternative in range(1, len(from_left)):
        for one in range(best.shape[0]):
            add = from_left[alternative, one]
            row, whose, other = best[one], answer[one], right[alternative]
            for two in range(len(row)):
                total = add + other[two]
                if total < row[two]:
                    row[two] = total
                    whose[two] = alternative
