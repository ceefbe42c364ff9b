"""The record that `solve` returns."""

import dataclasses
import enum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Status(enum.StrEnum):
    """Outcome of a solve; each member's value is the sentence to show."""

    OPTIMAL = "the choices are proven optimal"
    FEASIBLE = "the choices keep every limit; nothing better was found before the search ended"
    INFEASIBLE = "no choices keep the memory limit and avoid every forbidden combination; this is proven"
    UNKNOWN = "no choices that keep the memory limit and avoid every forbidden combination were found"


@dataclasses.dataclass(frozen=True, slots=True)
class Solution:
    """The incumbent of a solve, and a lower bound on the cost of any choices."""

    choices: NDArray[np.int64]
    """[N]; one alternative for each node. For INFEASIBLE and UNKNOWN: the choices with the smallest excess found.

    The array is empty if the search ended at `enough` without choices.
    """
    cost: int
    """Exact sum of the chosen costs, recomputed from the whole problem by `evaluate`; `FORBIDDEN` for no choices."""
    lower_bound: int
    """Lower bound on the cost of all feasible choices, equal to the cost if OPTIMAL; `FORBIDDEN` if INFEASIBLE."""
    status: Status
    stats: dict[str, Any]
    """Statistics of the solve, not needed to use the answer. Without feasible choices they contain `excess` (bytes, the
    smallest found) and `excess_time` (the time point).
    """

    @property
    def gap(self) -> float:
        """`(cost - lower_bound) / abs(cost)` as a fraction; 0 when proven optimal, infinite without feasible choices.

        A cost between -1 and 1 counts as 1 in the divisor.
        """
        if self.status is Status.OPTIMAL:
            return 0.0
        if self.status is not Status.FEASIBLE:
            return float("inf")
        return (self.cost - self.lower_bound) / max(1, abs(self.cost))
