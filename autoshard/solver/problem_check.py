"""Validation of a `Problem`, which reports the place of the first mistake."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.errors import UserError
from autoshard.solver.problem import Problem


def validate(problem: Problem) -> None:
    """Check shapes, types, offsets and ranges of every array of `problem`.

    Arrays are int64, and there must be at least one node. Each node needs an alternative. Costs may be negative.
    Usages may not, an interval must not start below 0 or end before it starts, and a usage limit must be at least 1.
    Empty intervals and self edges are valid. Raises `UserError` naming the array, node, edge or term at fault.
    """
    arrays = {
        "node_offsets": 1,
        "node_costs": 1,
        "edge_nodes": 2,
        "edge_offsets": 1,
        "edge_costs": 1,
        "term_nodes": 1,
        "term_intervals": 2,
        "term_offsets": 1,
        "term_usages": 1,
    }
    for name, ndim in arrays.items():
        value = getattr(problem, name)
        if not isinstance(value, np.ndarray) or value.dtype != np.int64:
            counts = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
            raise UserError(f"Problem.{name} is {counts}; it must be a numpy array of int64")
        if value.ndim != ndim or (ndim == 2 and value.shape[1] != 2):
            wanted = "[n]" if ndim == 1 else "[n, 2]"
            raise UserError(f"Problem.{name} has shape {list(value.shape)}; it must have shape {wanted}")
    if len(problem.node_offsets) < 2:
        raise UserError("the problem has no nodes; at least one node with one alternative is needed")
    _check_offsets("node", problem.node_offsets, len(problem.node_costs))
    _check_offsets("edge", problem.edge_offsets, len(problem.edge_costs))
    _check_offsets("term", problem.term_offsets, len(problem.term_usages))
    sizes = np.diff(problem.node_offsets)
    _refuse(sizes < 1, lambda n: f"node {n} has no alternatives; every node needs at least one")
    if len(problem.edge_offsets) != len(problem.edge_nodes) + 1:
        raise UserError(
            f"{len(problem.edge_nodes)} edges are named but {len(problem.edge_offsets) - 1} have costs; "
            "each edge needs one list of costs"
        )
    count = len(sizes)
    outside = (problem.edge_nodes < 0) | (problem.edge_nodes >= count)
    _refuse(
        outside.any(axis=1),
        lambda e: f"edge {e} joins nodes {problem.edge_nodes[e].tolist()}, but nodes are numbered 0 to {count - 1}",
    )
    ends = sizes[problem.edge_nodes]
    counts = np.diff(problem.edge_offsets)
    _refuse(
        counts != ends[:, 0] * ends[:, 1],
        lambda e: (
            f"edge {e} has {counts[e]} costs, but its nodes {problem.edge_nodes[e].tolist()} have "
            f"{ends[e, 0]} and {ends[e, 1]} alternatives, so {ends[e, 0] * ends[e, 1]} are needed"
        ),
    )
    if len(problem.term_nodes) != len(problem.term_intervals) or len(problem.term_nodes) + 1 != len(
        problem.term_offsets
    ):
        raise UserError(
            f"the memory terms name {len(problem.term_nodes)} nodes, {len(problem.term_intervals)} intervals and "
            f"{len(problem.term_offsets) - 1} lists of usages; these numbers must agree"
        )
    owner = problem.term_nodes
    _refuse(
        (owner < 0) | (owner >= count),
        lambda t: f"memory term {t} belongs to node {owner[t]}, but nodes are numbered 0 to {count - 1}",
    )
    usages = np.diff(problem.term_offsets)
    _refuse(
        usages != sizes[owner],
        lambda t: (
            f"memory term {t} of node {owner[t]} has {usages[t]} usages, "
            f"but the node has {sizes[owner[t]]} alternatives"
        ),
    )
    starts, stops = problem.term_intervals[:, 0], problem.term_intervals[:, 1]
    _refuse(
        starts < 0,
        lambda t: f"node {owner[t]} has the interval [{starts[t]}, {stops[t]}), which starts before time 0",
    )
    _refuse(
        stops < starts,
        lambda t: f"node {owner[t]} has the interval [{starts[t]}, {stops[t]}), which ends before it starts",
    )
    negative = np.flatnonzero(problem.term_usages < 0)
    if len(negative):
        term = int(np.searchsorted(problem.term_offsets, negative[0], side="right")) - 1
        value = problem.term_usages[negative[0]]
        raise UserError(f"node {owner[term]} has the usage {value}; a usage must be 0 or more bytes")
    limit = problem.usage_limit
    if limit is not None and limit <= 0:
        raise UserError(f"the usage limit is {limit}; it must be at least 1 byte, or absent for no limit")


def _check_offsets(kind: str, offsets: NDArray[np.int64], total: int) -> None:
    """Raise `UserError` for offsets that do not start at 0, end at `total`, and never fall; equal neighbours are valid.

    `kind` names the array in the message.
    """
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != total:
        raise UserError(f"Problem.{kind}_offsets must start at 0 and end at {total}, the number of values it cuts up")
    _refuse(np.diff(offsets) < 0, lambda k: f"Problem.{kind}_offsets falls after {kind} {k}; offsets must never fall")


def _refuse(bad: ArrayLike, sentence: Callable[[int], str]) -> None:
    """Raise `UserError` with a sentence about the first element that is True in `bad`; return if none is.

    `sentence` makes the message from that element's index.
    """
    places = np.flatnonzero(np.asarray(bad))
    if len(places):
        raise UserError(sentence(int(places[0])))
