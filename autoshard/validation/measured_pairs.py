"""Measured plans of one model rebuilt and priced: whether plans are ordered as hardware orders them."""

import dataclasses
import itertools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from autoshard.errors import UserError
from autoshard.planning.price.evaluate import evaluate
from autoshard.validation.pair_rows import MeasuredGroup, MeasuredPlan, read_groups
from autoshard.validation.published_runs import IncompleteError, Run
from autoshard.validation.rebuilt_runs import rebuild, source_group, unseen_seconds
from autoshard.validation.serving_rows import ServingRun, rebuild_serving


NOISE = 0.02
"""Two measured plans are decided if their times for each token differ by more than this share: what one plan differs
by between the two sharding modes of one study, at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class PairRow:
    """One measured plan beside our prediction. `skipped` says why there is none."""

    plan: str
    choice: str = ""
    """The plan without how it was said or measured; rows that share one are one plan, measured again."""
    measured_s: float | None = None
    """Measured seconds of a step; None where the row has no time."""
    predicted_s: float | None = None
    """Our seconds of a step; None where the row is skipped."""
    unseen_s: float | None = None
    """Our seconds of a step with figures that were fitted without the row's source."""
    tokens: int | None = None
    """Tokens of a step, by which plans of different batches compare."""
    measured_bytes: int | None = None
    """Measured peak memory of one device, or what a device would have needed; None where it is not stated."""
    predicted_bytes: int | None = None
    fits: bool | None = None
    """Whether we say that the plan fits a device's memory."""
    measured_fits: bool | None = None
    """Whether it ran; None where nobody says."""
    skipped: str = ""
    assumed: tuple[str, ...] = ()

    @classmethod
    def measured(cls, row: MeasuredPlan) -> "PairRow":
        """A row with what was measured alone, and why it cannot be rebuilt if it cannot."""
        return cls(
            row.plan, row.choice, row.step_s, measured_bytes=row.peak_bytes, measured_fits=row.fits, skipped=row.skipped
        )

    @property
    def ran(self) -> bool:
        """Whether there are a measured and a predicted time."""
        return self.measured_s is not None and self.predicted_s is not None

    def measured_each(self) -> float:
        """Measured seconds for each token."""
        assert self.measured_s is not None and self.tokens is not None
        return self.measured_s / self.tokens

    def predicted_each(self) -> float:
        """Our seconds for each token."""
        assert self.predicted_s is not None and self.tokens is not None
        return self.predicted_s / self.tokens


@dataclasses.dataclass(frozen=True, slots=True)
class PairGroup:
    """One model on one set of chips: its rows, and how well our order is the measured one."""

    group: str
    source: str
    hardware: str
    compares_plans: bool
    on_tpu: bool
    rows: tuple[PairRow, ...]

    @classmethod
    def of(cls, group: MeasuredGroup, rows: Iterable[PairRow]) -> "PairGroup":
        """A measured group whose rows stand beside our predictions."""
        return cls(group.group, group.source, group.hardware, group.compares_plans, group.on_tpu, tuple(rows))

    def pairs(self) -> list[tuple[PairRow, PairRow]]:
        """Pairs of rows with both times, in their order."""
        return list(itertools.combinations([row for row in self.rows if row.ran], 2))

    def decided(self) -> list[tuple[PairRow, PairRow]]:
        """Pairs of different plans whose measured times for each token differ by more than `NOISE`."""
        return [
            (a, b)
            for a, b in self.pairs()
            if a.choice != b.choice and abs(math.log(a.measured_each() / b.measured_each())) > math.log1p(NOISE)
        ]

    @property
    def tau(self) -> float | None:
        """Kendall's tau over the decided pairs: 1 if all come out in the measured order; None if there are none."""
        decided = self.decided()
        if not decided:
            return None
        measured = np.sign([a.measured_each() - b.measured_each() for a, b in decided])
        predicted = np.sign([a.predicted_each() - b.predicted_each() for a, b in decided])
        return float(np.mean(measured * predicted))

    @property
    def chosen(self) -> PairRow | None:
        """The plan that we would choose: the fastest for each token of those that we say fit. None without times."""
        priced = [row for row in self.rows if row.predicted_s is not None and row.fits]
        return min(priced, key=PairRow.predicted_each, default=None)

    @property
    def regret(self) -> float | None:
        """Measured time of the plan that we would choose over that of the best one, for each token.

        Infinite if the chosen plan ran out of memory; None for groups that compare workloads, and without two rows.
        """
        ran = [row for row in self.rows if row.ran]
        chosen = self.chosen
        if not self.compares_plans or len(ran) < 2 or chosen is None:
            return None
        if chosen.measured_s is None:
            return math.inf if chosen.measured_fits is False else None
        return chosen.measured_each() / min(row.measured_each() for row in ran)

    def ratio_errors(self) -> list[float]:
        """For each pair, how far our ratio of step times is from the measured one, as a share of it."""
        found = []
        for a, b in self.pairs():
            assert a.predicted_s and b.predicted_s and a.measured_s and b.measured_s
            found.append(abs((a.predicted_s / b.predicted_s) / (a.measured_s / b.measured_s) - 1.0))
        return found


def validate_pairs(
    path: str | pathlib.Path | None = None, progress: Callable[[str], None] | None = None, only: Sequence[str] = ()
) -> tuple[PairGroup, ...]:
    """Every group of a file (default: the shipped one), each row rebuilt and priced where that is possible.

    `only` keeps groups whose names contain one of its texts. Raises: `UserError` for a file that cannot be read, and
    where no group is left.
    """
    say = progress or (lambda line: None)
    groups = read_groups(path, only)
    found = []
    for number, group in enumerate(groups):
        say(f"{number + 1}/{len(groups)} {group.group}")
        found.append(_priced_group(group))
    return tuple(found)


def _priced_group(group: MeasuredGroup) -> PairGroup:
    prices: dict[Run | ServingRun, tuple[float, float, int]] = {}
    return PairGroup.of(group, [_priced_row(group, row, prices) for row in group.rows])


def _priced_row(
    group: MeasuredGroup, row: MeasuredPlan, prices: dict[Run | ServingRun, tuple[float, float, int]]
) -> PairRow:
    run, bare = row.run or row.serving, PairRow.measured(row)
    if run is None:
        return bare
    try:
        if run not in prices:
            serves = isinstance(run, ServingRun)
            model, choices = rebuild_serving(run) if serves else rebuild(run)
            outcome, steps = evaluate(model, choices), run.steps if serves else 1
            unseen = unseen_seconds(model, choices, run, source_group(group.source))
            prices[run] = steps * outcome.step_time_s, steps * unseen, outcome.peak_bytes
    except (IncompleteError, UserError) as error:
        return dataclasses.replace(bare, skipped=str(error))
    step, unseen, peak = prices[run]
    return dataclasses.replace(
        bare,
        predicted_s=step,
        unseen_s=unseen,
        tokens=run.batch * run.seq,
        predicted_bytes=peak,
        fits=peak <= run.topology.usable_bytes,
        assumed=run.assumed,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class PairSummary:
    """What groups say together. A figure is None where no row tells it."""

    groups: int
    """Groups with at least one row that was rebuilt."""
    rows: int
    rebuilt: int
    regret_mean: float | None
    """Geometric mean of the regrets."""
    regret_worst: float | None
    tau: float | None
    """Over all decided pairs of all groups."""
    decided: int
    ratio_median: float | None
    """Error of ratios of two rows of one group, as a share."""
    ratio_p90: float | None
    step_median: float | None
    """Error of step times, with figures fitted without the row's source, as a share."""
    step_p90: float | None
    memory_median: float | None
    """Error of peak memory, as a share."""
    verdicts: int
    """Rows that say whether they ran."""
    verdicts_right: int


def summarise_pairs(groups: Sequence[PairGroup]) -> PairSummary:
    """The figures over all rows of some groups."""
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
    said = [row for row in rows if row.fits is not None and row.measured_fits is not None]
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
        verdicts=len(said),
        verdicts_right=sum(row.fits == row.measured_fits for row in said),
    )


def _quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which a share of the values lie, interpolated; None if there are none."""
    return float(np.quantile(values, share)) if values else None
