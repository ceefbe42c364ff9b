"""One searcher: holds choices, improves them by block moves, keeps the price of memory near where limits just hold."""

import time

import numpy as np

from autoshard.solver._block import workspace
from autoshard.solver._clock import Due
from autoshard.solver._flat import Flat
from autoshard.solver._graph import Ints
from autoshard.solver._search import improve, profile


_LARGEST = 200
_STEPS = 12
_MOVES = 50
"""Block moves between two looks at the price of memory."""
_HIGHEST = 1e30
"""Largest price of a byte for one time, where no choices keep memory however long the search goes on."""
_PAUSE_S = 0.2
"""Seconds after which a timed run wants to be asked whether it is due: fewer moves are then made at a time."""


class Climber:
    """Local search on one flat graph; used by one thread at a time."""

    def __init__(self, flat: Flat, seed: int):
        self.flat = flat
        self._work = workspace(flat, min(_LARGEST, len(flat.node_at) - 1))
        self._largest = min(_LARGEST, len(flat.node_at) - 1)
        self._used = np.zeros(len(flat.capacity), dtype=np.int64)
        self._random = np.random.default_rng(seed)
        self._state = np.array([np.inf, 0.0, np.inf, np.inf])
        self.chosen = np.zeros(len(flat.node_at) - 1, dtype=np.int64)
        self.best = self.chosen.copy()
        self.penalty = 1.0
        self.moves = 0
        self._at_once = _MOVES

    @property
    def cost(self) -> float:
        """Cost of `best`; infinite when no choices met so far keep memory."""
        return float(self._state[2])

    @property
    def merit(self) -> float:
        """Cost plus penalty of the present choices."""
        return float(self._state[0] + self.penalty * self._state[1])

    def start(self, chosen: Ints) -> None:
        """Goes on from `chosen`."""
        self.chosen = chosen.copy()
        cost, excess = profile(self.flat, self.chosen, self._used)
        self._state[0], self._state[1] = cost, excess
        if excess == 0 and cost < self._state[2]:
            self._state[2] = cost
            self.best = self.chosen.copy()
        self._state[3] = self.merit

    def run(self, prices: np.ndarray, chunks: int, slack: float = 0.0) -> None:
        """So many chunks of block moves; `slack` is how far (in cost) the search may leave the best behind."""
        for _ in range(chunks):
            self._chunk(prices, _MOVES, slack)

    def run_until(self, due: Due, prices: np.ndarray, slack: float = 0.0) -> None:
        """At least one chunk of block moves, and more until `due`."""
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
        self._state[3] = min(self.merit, self._state[2])
        seed = int(self._random.integers(2**31))
        improve(
            self.flat, self._work, prices, self.chosen, self._used, seed, moves, self.penalty,
            self._largest, _STEPS, slack, self.best, self._state,
        )  # fmt: skip
        self.moves += moves
        self.penalty = min(self.penalty * (1.15 if self._state[1] > 0 else 0.98), _HIGHEST)
