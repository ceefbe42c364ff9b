"""Public form of a sharding choice: nodes with alternatives, pairwise costs, memory over time."""

import dataclasses

import numpy as np
from numpy.typing import NDArray


FORBIDDEN = 10**18
"""Cost that marks an alternative, or a pair of alternatives, as not allowed. A sum of allowed costs that reaches it
cannot be distinguished from a forbidden one; use larger units in that case.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Optimisation problem: one alternative for each node, at the least node plus edge cost, within a memory limit at
    every time.

    All arrays are flat with offsets (CSR style), so that a problem of any size consists of a few arrays. Costs are
    int64 picoseconds, usages int64 bytes. Times are int64 points on any axis, and intervals are half open. A node may
    have any number of memory terms (the contest format allows one, see `write_contest`).
    """

    node_offsets: NDArray[np.int64]
    """[N + 1]; alternatives of node n are `node_offsets[n]:node_offsets[n + 1]` in `node_costs`."""
    node_costs: NDArray[np.int64]
    """Costs of all alternatives of all nodes, `FORBIDDEN` or more where not allowed."""
    edge_nodes: NDArray[np.int64]
    """[E, 2]; the costs of duplicate edges add up."""
    edge_offsets: NDArray[np.int64]
    """[E + 1]; offsets of each edge's costs, row-major over the endpoints' alternatives."""
    edge_costs: NDArray[np.int64]
    """Costs of all pairs of alternatives of all edges, `FORBIDDEN` or more where not allowed."""
    term_nodes: NDArray[np.int64]
    """[T]; the node whose choice decides the usage of each memory term."""
    term_intervals: NDArray[np.int64]
    """[T, 2]; half open, and empty when start >= end."""
    term_offsets: NDArray[np.int64]
    """[T + 1]; offsets of each term's usages, one for each alternative of its node."""
    term_usages: NDArray[np.int64]
    """Bytes of all alternatives of all terms, 0 or more."""
    usage_limit: int | None
    """Largest total usage in bytes at any time; None for no limit."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes, each with at least one alternative."""
        return len(self.node_offsets) - 1

    @property
    def num_edges(self) -> int:
        """Number of edges; duplicates count separately."""
        return len(self.edge_nodes)
