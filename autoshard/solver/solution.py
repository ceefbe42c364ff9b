"""What `solve` returns."""

import dataclasses
import enum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Status(enum.StrEnum):
    """How a solve ended; each member is the sentence to show."""

    OPTIMAL = "the choices are proven optimal"
    FEASIBLE = "the choices keep every limit; nothing better was found before the search ended"
    INFEASIBLE = "no choices keep the memory limit and avoid every forbidden combination; this is proven"
    UNKNOWN = "no choices that keep the memory limit and avoid every forbidden combination were found"


@dataclasses.dataclass(frozen=True, slots=True)
class Solution:
    """The best choices found, and a bound on what any choices can cost."""

    choices: NDArray[np.int64]
    """[N]; one alternative per node. For INFEASIBLE and UNKNOWN: those with the smallest excess found."""
    cost: int
    """Exact sum of the chosen costs, recomputed from the whole problem by `evaluate`."""
    lower_bound: int
    """No feasible choices cost less. For INFEASIBLE: `FORBIDDEN`."""
    status: Status
    stats: dict[str, Any]
    """Numbers about the solve; never needed to use the answer. Without feasible choices it has `excess` (bytes, the
    smallest found) and `excess_time` (where)."""

    @property
    def gap(self) -> float:
        """(cost - lower_bound) / cost, 0 when proven optimal; infinite without feasible choices."""
        if self.status is Status.OPTIMAL:
            return 0.0
        if self.status is not Status.FEASIBLE:
            return float("inf")
        return (self.cost - self.lower_bound) / max(1, abs(self.cost))
