"""Comparison of the predicted and the measured order of plans of one model.

Each measured plan is rebuilt and priced.
"""

import dataclasses
import itertools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.degrees.gpu_run import GpuRun
from autoshard.degrees.gpu_step import price_step
from autoshard.errors import UserError
from autoshard.planning import EAGER_SHARE
from autoshard.planning.price.evaluate import evaluate
from autoshard.validation.pair_rows import MeasuredGroup, MeasuredPlan, read_groups
from autoshard.validation.published_runs import IncompleteError, Run
from autoshard.validation.rebuilt_runs import rebuild, source_group, unseen_seconds
from autoshard.validation.serving_rows import ServingRun, rebuild_serving


NOISE = 0.02
"""Largest relative difference of two measured times for each token that counts as a tie.

In one study the times of one plan differ by at most this share between two sharding modes.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class PairRow:
    """One measured plan with our prediction."""

    plan: str
    """The row's options as text."""
    choice: str = ""
    """The plan without the way it was written or measured; rows with equal `choice` measure one plan several times."""
    measured_s: float | None = None
    """Measured seconds of a step; None if the row has no time."""
    predicted_s: float | None = None
    """Predicted seconds of a step; None if the row is skipped."""
    unseen_s: float | None = None
    """Predicted seconds of a step with figures that were fitted without the row's source."""
    tokens: int | None = None
    """Tokens of a step, for comparing plans with different batches."""
    measured_bytes: int | None = None
    """Measured peak memory of one device, or the memory that a failed plan needed; None if it is not stated."""
    predicted_bytes: int | None = None
    """Predicted peak memory of one device; None if the row is skipped."""
    fits: bool | None = None
    """True if we predict that the plan fits a device's memory; None if the row is skipped."""
    measured_fits: bool | None = None
    """True if the plan ran; None if the source does not state it."""
    skipped: str = ""
    """Reason why there is no prediction; empty otherwise."""
    assumed: tuple[str, ...] = ()
    """Choices of the rebuilt run that its source leaves open."""
    note: str = ""
    """Labels of the row, which change no price."""

    @classmethod
    def measured(cls, row: MeasuredPlan) -> "PairRow":
        """Return a row with the measurements, without a prediction; `skipped` is the reason why the plan cannot be
        rebuilt.
        """
        return cls(
            row.plan, row.choice, row.step_s, measured_bytes=row.peak_bytes, measured_fits=row.fits,
            skipped=row.skipped, assumed=row.assumed, note=row.note,
        )  # fmt: skip

    @property
    def ran(self) -> bool:
        """True if there are a measured and a predicted time."""
        return self.measured_s is not None and self.predicted_s is not None

    def measured_each(self) -> float:
        """Return the measured seconds for each token; the row must have a time and be rebuilt."""
        assert self.measured_s is not None and self.tokens is not None
        return self.measured_s / self.tokens

    def predicted_each(self) -> float:
        """Return the predicted seconds for each token; the row must be rebuilt."""
        assert self.predicted_s is not None and self.tokens is not None
        return self.predicted_s / self.tokens


@dataclasses.dataclass(frozen=True, slots=True)
class PairGroup:
    """One model on one set of chips: its plans, and how well their predicted order agrees with the measured one."""

    group: str
    """Name of the group of rows."""
    source: str
    """Publication or repository of the measurements."""
    hardware: str
    """Chips as the source states them."""
    compares_plans: bool
    """True if the plan differs between rows, False if the workload does."""
    on_tpu: bool
    """True if the hardware's text names a TPU."""
    rows: tuple[PairRow, ...]

    @classmethod
    def of(cls, group: MeasuredGroup, rows: Iterable[PairRow]) -> "PairGroup":
        """Return a measured group with predictions in its rows."""
        return cls(group.group, group.source, group.hardware, group.compares_plans, group.on_tpu, tuple(rows))

    def pairs(self) -> list[tuple[PairRow, PairRow]]:
        """Return all pairs of rows that have measured and predicted times, in the order of the rows."""
        return list(itertools.combinations([row for row in self.rows if row.ran], 2))

    def decided(self) -> list[tuple[PairRow, PairRow]]:
        """Return the pairs of different plans whose measured times for each token differ by more than `NOISE`."""
        return [
            (a, b)
            for a, b in self.pairs()
            if a.choice != b.choice and abs(math.log(a.measured_each() / b.measured_each())) > math.log1p(NOISE)
        ]

    @property
    def tau(self) -> float | None:
        """Kendall's tau over the decided pairs: 1 if all are predicted in the measured order, -1 if none is.

        Equal predictions count 0. The property is None without decided pairs.
        """
        decided = self.decided()
        if not decided:
            return None
        measured = np.sign([a.measured_each() - b.measured_each() for a, b in decided])
        predicted = np.sign([a.predicted_each() - b.predicted_each() for a, b in decided])
        return float(np.mean(measured * predicted))

    @property
    def chosen(self) -> PairRow | None:
        """The plan that we would choose: the fastest for each token among the plans that we predict to fit.

        It is None if no rebuilt plan is predicted to fit.
        """
        priced = [row for row in self.rows if row.predicted_s is not None and row.fits]
        return min(priced, key=PairRow.predicted_each, default=None)

    @property
    def regret(self) -> float | None:
        """Measured time for each token of the plan that we would choose over that of the best plan.

        The regret is infinite if the chosen plan ran out of memory. It is None for groups that compare workloads, and
        for fewer than two rows with both times. It is None too without a choice, or if it has no time for another
        reason.
        """
        ran = [row for row in self.rows if row.ran]
        chosen = self.chosen
        if not self.compares_plans or len(ran) < 2 or chosen is None:
            return None
        if chosen.measured_s is None:
            return math.inf if chosen.measured_fits is False else None
        return chosen.measured_each() / min(row.measured_each() for row in ran)

    def ratio_errors(self) -> list[float]:
        """Return, for each of `pairs`, the unsigned error of our ratio of step times, as a share of the measured."""
        errors = []
        for a, b in self.pairs():
            assert a.predicted_s and b.predicted_s and a.measured_s and b.measured_s
            errors.append(abs((a.predicted_s / b.predicted_s) / (a.measured_s / b.measured_s) - 1.0))
        return errors


def validate_pairs(
    path: str | pathlib.Path | None = None,
    progress: Callable[[str], None] | None = None,
    only: Sequence[str] = (),
    assume: Mapping[str, Any] | None = None,
) -> tuple[PairGroup, ...]:
    """Rebuild and price every row of a file of groups (default: the shipped file).

    Rows that cannot be rebuilt are skipped, with the reason. Groups whose names contain none of the texts in `only` are
    left out; an empty `only` leaves out none. `progress` receives a line of text for each group. `assume` has options
    for rows that cannot be rebuilt without them.
    Raises: `UserError` for a file that cannot be read, and if no group is left.
    """
    say = progress or (lambda line: None)
    groups = read_groups(path, only, assume)
    priced = []
    for number, group in enumerate(groups):
        say(f"{number + 1}/{len(groups)} {group.group}")
        priced.append(_priced_group(group))
    return tuple(priced)


def _priced_group(group: MeasuredGroup) -> PairGroup:
    """Rebuild and price the rows of a group; equal runs are priced once."""
    prices: dict[Run | ServingRun | GpuRun, tuple[float, float, float]] = {}
    return PairGroup.of(group, [_priced_row(group, row, prices) for row in group.rows])


def _priced_row(
    group: MeasuredGroup, row: MeasuredPlan, prices: dict[Run | ServingRun | GpuRun, tuple[float, float, float]]
) -> PairRow:
    """Rebuild and price a row; one that cannot be rebuilt is returned with the reason in `skipped`.

    `prices` caches seconds, seconds with figures fitted without the group's source, and peak bytes of each run.
    """
    run, bare = row.run or row.serving or row.gpu, PairRow.measured(row)
    if run is None:
        return bare
    try:
        if isinstance(run, GpuRun):
            step = price_step(run)
            prices[run] = step.seconds, step.seconds, step.peak_bytes
        elif run not in prices:
            serves = isinstance(run, ServingRun)
            model, choices = rebuild_serving(run) if serves else rebuild(run)
            outcome, steps = evaluate(model, choices), run.steps if serves else 1
            unseen = unseen_seconds(model, choices, run, source_group(group.source))
            prices[run] = steps * outcome.step_time_s, steps * unseen, outcome.peak_bytes
    except (IncompleteError, UserError) as error:
        return dataclasses.replace(bare, skipped=str(error))
    seconds, unseen, peak = prices[run]
    if math.isinf(seconds):
        return dataclasses.replace(bare, skipped="a stage would have no layers")
    share = EAGER_SHARE if isinstance(run, GpuRun) else 1.0
    return dataclasses.replace(
        bare,
        predicted_s=seconds,
        unseen_s=unseen,
        tokens=run.batch * run.seq,
        predicted_bytes=round(peak),
        fits=peak <= share * run.topology.usable_bytes,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class PairSummary:
    """Figures over all rows of several groups; a figure without rows is None."""

    groups: int
    """Number of groups with at least one row that was rebuilt."""
    rows: int
    rebuilt: int
    """Number of rows with a prediction."""
    regret_mean: float | None
    """Geometric mean of the groups' regrets; infinite if one is."""
    regret_worst: float | None
    """Largest regret of a group."""
    tau: float | None
    """Kendall's tau over the decided pairs of all groups."""
    decided: int
    """Number of pairs with a decided order."""
    ratio_median: float | None
    """Median error of the ratios of two rows of one group, as a share."""
    ratio_p90: float | None
    """Errors of the same kind at the 90th percentile."""
    step_median: float | None
    """Median error of step times with figures that were fitted without the row's source, as a share."""
    step_p90: float | None
    """Errors of the same kind at the 90th percentile."""
    memory_median: float | None
    """Median error of peak memory, as a share."""
    verdicts: int
    """Number of rows that state if the plan ran and were rebuilt."""
    verdicts_right: int
    """Number of those whose predicted fit agrees with the measured one."""


def summarise_pairs(groups: Sequence[PairGroup]) -> PairSummary:
    """Return the figures over all rows of some groups."""
    regrets = [group.regret for group in groups if group.regret is not None]
    decided = [(group.tau, len(group.decided())) for group in groups]
    count = sum(number for _, number in decided)
    ratios = [error for group in groups for error in group.ratio_errors()]
    rows = [row for group in groups for row in group.rows]
    steps = [abs(row.unseen_s / row.measured_s - 1.0) for row in rows if row.unseen_s is not None and row.measured_s]
    peaks = [
        abs(row.predicted_bytes / row.measured_bytes - 1.0)
        for row in rows
        if row.predicted_bytes and row.measured_bytes
    ]
    stated = [row for row in rows if row.fits is not None and row.measured_fits is not None]
    return PairSummary(
        groups=sum(any(row.predicted_s is not None for row in group.rows) for group in groups),
        rows=len(rows),
        rebuilt=sum(row.predicted_s is not None for row in rows),
        regret_mean=math.exp(statistics.fmean(math.log(each) for each in regrets)) if regrets else None,
        regret_worst=max(regrets, default=None),
        tau=sum((tau or 0.0) * number for tau, number in decided) / count if count else None,
        decided=count,
        ratio_median=_quantile(ratios, 0.5),
        ratio_p90=_quantile(ratios, 0.9),
        step_median=_quantile(steps, 0.5),
        step_p90=_quantile(steps, 0.9),
        memory_median=_quantile(peaks, 0.5),
        verdicts=len(stated),
        verdicts_right=sum(row.fits == row.measured_fits for row in stated),
    )


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which the share `share` (0 to 1) of the values lies, interpolated; None without values."""
    return float(np.quantile(values, share)) if values else None
