"""Choice of the weights of each block's compute and links, which raises the bound on the step time cut by cut.

The true time of a block is the norm of its channels' seconds with the exponent `SHARPNESS`. Weights w are non-negative,
and their norm with the dual exponent is one in each block. By Hoelder's inequality the least weighted time D(w) is a
lower bound on every plan's true time. D is concave. Every known choice bounds D from above by
`exposed + w . its channels`, a cut. The set of weights is convex, and each known weights' tangent contains it.

The next weights are those nearest to the best so far (in their largest difference) at which all cuts allow most of the
possible gain. This is the level method (Lemarechal, Nemirovskii, Nesterov, Math. Programming 69, 1995).
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import SHARPNESS, covering_share, engine_seconds
from autoshard.planning.price.evaluate import Outcome
from autoshard.planning.solve.problem_builder import Weights
from autoshard.planning.space.decision_model import EXPOSED, Channel, Model


LEVEL = 0.9
"""Share of the gain that the cuts still allow which the next weights must promise."""
ABOVE = 1e-3
"""Relative margin above the time to beat that the next weights aim at."""
DUAL = SHARPNESS / (SHARPNESS - 1.0)
"""Exponent of the norm of weights."""
FLOOR = 3e-4
"""Least weight of a channel, so that hidden communication is still minimised."""


def even_weights(model: Model) -> dict[Channel, float]:
    """Return the first weights: half of each block's weight for compute, the rest shared evenly by its other channels.

    They are no weights of a bound before `normalise`.
    """
    channels = _engines(model)
    weights = {}
    for block, what in channels:
        peers = sum(c[0] == block for c in channels)
        weights[(block, what)] = 0.5 if what == "compute" else 0.5 / max(1, peers - 1)
    return weights


def _engines(model: Model) -> list[Channel]:
    """Return (block, engine) of all channels of the model except the exposed one, sorted."""
    channels = {c for node in model.nodes for c in node.time} | {c for reshard in model.reshards for c in reshard.costs}
    return sorted(engine_seconds(dict.fromkeys(channels - {EXPOSED}, 0.0), model.one_in_flight))


def normalise(weights: Mapping[Channel, float]) -> dict[Channel, float]:
    """Scale the weights so that each block's dual norm is one, which the bound requires; leave out blocks of weight
    0.
    """
    totals: dict[int, float] = {}
    for (block, _), w in weights.items():
        totals[block] = totals.get(block, 0.0) + w**DUAL
    return {c: w / totals[c[0]] ** (1.0 / DUAL) for c, w in weights.items() if totals[c[0]] > 0}


def compute_weights(model: Model) -> dict[Channel, float]:
    """Return weights for a program that mostly computes: compute weighs `1 - FLOOR` of each block that has some."""
    return carried_weights(model, dict.fromkeys(even_weights(model), 1.0 - FLOOR))


def carried_weights(model: Model, other: Weights) -> dict[Channel, float]:
    """Return first weights, normalised, from good weights on another mesh.

    A block's compute has its weight in `other`, and its other channels share the rest evenly, each at least `FLOOR`.
    Blocks without compute in `other` have the weights of `even_weights`.
    """
    weights = even_weights(model)
    for block, what in weights:
        compute = other.get((block, "compute"))
        if compute is not None:
            links = sum(other_block == block for other_block, _ in weights) - 1
            rest = (max(0.0, 1.0 - compute**DUAL) / max(1, links)) ** (1.0 / DUAL)
            weights[(block, what)] = compute if what == "compute" else max(FLOOR, rest)
    return normalise(weights)


@dataclasses.dataclass(slots=True)
class Weighing:
    """Best weights so far, and the cuts of all known choices."""

    weights: Weights
    """Weights with the highest bound so far."""
    bound_s: float = -1.0
    """Bound in seconds that `weights` gave; -1 before the first."""
    cuts: list[tuple[float, NDArray[np.float64]]] = dataclasses.field(default_factory=list)
    """Seconds that overlap with nothing, and seconds of each of `channels`, of every known choice."""
    tried: list[Weights] = dataclasses.field(default_factory=list)
    """All weights with a known bound."""

    @property
    def channels(self) -> list[Channel]:
        """Channels with a weight, in the order of the arrays in `cuts`."""
        return list(self.weights)

    def add_choice(self, outcome: Outcome) -> None:
        """Append the cut of a choice that satisfies all limits; channels without a weight are left out."""
        engines = engine_seconds(outcome.lanes, outcome.one_in_flight)
        seconds = np.array([engines.get(c, 0.0) for c in self.weights])
        serial = (1.0 - covering_share(outcome.one_in_flight)) * outcome.compute_s
        self.cuts.append((outcome.channels.get(EXPOSED, 0.0) + serial, seconds))

    def add_bound(self, weights: Weights, bound_s: float) -> None:
        """Store weights with their lower bound on the time of all choices, as the best ones if it exceeds `bound_s`."""
        self.tried.append(weights)
        if bound_s > self.bound_s:
            self.weights, self.bound_s = dict(weights), bound_s

    def following(self, enough_s: float, beat_s: float = math.inf) -> Weights | None:
        """Return the next weights to solve with; None if no weights can raise the bound by more than `enough_s`.

        Also None without cuts, or if every block has a single channel, so that its weight is fixed. `beat_s` is the
        time to beat in seconds.

        The target is at most a little above `beat_s`; weights for a higher bound are further away and less certain.
        """
        if not self.cuts or len(self.weights) <= len({block for block, _ in self.weights}):
            return None
        highest, highest_weights = self._highest()
        if highest <= self.bound_s + enough_s:
            return None
        exact = self._exact(min(self.cuts, key=self._time)[1])
        if exact not in self.tried:
            return exact
        level = self.bound_s + LEVEL * (highest - self.bound_s) if self.bound_s > 0 else highest
        level = min(level, (1 + ABOVE) * beat_s)
        return self._nearest(level) or highest_weights

    def _time(self, cut: tuple[float, NDArray[np.float64]]) -> float:
        """Return the true seconds of a known choice, from its cut, except for `FLOOR`."""
        exposed, seconds = cut
        return exposed + float(np.array(list(self._exact(seconds).values())) @ seconds)

    def _exact(self, seconds: NDArray[np.float64]) -> Weights:
        """Return the weights at which a choice with these seconds of `channels` has its true time, except for `FLOOR`.

        The weighted time of any other choice is below its true time there.
        """
        blocks = np.array([block for block, _ in self.weights])
        longest = np.array([seconds[blocks == block].max() for block in blocks])
        shares = np.divide(seconds, longest, out=np.ones_like(seconds), where=longest > 0)
        return self._read(shares ** (SHARPNESS - 1.0))

    def _highest(self) -> tuple[float, Weights]:
        """Return the highest bound in seconds that the cuts allow, and its weights; there must be a cut."""
        n = len(self.weights)
        scale = self._scale()
        objective = np.append(np.zeros(n), -1.0)
        above = np.array([[*(-seconds / scale), 1.0] for _, seconds in self.cuts])
        right = np.array([exposed / scale for exposed, _ in self.cuts])
        solved = self._solve(objective, above, right, free=(None, None))
        return float(solved[n]) * scale, self._read(solved[:n])

    def _nearest(self, level: float) -> Weights | None:
        """Return the weights nearest to the best ones at which all cuts allow `level` seconds; None if there are none.

        The distance is the largest difference of any weight.
        """
        n = len(self.weights)
        scale = self._scale()
        center = np.array(list(self.weights.values()))
        objective = np.append(np.zeros(n), 1.0)
        cuts = np.array([[*(-seconds / scale), 0.0] for _, seconds in self.cuts])
        distances = np.concatenate([np.eye(n), -np.eye(n)])
        above = np.concatenate([cuts, np.concatenate([distances, -np.ones((2 * n, 1))], axis=1)])
        right = np.concatenate([[(exposed - level) / scale for exposed, _ in self.cuts], center, -center])
        solved = self._solve(objective, above, right, free=(0.0, None))
        return self._read(solved[:n]) if len(solved) else None

    def _scale(self) -> float:
        """Return the longest total time of the cuts, which scales the linear program; 1 if all are zero."""
        return max(exposed + float(seconds.sum()) for exposed, seconds in self.cuts) or 1.0

    def _solve(
        self,
        objective: NDArray[np.float64],
        above: NDArray[np.float64],
        right: NDArray[np.float64],
        free: tuple[float | None, float | None],
    ) -> NDArray[np.float64]:
        """Solve a linear program for the weights, and one more variable.

        Weights are within the tangents of all known weights in each block. They are at least `FLOOR`, or 1 in a block
        with one channel. The result has the weights and then the variable; it is empty if the program is infeasible.

        - `objective`: coefficients of the weights and of the variable, to minimise.
        - `above`, `right`: rows and right-hand sides of the inequalities `above @ x <= right`.
        - `free`: bounds of the variable.
        """
        from scipy.optimize import linprog

        blocks = sorted({block for block, _ in self.weights})
        known = (*self.tried, *(self._exact(seconds) for _, seconds in self.cuts))
        tangents = np.array(
            [
                [*(each[c] ** (DUAL - 1.0) if c[0] == block else 0.0 for c in self.weights), 0.0]
                for each in known
                for block in blocks
            ]
        )
        above, right = np.concatenate([above, tangents]), np.concatenate([right, np.ones(len(tangents))])
        counts = [sum(c[0] == own for c in self.weights) for own, _ in self.weights]
        bounds = [(FLOOR if count > 1 else 1.0, 1.0) for count in counts]
        result = linprog(objective, above, right, bounds=[*bounds, free], method="highs")
        return result.x if result.status == 0 else np.zeros(0)

    def _read(self, values: NDArray[np.float64]) -> Weights:
        """Return weights from the first values of a solution, raised to `FLOOR` and then normalised."""
        return normalise({c: max(FLOOR, float(w)) for c, w in zip(self.weights, values, strict=True)})
