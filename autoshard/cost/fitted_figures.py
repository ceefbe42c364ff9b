"""Figures fitted to observations of one topology by robust least squares, and the calibration that plans use."""

import dataclasses
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.cost.calibration import Calibration, load_calibration, own_figures
from autoshard.cost.compiler_flags import with_flags
from autoshard.cost.observation_database import Database
from autoshard.cost.observations import STEP, Observation, compiler_version, content_hash
from autoshard.cost.step_bill import Parts, hidden_shares
from autoshard.cost.topology import Topology


def robust_fit(
    errors: NDArray[np.float64],
    slopes: NDArray[np.float64],
    sigma: NDArray[np.float64],
    prior: NDArray[np.float64],
    width: NDArray[np.float64],
    limits: tuple[ArrayLike, ArrayLike],
    huber: float,
    rounds: int = 20,
) -> NDArray[np.float64]:
    """Return the constants, [constants], that minimise the errors, linearised around the prior, and stay within limits.

    Each constant's distance from its prior counts as one more error. Errors beyond `huber` count linearly (Huber's
    loss, by weights that each round computes again).

    - `errors`: errors at `prior`, [observations].
    - `slopes`: derivative of each error by each constant, [observations, constants].
    - `sigma`: expected error of each observation, [observations].
    - `prior`, `width`: prior value and expected error of each constant, [constants].
    - `limits`: least and most value of each constant.
    - `rounds`: rounds of reweighting.
    """
    values = prior.copy()
    for _ in range(rounds):
        now = errors + slopes @ (values - prior)
        # Weights of iteratively reweighted least squares: 1 up to `huber`, then falling with the error.
        weight = np.minimum(1.0, huber / np.maximum(np.abs(now), 1e-9)) / sigma**2
        normal = slopes.T @ (weight[:, None] * slopes) + np.diag(width**-2.0)
        values = prior + np.linalg.solve(normal, -slopes.T @ (weight * errors))
        values = np.clip(values, *limits)
    return values


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """A figure that may be fitted.

    `width` is the expected error of its prior: of the logarithm if `log`, else of the figure itself.
    """

    figure: str
    width: float
    log: bool = True


_RATES = (
    Free("matmul_efficiency", 0.7),
    Free("memory_efficiency", 0.7),
    Free("vector_flops_per_s", 0.7),
    Free("op_overhead_s", 1.0),
    Free("collective_launch_s", 1.0),
)
_LINKS = (Free("link_efficiency", 0.3), Free("network_efficiency", 0.5), Free("attention_ops", 0.4))
_OVERLAPS = (
    Free("gather_overlap", 0.3, log=False),
    Free("network_overlap", 0.3, log=False),
    Free("reduction_overlap", 0.3, log=False),
    Free("pipelined_overlap", 0.25, log=False),
)

MEASURED = {
    "cpu": (*_RATES, Free("hop_s", 1.0), Free("shared_memory_traffic", 0.7)),
    "gpu": (*_RATES, *_LINKS, *_OVERLAPS[:3]),
    "tpu": (*_RATES, *_LINKS, *_OVERLAPS),
}
"""Figures that times on real devices determine, by backend."""
COMPILED = _OVERLAPS
"""Figures that a schedule determines: the overlaps. Its times are autoshard's own prices and determine nothing."""

STEP_SIGMA, OP_SIGMA, SHARE_SIGMA = 0.1, 0.3, 0.1
"""Expected errors of a step's log time, of one op shape's log time, and of the hidden share of communication."""
HUBER = 0.15
"""Size from which an error counts linearly."""
LEAST_SLOPE = 0.2
"""Least effect of a figure that moves: one prior width, as a share of the expected error of some observation."""
FARTHEST = math.log(20.0)
"""Most distance of a figure on a log scale from the shipped one."""
_STEPS, _NEAR, _CLOSE = 10, 0.1, 0.01
"""Most steps of Gauss-Newton, and in widths of priors the distance of finite differences and the step that ends it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """One fitted figure with its error."""

    figure: str
    """Name of the figure in `Calibration`."""
    value: float
    shipped: float
    """Its value before the fit: shipped, or changed by compiler flags."""
    error: float
    """Standard deviation: a share of the value on a log scale, the difference itself for overlaps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """Fitted figures of a topology, with their uncertainty."""

    calibration: Calibration
    """The figures of the topology's chip, with fitted figures in place of shipped ones."""
    figures: tuple[Fitted, ...]
    """The figures that the fit changed, by name."""
    observations: int
    """Number of observations behind the fit."""
    hash: str
    """A hash of the observations that does not depend on their order."""
    residual_before: float
    """Median absolute error of the observations with the shipped figures: in log time, or in the hidden share."""
    residual: float
    """Median absolute error of the observations with the fitted figures."""
    flags: tuple[str, ...] = ()
    """The compiler flags of all observations, whose effect the figures include."""


def fit(base: Calibration, backend: str, observations: Sequence[Observation], fixed: Collection[str] = ()) -> Fit:
    """Fit the figures of `base` that the observations determine, except those in `fixed`.

    All observations are of one topology and compiler. Their order does not matter. Without observations `base` stays
    unchanged. The result has no `flags`; `fit_observations` adds them.
    """
    cases = _cases(base, observations, backend)
    problem = _Problem(base, cases, fixed)
    values = problem.solve()
    return Fit(
        calibration=problem.calibration(values),
        figures=problem.fitted(values),
        observations=len(observations),
        hash=content_hash(observations),
        residual_before=_middle(problem.errors(problem.prior)),
        residual=_middle(problem.errors(values)),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Sight:
    """All observations of one thing, as one case of the fit."""

    observation: Observation
    seen: float
    """The median of the observed seconds, or of the observed hidden share."""
    sigma: float
    """Expected error of the case, in log time or hidden share."""
    free: tuple[Free, ...]
    """The figures that the case can determine."""
    traffic: str = ""
    """The class of communication whose hidden share a schedule showed; empty for all communication."""

    def error(self, calibration: Calibration) -> float:
        """Return the error of a calibration: log of predicted over measured time, or predicted less seen share."""
        parts = self.observation.bill.parts(calibration)
        if self.observation.judge == "measure":
            return math.log(max(parts.step_s, 1e-12) / self.seen)
        if self.traffic:
            sent, waited = parts.traffic[self.traffic]
            return 1.0 - waited / sent - self.seen
        return hidden_share(parts) - self.seen


def hidden_share(parts: Parts) -> float:
    """Return the share of a step's communication that compute does not wait for, 0 to 1; 0 without communication."""
    sent = parts.sent_s
    return 1.0 - sum(parts.waits.values()) / sent if sent > 0 else 0.0


def _cases(base: Calibration, observations: Iterable[Observation], backend: str) -> list[_Sight]:
    """Return one case for each observed thing, with the median of its repeated observations.

    Observations without a time, or a schedule without a hidden share, are omitted.
    """
    groups: dict[tuple[str, ...], list[Observation]] = {}
    for one in sorted(observations, key=lambda o: o.id):
        if (one.seen.get("hidden_share") if one.judge == "compile" else one.seen.get("seconds")) is not None:
            key = (one.judge, one.op, one.about.get("program", ""), one.about.get("plan", ""), repr(one.bill))
            groups.setdefault(key, []).append(one)
    cases = []
    for same in groups.values():
        first = same[0]
        if first.judge == "compile":
            cases += _shares(base, same)
        else:
            seen = statistics.median(one.seen["seconds"] for one in same)
            sigma = STEP_SIGMA if first.op == STEP else OP_SIGMA
            cases.append(_Sight(first, seen, sigma, MEASURED[backend]))
    return cases


def _shares(base: Calibration, same: Sequence[Observation]) -> Iterator[_Sight]:
    """Yield cases for the hidden shares in schedules of one plan.

    There is one case for each class of communication with enough traffic (`hidden_shares`) that every schedule shows.
    If some schedule has no classes, there is one case for all communication.
    """
    first = same[0]
    classes = [one.seen["hidden"] for one in same if one.seen.get("hidden")]
    if len(classes) < len(same):
        seen = statistics.median(one.seen["hidden_share"] for one in same)
        yield _Sight(first, seen, SHARE_SIGMA, COMPILED)
        return
    planned = hidden_shares(first.bill.parts(base).traffic)
    for name in sorted(set(planned).intersection(*classes)):
        yield _Sight(first, statistics.median(each[name] for each in classes), SHARE_SIGMA, COMPILED, name)


class _Problem:
    """Errors of all cases as a function of the free figures, each on its own scale."""

    def __init__(self, base: Calibration, cases: Sequence[_Sight], fixed: Collection[str]) -> None:
        self.base, self.cases = base, cases
        known = {free.figure: free for case in cases for free in case.free if free.figure not in fixed}
        # A figure of 0 (a launch of 0 s, an unused rate) has no logarithm and cannot be fitted.
        self.free = [f for _, f in sorted(known.items()) if not f.log or getattr(base, f.figure) > 0]
        self.prior = np.array([self.scaled(f) for f in self.free])
        self.width = np.array([f.width for f in self.free])
        self.sigma = np.array([case.sigma for case in cases])
        low = [p - FARTHEST if f.log else 0.0 for f, p in zip(self.free, self.prior, strict=True)]
        high = [p + FARTHEST if f.log else 1.0 for f, p in zip(self.free, self.prior, strict=True)]
        self.limits = np.array(low), np.array(high)

    def scaled(self, free: Free) -> float:
        """Return the base calibration's value of a figure on the figure's scale."""
        value = getattr(self.base, free.figure)
        return math.log(value) if free.log else value

    def calibration(self, values: NDArray[np.float64]) -> Calibration:
        """Return the base calibration with these values of the free figures, [figures], each on its scale.

        Figures that differ from the prior are rounded to six digits.
        """
        moved: dict[str, Any] = {
            free.figure: _rounded(math.exp(value) if free.log else float(value))
            for free, value, prior in zip(self.free, values, self.prior, strict=True)
            if value != prior
        }
        sources = {figure: "fitted to what was seen on this topology" for figure in moved}
        return dataclasses.replace(self.base, **moved, sources={**self.base.sources, **sources})

    def errors(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the error of every case at these values, [cases]."""
        now = self.calibration(values)
        return np.array([case.error(now) for case in self.cases])

    def slopes(self, values: NDArray[np.float64], errors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the derivative of each error by each figure, [cases, figures], given the `errors` at `values`.

        It is 0 for a figure that no case determines (`LEAST_SLOPE`).
        """
        slopes = np.zeros((len(self.cases), len(self.free)))
        for k, free in enumerate(self.free):
            cases = [i for i, case in enumerate(self.cases) if free in case.free]
            moved = values.copy()
            moved[k] += _NEAR * free.width * (1 if values[k] + _NEAR * free.width <= self.limits[1][k] else -1)
            now = self.calibration(moved)
            slopes[cases, k] = [(self.cases[i].error(now) - errors[i]) / (moved[k] - values[k]) for i in cases]
        determined = np.abs(slopes * self.width / self.sigma[:, None]).max(axis=0, initial=0.0) >= LEAST_SLOPE
        return np.where(determined, slopes, 0.0)

    def solve(self) -> NDArray[np.float64]:
        """Return the fitted values, [figures], by Gauss-Newton: linearise the errors around the last values, and step.

        A step moves a figure by at most its width. It ends after `_STEPS` steps or a step below `_CLOSE` widths.
        Without cases the prior is the result.
        """
        values = self.prior.copy()
        if not self.cases:
            return values
        for _ in range(_STEPS):
            errors = self.errors(values)
            slopes = self.slopes(values, errors)
            # `robust_fit` linearises around the prior, so the errors are extrapolated to it.
            at_prior = errors + slopes @ (self.prior - values)
            target = robust_fit(at_prior, slopes, self.sigma, self.prior, self.width, self.limits, HUBER)
            step = np.clip(target - values, -self.width, self.width)
            values = values + step
            if np.abs(step / self.width).max(initial=0.0) < _CLOSE:
                break
        return values

    def fitted(self, values: NDArray[np.float64]) -> tuple[Fitted, ...]:
        """Return the figures that differ from the base, with standard deviations from the normal matrix at `values`."""
        if not self.cases:
            return ()
        slopes = self.slopes(values, self.errors(values))
        normal = slopes.T @ (slopes / self.sigma[:, None] ** 2) + np.diag(self.width**-2.0)
        deviations = np.sqrt(np.diag(np.linalg.inv(normal)))
        now = self.calibration(values)
        return tuple(
            Fitted(free.figure, getattr(now, free.figure), getattr(self.base, free.figure), _rounded(float(error)))
            for free, error in zip(self.free, deviations, strict=True)
            if getattr(now, free.figure) != getattr(self.base, free.figure)
        )


def _middle(errors: NDArray[np.float64]) -> float:
    """Return the median absolute error, 0 without errors."""
    return float(np.median(np.abs(errors))) if len(errors) else 0.0


def _rounded(value: float) -> float:
    """Round to six significant digits, since further digits of a fit depend on the machine's arithmetic."""
    return float(f"{value:.6g}")


_fits: dict[tuple[object, ...], Fit] = {}
"""Fits of this process, by everything that determines them."""


def learned_fit(topology: Topology, flags: Sequence[str] = ()) -> Fit:
    """Return the figures of a topology, fitted to the user's database for it and for this compiler.

    The observations are of steps compiled with these `flags` if there are any, else of steps without flags. Without
    observations the figures are those of `load_calibration`, and no database is created. Raises: UserError as
    `fit_observations` does.
    """
    database = Database.of_user()
    if database is None:
        return fit_observations(topology, [])
    if flags:
        observations = database.read(topology.name, compiler_version(topology, flags))
        if observations:
            return fit_observations(topology, observations, flags)
    return fit_observations(topology, database.read(topology.name, compiler_version(topology)))


def fit_observations(topology: Topology, observations: Sequence[Observation], flags: Sequence[str] = ()) -> Fit:
    """Fit the figures of a topology to these observations, all of one compiler version and of steps with these `flags`.

    Figures in the user's own calibration file are not fitted. Raises: UserError as `load_calibration` and `with_flags`
    do.
    """
    base = with_flags(load_calibration(topology.chip), flags).calibration
    fixed = own_figures(topology.chip)
    key = (base, topology.backend, fixed, content_hash(observations), tuple(flags))
    if key not in _fits:
        _fits[key] = dataclasses.replace(fit(base, topology.backend, observations, fixed), flags=tuple(flags))
    return _fits[key]


def fit_record(found: Fit) -> dict[str, Any]:
    """Return the fitted figures as a plan records them: `hash`, number of `observations`, and `figures` by name.

    The plan can then be priced again without the database.
    """
    return {
        "hash": found.hash,
        "observations": found.observations,
        "figures": {each.figure: each.value for each in found.figures},
    }


def recorded_calibration(
    chip: str, learned: Mapping[str, Any] | None, flags: Mapping[str, Any] | None = None
) -> Calibration:
    """Return the calibration of a plan that records learned figures and changes by compiler flags.

    - `learned`: the record of `fit_record`, or None.
    - `flags`: the record of `Flagged.record`, or None. Its figures replace learned ones.
    """
    base = load_calibration(chip)
    for record in (learned, flags):
        base = dataclasses.replace(base, **record["figures"]) if record else base
    return base
