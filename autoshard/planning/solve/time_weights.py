"""Which weights of a block's compute and links to solve with: the step time's bound, raised cut by cut.

For weights w (non-negative, those of a block summing to one) the least weighted time D(w) bounds every plan's true
time from below, and D is concave: every known choice cuts it off from above by `exposed + w . its channels`. The next
weights are those nearest to the best so far (in their largest difference) at which all cuts allow a good part of what
is still to be gained: the level method (Lemarechal, Nemirovskii, Nesterov, Math. Programming 69, 1995).
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.planning.price.evaluate import Outcome
from autoshard.planning.solve.problem_builder import Weights
from autoshard.planning.space.decision_model import EXPOSED, Channel, Model


LEVEL = 0.9
"""Part of what the cuts still allow that the next weights must promise."""
ABOVE = 1e-3
"""How much more than what is to be beaten is aimed at."""
FLOOR = 3e-4
"""Least weight of a channel: what is hidden is still better small."""


def even_weights(model: Model) -> dict[Channel, float]:
    """The start: half of every block's weight on compute, the rest shared by its links."""
    channels = _channels(model)
    found = {}
    for block, what in channels:
        peers = sum(c[0] == block for c in channels)
        found[(block, what)] = 0.5 if what == "compute" else 0.5 / max(1, peers - 1)
    return found


def _channels(model: Model) -> list[Channel]:
    found = {c for node in model.nodes for c in node.time} | {c for reshard in model.reshards for c in reshard.costs}
    return sorted(found - {EXPOSED})


def normalise(weights: Mapping[Channel, float]) -> dict[Channel, float]:
    """The same with every block's weights summing to one, as the bound needs."""
    totals: dict[int, float] = {}
    for (block, _), w in weights.items():
        totals[block] = totals.get(block, 0.0) + w
    return {c: w / totals[c[0]] for c, w in weights.items() if totals[c[0]] > 0}


def carried_weights(model: Model, other: Weights) -> dict[Channel, float]:
    """A start from good weights on another mesh: each block's compute has the weight it has there."""
    found = even_weights(model)
    for block, what in found:
        compute = other.get((block, "compute"))
        if compute is not None:
            links = sum(own == block for own, _ in found) - 1
            found[(block, what)] = compute if what == "compute" else max(FLOOR, (1 - compute) / links)
    return normalise(found)


@dataclasses.dataclass(slots=True)
class Weighing:
    """The best weights so far, and what is known of other ones."""

    weights: Weights
    """The weights whose bound is the highest so far."""
    bound_s: float = -1.0
    cuts: list[tuple[float, NDArray[np.float64]]] = dataclasses.field(default_factory=list)
    """Exposed seconds and seconds by channel of every known choice."""

    @property
    def channels(self) -> list[Channel]:
        return list(self.weights)

    def add_choice(self, outcome: Outcome) -> None:
        """A choice that keeps all limits."""
        seconds = np.array([outcome.channels.get(c, 0.0) for c in self.weights])
        self.cuts.append((outcome.channels.get(EXPOSED, 0.0), seconds))

    def add_bound(self, weights: Weights, bound_s: float) -> None:
        """No choice has less weighted time than that."""
        if bound_s > self.bound_s:
            self.weights, self.bound_s = dict(weights), bound_s

    def following(self, enough_s: float, beat_s: float = math.inf) -> Weights | None:
        """The next weights to solve with; None if none can raise the bound by more than `enough_s`.

        A bound a little above `beat_s` is all that is aimed at: weights further away than that would be a gamble.
        """
        if not self.cuts or len(self.weights) <= len({block for block, _ in self.weights}):
            return None
        most, found = self._highest()
        if most <= self.bound_s + enough_s:
            return None
        level = self.bound_s + LEVEL * (most - self.bound_s) if self.bound_s > 0 else most
        level = min(level, (1 + ABOVE) * beat_s)
        return self._nearest(level) or found

    def _highest(self) -> tuple[float, Weights]:
        """Where the cuts allow the highest bound."""
        n = len(self.weights)
        scale = self._scale()
        objective = np.append(np.zeros(n), -1.0)
        above = np.array([[*(-seconds / scale), 1.0] for _, seconds in self.cuts])
        right = np.array([exposed / scale for exposed, _ in self.cuts])
        solved = self._solve(objective, above, right, free=(None, None))
        return float(solved[n]) * scale, self._read(solved[:n])

    def _nearest(self, level: float) -> Weights | None:
        """The weights nearest to the best ones at which all cuts allow `level`."""
        n = len(self.weights)
        scale = self._scale()
        center = np.array(list(self.weights.values()))
        objective = np.append(np.zeros(n), 1.0)
        cuts = np.array([[*(-seconds / scale), 0.0] for _, seconds in self.cuts])
        near = np.concatenate([np.eye(n), -np.eye(n)])
        above = np.concatenate([cuts, np.concatenate([near, -np.ones((2 * n, 1))], axis=1)])
        right = np.concatenate([[(exposed - level) / scale for exposed, _ in self.cuts], center, -center])
        solved = self._solve(objective, above, right, free=(0.0, None))
        return self._read(solved[:n]) if len(solved) else None

    def _scale(self) -> float:
        return max(exposed + float(seconds.sum()) for exposed, seconds in self.cuts) or 1.0

    def _solve(
        self,
        objective: NDArray[np.float64],
        above: NDArray[np.float64],
        right: NDArray[np.float64],
        free: tuple[float | None, float | None],
    ) -> NDArray[np.float64]:
        """Weights of blocks that sum to one, and one more variable; empty if there are none."""
        from scipy.optimize import linprog

        blocks = sorted({block for block, _ in self.weights})
        sums = np.array([[*(float(c[0] == block) for c in self.weights), 0.0] for block in blocks])
        counts = [sum(c[0] == own for c in self.weights) for own, _ in self.weights]
        bounds = [(FLOOR if count > 1 else 1.0, 1.0) for count in counts]
        result = linprog(objective, above, right, sums, np.ones(len(blocks)), [*bounds, free], method="highs")
        return result.x if result.status == 0 else np.zeros(0)

    def _read(self, values: NDArray[np.float64]) -> Weights:
        return normalise({c: max(FLOOR, float(w)) for c, w in zip(self.weights, values, strict=True)})
