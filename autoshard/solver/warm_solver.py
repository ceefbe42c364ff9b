"""Precompilation of the kernels into numba's cache, so that the first large solve does not wait for it.

The command is `python -m autoshard.solver.warm_solver`.
"""

import numpy as np

from autoshard.solver.dominance_kernels import dominators, fold_between
from autoshard.solver.flat_graph import flatten
from autoshard.solver.network import Link, Network
from autoshard.solver.problem import Problem
from autoshard.solver.residual_graph import build
from autoshard.solver.search.local_search import LocalSearch
from autoshard.solver.search.message_passing import Dual
from autoshard.solver.search.pruning import prune


def warm() -> None:
    """Run every kernel once on a problem of two nodes; the only effect is numba's cache on disk."""
    problem = Problem(
        node_offsets=np.array([0, 2, 4]),
        node_costs=np.array([1, 2, 3, 4]),
        edge_nodes=np.array([[0, 1]]),
        edge_offsets=np.array([0, 4]),
        edge_costs=np.array([0, 1, 2, 0]),
        term_nodes=np.array([0, 1]),
        term_intervals=np.array([[0, 2], [1, 3]]),
        term_offsets=np.array([0, 2, 4]),
        term_usages=np.array([5, 1, 5, 1]),
        usage_limit=7,
    )
    _, flat = flatten(build(problem))
    dual = Dual(flat)
    chosen = dual.ascend(2, 10.0, 1.0)
    dual.slack()
    table = np.array([[0.0, 1.0], [2.0, 0.0]])
    link = Link(0, 1, np.arange(2), np.arange(2), table, 1.0)
    prune(Network([np.ones(2), np.ones(2)], [link], [], None), None, None, np.inf)
    costs = np.zeros((2, 2), dtype=np.int64)
    dominators(costs[0], [costs[0]], [costs])
    fold_between(costs, costs)
    climber = LocalSearch(flat, 0)
    climber.start(chosen)
    climber.run(dual.prices, 1)


if __name__ == "__main__":
    warm()
