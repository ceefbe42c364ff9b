"""The public form of a sharding choice: nodes with alternatives, pairwise costs, memory over time."""

import dataclasses

import numpy as np
from numpy.typing import NDArray


FORBIDDEN = 10**18
"""A cost that marks an alternative, or a pair of alternatives, as not allowed. Costs whose sum reaches it cannot be
told from these: give them in larger units."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Choose one alternative per node; minimise node plus edge costs; keep memory within a limit at all times.

    All arrays are flat with offsets (CSR style), so that a problem is a handful of arrays however large it is.
    Costs are int64 picoseconds; usages int64 bytes; times int64 points on any axis, intervals half open.
    A node may have any number of memory terms (the contest format allows one, see `write_contest`).
    """

    node_offsets: NDArray[np.int64]
    """[N + 1]; alternatives of node n are `node_offsets[n]:node_offsets[n + 1]` in `node_costs`."""
    node_costs: NDArray[np.int64]
    edge_nodes: NDArray[np.int64]
    """[E, 2]; duplicates add up."""
    edge_offsets: NDArray[np.int64]
    """[E + 1]; costs of edge e, row-major over the endpoints' alternatives."""
    edge_costs: NDArray[np.int64]
    term_nodes: NDArray[np.int64]
    """[T]; the node whose choice decides how much this memory term uses."""
    term_intervals: NDArray[np.int64]
    """[T, 2]; half open; empty when start >= end."""
    term_offsets: NDArray[np.int64]
    """[T + 1]; usage of term t, one value per alternative of its node."""
    term_usages: NDArray[np.int64]
    usage_limit: int | None
    """Bytes; None for no limit."""

    @property
    def num_nodes(self) -> int:
        """Nodes, each with at least one choice."""
        return len(self.node_offsets) - 1

    @property
    def num_edges(self) -> int:
        """Pairs of nodes with a table of costs."""
        return len(self.edge_nodes)
