"""Climbing where only part of the alternatives are left: each block costs far less, and little is lost."""

import dataclasses

import numpy as np

from autoshard.solver._climb import Climber
from autoshard.solver._clock import Due
from autoshard.solver._flat import Flat, flatten
from autoshard.solver._graph import Graph, Ints
from autoshard.solver._restrict import restricted


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    climber: Climber
    prices: np.ndarray
    """[times of the smaller graph]"""
    offset: float
    """What a cost of the smaller graph lacks to be one of the larger."""
    _graph: Graph
    _names: list[int]
    _after: int
    _outer: list[int]

    def whole(self, chosen: Ints) -> Ints:
        """Flat choices of the larger graph from those of the smaller."""
        full = self._graph.restore(dict(zip(self._names, chosen.tolist(), strict=True)), self._after)
        return full[self._outer]


def make_stage(
    graph: Graph,
    names: list[int],
    flat: Flat,
    slack: np.ndarray,
    limit: float,
    start: Ints,
    prices: np.ndarray,
    seed: int,
    due: Due,
) -> Stage | None:
    """A searcher on `graph` with only alternatives up to the slack `limit` and those of `start`, beginning there.

    None when the reductions leave nothing to search, or `start` uses what no feasible choices can.
    """
    small = restricted(graph, names, flat, slack, limit, np.inf, start, due).graph
    if small is None or len(small.costs) < 2:
        return None
    after = len(graph.undo)
    full = np.zeros(graph.size, dtype=np.int64)
    full[names] = start
    choices = small.project(full, after)
    if choices is None:
        return None
    inner, arrays = flatten(small)
    merged = np.zeros(len(small.times))
    if len(small.times):
        # A time that is gone is covered by one nearby.
        places = np.searchsorted(small.times, graph.times).clip(0, len(small.times) - 1)
        np.add.at(merged, places, prices)
    climber = Climber(arrays, seed)
    climber.start(np.array([choices[name] for name in inner], dtype=np.int64))
    return Stage(climber, merged, float(small.offset - graph.offset), small, inner, after, names)
