"""Figures fitted to observations of one topology by robust least squares, and the figures that plans use."""

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
    """The constants that make errors small, to first order around the prior.

    `errors` are those at `prior` and `slopes` how each changes with each constant; `sigma` is the expected error of
    each observation and `width` that of each prior. Errors beyond `huber` count linearly (Huber's loss, by weights
    that are found anew in each round). Constants are kept within `limits`.
    """
    values = prior.copy()
    for _ in range(rounds):
        now = errors + slopes @ (values - prior)
        weight = np.minimum(1.0, huber / np.maximum(np.abs(now), 1e-9)) / sigma**2
        normal = slopes.T @ (weight[:, None] * slopes) + np.diag(width**-2.0)
        values = prior + np.linalg.solve(normal, -slopes.T @ (weight * errors))
        values = np.clip(values, *limits)
    return values


@dataclasses.dataclass(frozen=True, slots=True)
class Free:
    """A figure that may be fitted; those on a log scale have a width in powers of e."""

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
"""What times on real devices tell, by backend."""
COMPILED = _OVERLAPS
"""What a schedule tells: what runs beside what. Its times are our own prices, which tell nothing of themselves."""

STEP_SIGMA, OP_SIGMA, SHARE_SIGMA = 0.1, 0.3, 0.1
"""Expected errors: of a step's log time, of one op shape's, and of the share of communication that is hidden."""
HUBER = 0.15
"""Where an error starts to count linearly."""
LEAST_SLOPE = 0.2
"""A figure moves only if its prior's width is worth that share of the expected error of some observation."""
FARTHEST = math.log(20.0)
"""How far a figure on a log scale may move from the shipped one."""
_STEPS, _NEAR, _CLOSE = 10, 0.1, 0.01
"""Of Gauss-Newton: most steps, the distance for slopes, and the last step's, in widths of the priors."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """One figure as it was fitted."""

    figure: str
    value: float
    shipped: float
    error: float
    """Standard deviation: on a log scale as a share of the value, of overlaps the difference itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """Figures of a topology, and how sure they are."""

    calibration: Calibration
    """The figures of the topology's chip, with what was fitted in the place of what was shipped."""
    figures: tuple[Fitted, ...]
    """The figures that the fit changed, by name."""
    observations: int
    hash: str
    """A hash of the observations that does not depend on their order."""
    residual_before: float
    """Median absolute error of what was seen with the shipped figures: in log time, or in the hidden share."""
    residual: float
    """Median absolute error of what was seen with the fitted figures."""
    flags: tuple[str, ...] = ()
    """The compiler flags with which all was seen, and which the figures therefore contain."""


def fit(base: Calibration, backend: str, observations: Sequence[Observation], fixed: Collection[str] = ()) -> Fit:
    """`base` with the figures that the observations, all of one topology and compiler, can tell; never those `fixed`.

    The same observations give the same figures, in whatever order they are. Without any, `base` stays as it is.
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
    """What was seen of one thing, however often."""

    observation: Observation
    seen: float
    sigma: float
    free: tuple[Free, ...]
    traffic: str = ""
    """The class of communication whose hidden share a schedule showed; empty for all of it."""

    def error(self, calibration: Calibration) -> float:
        parts = self.observation.bill.parts(calibration)
        if self.observation.judge == "measure":
            return math.log(max(parts.step_s, 1e-12) / self.seen)
        if self.traffic:
            sent, waited = parts.traffic[self.traffic]
            return 1.0 - waited / sent - self.seen
        return hidden_share(parts) - self.seen


def hidden_share(parts: Parts) -> float:
    """Share of a step's communication that compute does not wait for."""
    sent = parts.sent_s
    return 1.0 - sum(parts.waits.values()) / sent if sent > 0 else 0.0


def _cases(base: Calibration, observations: Iterable[Observation], backend: str) -> list[_Sight]:
    """One case for everything that was seen, several sights of it as their median."""
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
    """What schedules of one plan hide: by class of communication, or as a whole where no more was kept."""
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
        # A figure of nothing (a launch of 0 s, a rate that is not used) has no logarithm, and no use.
        self.free = [f for _, f in sorted(known.items()) if not f.log or getattr(base, f.figure) > 0]
        self.prior = np.array([self.scaled(f) for f in self.free])
        self.width = np.array([f.width for f in self.free])
        self.sigma = np.array([case.sigma for case in cases])
        low = [p - FARTHEST if f.log else 0.0 for f, p in zip(self.free, self.prior, strict=True)]
        high = [p + FARTHEST if f.log else 1.0 for f, p in zip(self.free, self.prior, strict=True)]
        self.limits = np.array(low), np.array(high)

    def scaled(self, free: Free) -> float:
        value = getattr(self.base, free.figure)
        return math.log(value) if free.log else value

    def calibration(self, values: NDArray[np.float64]) -> Calibration:
        moved = {
            free.figure: _rounded(math.exp(value) if free.log else float(value))
            for free, value, prior in zip(self.free, values, self.prior, strict=True)
            if value != prior
        }
        sources = {figure: "fitted to what was seen on this topology" for figure in moved}
        return dataclasses.replace(self.base, **moved, sources={**self.base.sources, **sources})

    def errors(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        now = self.calibration(values)
        return np.array([case.error(now) for case in self.cases])

    def slopes(self, values: NDArray[np.float64], errors: NDArray[np.float64]) -> NDArray[np.float64]:
        """How each error, `errors` at `values`, changes with each figure that its case may tell of; 0 for a figure of
        which nothing is told."""
        slopes = np.zeros((len(self.cases), len(self.free)))
        for k, free in enumerate(self.free):
            mine = [i for i, case in enumerate(self.cases) if free in case.free]
            moved = values.copy()
            moved[k] += _NEAR * free.width * (1 if values[k] + _NEAR * free.width <= self.limits[1][k] else -1)
            now = self.calibration(moved)
            slopes[mine, k] = [(self.cases[i].error(now) - errors[i]) / (moved[k] - values[k]) for i in mine]
        told = np.abs(slopes * self.width / self.sigma[:, None]).max(axis=0, initial=0.0) >= LEAST_SLOPE
        return np.where(told, slopes, 0.0)

    def solve(self) -> NDArray[np.float64]:
        """Gauss-Newton: errors are taken as straight lines around the last values, again and again."""
        values = self.prior.copy()
        if not self.cases:
            return values
        for _ in range(_STEPS):
            errors = self.errors(values)
            slopes = self.slopes(values, errors)
            at_prior = errors + slopes @ (self.prior - values)
            aim = robust_fit(at_prior, slopes, self.sigma, self.prior, self.width, self.limits, HUBER)
            step = np.clip(aim - values, -self.width, self.width)
            values = values + step
            if np.abs(step / self.width).max(initial=0.0) < _CLOSE:
                break
        return values

    def fitted(self, values: NDArray[np.float64]) -> tuple[Fitted, ...]:
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
    return float(np.median(np.abs(errors))) if len(errors) else 0.0


def _rounded(value: float) -> float:
    """Six digits: what a fit gives beyond them differs with the machine's arithmetic."""
    return float(f"{value:.6g}")


_fits: dict[tuple[object, ...], Fit] = {}


def learned_fit(topology: Topology, flags: Sequence[str] = ()) -> Fit:
    """The figures of a topology with what the user's database has seen of it and of this compiler.

    Of steps that were compiled with these `flags`, if there are such, and else of those without any. Without
    observations they are those of `load_calibration`, and nothing is created. Raises what that raises.
    """
    database = Database.of_user()
    if database is None:
        return fit_observations(topology, [])
    if flags:
        found = database.read(topology.name, compiler_version(topology, flags))
        if found:
            return fit_observations(topology, found, flags)
    return fit_observations(topology, database.read(topology.name, compiler_version(topology)))


def fit_observations(topology: Topology, observations: Sequence[Observation], flags: Sequence[str] = ()) -> Fit:
    """The same with these observations, all of the topology, of one compiler version and of steps with these `flags`.

    What the user's own calibration file says is not fitted. Raises what `load_calibration` and `with_flags` raise.
    """
    base = with_flags(load_calibration(topology.chip), flags).calibration
    fixed = own_figures(topology.chip)
    key = (base, topology.backend, fixed, content_hash(observations), tuple(flags))
    if key not in _fits:
        _fits[key] = dataclasses.replace(fit(base, topology.backend, observations, fixed), flags=tuple(flags))
    return _fits[key]


def said_of_fit(found: Fit) -> dict[str, Any]:
    """What a plan keeps of the figures that it was priced with, so that it can be priced again without the database."""
    return {
        "hash": found.hash,
        "observations": found.observations,
        "figures": {each.figure: each.value for each in found.figures},
    }


def said_calibration(
    chip: str, learned: Mapping[str, Any] | None, flags: Mapping[str, Any] | None = None
) -> Calibration:
    """The calibration of a plan that keeps what was learned, and what compiler flags changed; None where nothing is."""
    base = load_calibration(chip)
    for said in (learned, flags):
        base = dataclasses.replace(base, **said["figures"]) if said else base
    return base
