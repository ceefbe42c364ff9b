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
    """[N]; one alternative for each node. For INFEASIBLE and UNKNOWN: the choices with the smallest excess found."""
    cost: int
    """Exact sum of the chosen costs, recomputed from the whole problem by `evaluate`."""
    lower_bound: int
    """Lower bound on the cost of all feasible choices; `FORBIDDEN` if INFEASIBLE."""
    status: Status
    stats: dict[str, Any]
    """Statistics of the solve, not needed to use the answer. Without feasible choices they contain `excess` (bytes, the
    smallest found) and `excess_time` (the time point).
    """

    @property
    def gap(self) -> float:
        """(cost - lower_bound) / cost; 0 when proven optimal, infinite without feasible choices."""
        if self.status is Status.OPTIMAL:
            return 0.0
        if self.status is not Status.FEASIBLE:
            return float("inf")
        return (self.cost - self.lower_bound) / max(1, abs(self.cost))
