"""Local search: block moves on all alternatives, or on those that a bound leaves."""

import dataclasses
import time

import numpy as np

from autoshard.solver.clocks import Due
from autoshard.solver.flat_graph import Flat, flatten
from autoshard.solver.residual_graph import Graph, Ints
from autoshard.solver.search.block_kernels import workspace
from autoshard.solver.search.pruning import restricted
from autoshard.solver.search.search_kernels import improve, profile


_LARGEST = 200
"""Most nodes of a block."""
_STEPS = 12
"""Most steps of the memory prices in one block move."""
_MOVES = 50
"""Block moves between two updates of the memory penalty."""
_HIGHEST = 1e30
"""Largest penalty of one byte at one time. It caps the growth if no choices fit in memory."""
_PAUSE_S = 0.2
"""Longest seconds between two checks of `due` in a timed run; slower chunks are halved."""


class LocalSearch:
    """Local search on one flat graph; used by one thread at a time."""

    def __init__(self, flat: Flat, seed: int):
        self.flat = flat
        self._work = workspace(flat, min(_LARGEST, len(flat.node_at) - 1))
        self._largest = min(_LARGEST, len(flat.node_at) - 1)
        self._used = np.zeros(len(flat.capacity), dtype=np.int64)
        self._random = np.random.default_rng(seed)
        self._state = np.array([np.inf, 0.0, np.inf, np.inf])
        """`state` of `search_kernels.improve`."""
        self.chosen = np.zeros(len(flat.node_at) - 1, dtype=np.int64)
        """[nodes] current choices, within memory or not; valid after `start`."""
        self.best = self.chosen.copy()
        """[nodes] cheapest choices so far that fit in memory; valid if `cost` is finite."""
        self.penalty = 1.0
        """Cost of one byte above the limit at one time; every chunk of moves changes it."""
        self.moves = 0
        """Number of block moves so far."""
        self._at_once = _MOVES
        """Moves of the next chunk of a timed run."""

    @property
    def cost(self) -> float:
        """Cost of `best`; infinite when no choices so far fit in memory."""
        return float(self._state[2])

    @property
    def merit(self) -> float:
        """Cost plus memory penalty of the current choices."""
        return float(self._state[0] + self.penalty * self._state[1])

    def start(self, chosen: Ints) -> None:
        """Continue from `chosen` [nodes], within memory or not; they become `best` if they fit and cost less."""
        self.chosen = chosen.copy()
        cost, excess = profile(self.flat, self.chosen, self._used)
        self._state[0], self._state[1] = cost, excess
        if excess == 0 and cost < self._state[2]:
            self._state[2] = cost
            self.best = self.chosen.copy()
        self._state[3] = self.merit

    def run(self, prices: np.ndarray, chunks: int, slack: float = 0.0) -> None:
        """Run `chunks` chunks of block moves with the memory prices `prices` [times].

        `slack` is the cost by which the search may move away from the best. `start` must precede.
        """
        for _ in range(chunks):
            self._chunk(prices, _MOVES, slack)

    def run_until(self, due: Due, prices: np.ndarray, slack: float = 0.0) -> None:
        """Run at least one chunk of block moves, and more until `due`, as `run` does.

        Chunks are sized for checks of `due` at least every `_PAUSE_S` seconds.
        """
        while True:
            tick = time.monotonic()
            self._chunk(prices, self._at_once, slack)
            spent = time.monotonic() - tick
            if spent > _PAUSE_S:
                self._at_once = max(1, self._at_once // 2)
            elif spent < 0.2 * _PAUSE_S:
                self._at_once = min(_MOVES, 2 * self._at_once)
            if due():
                return

    def _chunk(self, prices: np.ndarray, moves: int, slack: float) -> None:
        """Run one chunk of block moves, then raise the penalty if memory is exceeded, or lower it otherwise."""
        self._state[3] = min(self.merit, self._state[2])
        seed = int(self._random.integers(2**31))
        improve(
            self.flat, self._work, prices, self.chosen, self._used, seed, moves, self.penalty,
            self._largest, _STEPS, slack, self.best, self._state,
        )  # fmt: skip
        self.moves += moves
        self.penalty = min(self.penalty * (1.15 if self._state[1] > 0 else 0.98), _HIGHEST)


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """Local search on a smaller graph, with the mapping back to the larger one."""

    climber: LocalSearch
    """Local search on the smaller graph, which has its start."""
    prices: np.ndarray
    """[times of the smaller graph] memory prices."""
    offset: float
    """Cost in the larger graph minus cost in the smaller graph."""
    _graph: Graph
    """The smaller graph."""
    _names: list[int]
    """Its nodes in the order of flat choices."""
    _after: int
    """Number of undo steps of the larger graph."""
    _outer: list[int]
    """Nodes of the larger graph in the order of flat choices."""

    def whole(self, chosen: Ints) -> Ints:
        """Return flat choices of the larger graph from flat choices of the smaller."""
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
    """Build a climber on `graph`, restricted to alternatives with slack up to `limit` and to those of `start`.

    - `names`, `flat`: the result of `flatten(graph)`.
    - `slack`: slack of each alternative in cost, [alternatives].
    - `start`: flat choices where the climber begins.
    - `prices`: memory prices of `graph`, [times].
    - `seed`: seed of the climber.
    - `due`: returns True when the reductions must end.

    The restricted graph is reduced before; `graph` stays unchanged. Returns None when the reductions leave fewer than
    two nodes, or when `start` uses an alternative that cannot be feasible.
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
        # A time that the reductions dropped is implied by a nearby one.
        places = np.searchsorted(small.times, graph.times).clip(0, len(small.times) - 1)
        np.add.at(merged, places, prices)
    climber = LocalSearch(arrays, seed)
    climber.start(np.array([choices[name] for name in inner], dtype=np.int64))
    return Stage(climber, merged, float(small.offset - graph.offset), small, inner, after, names)
