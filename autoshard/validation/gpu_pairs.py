"""Comparison of measured runs on GPUs with our predictions: choice of plan, verdicts on memory, errors."""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.degrees.gpu_run import GpuRun, waiting
from autoshard.degrees.gpu_step import GpuStep, price_step
from autoshard.degrees.node_waits import steadiest
from autoshard.errors import UserError
from autoshard.planning import EAGER_SHARE
from autoshard.validation.gpu_rows import GpuRow, read_gpu_rows


SHIPPED = {
    "ultrascale": pathlib.Path(__file__).with_name("ultrascale.json"),
    "vtrain": pathlib.Path(__file__).with_name("vtrain.json"),
}
"""Tables of runs that are shipped with the package."""
NEAR = 0.1
"""Relative distance from the memory limit within which a verdict is not counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class PricedGpuRow:
    """A measured run and its prediction."""

    row: GpuRow
    step: GpuStep | None
    """Predicted step; None if the run cannot be rebuilt."""

    @property
    def limit(self) -> float:
        """Bytes that a program's tensors may occupy on a GPU according to our model; the run must be rebuilt."""
        assert self.row.run is not None
        return self.row.run.topology.usable_bytes * EAGER_SHARE

    @property
    def fits(self) -> bool:
        """True if the predicted peak is within `limit`; False for a run that was not rebuilt or cannot run."""
        return self.step is not None and self.step.runs and self.step.peak_bytes <= self.limit

    @property
    def near(self) -> bool:
        """True if the predicted peak is so near the limit that the verdict is not counted."""
        return self.step is not None and self.step.runs and abs(self.step.peak_bytes / self.limit - 1.0) < NEAR

    @property
    def ran(self) -> bool:
        """True if there are a measured and a predicted time."""
        return self.step is not None and self.step.runs and self.row.measured_s is not None

    @property
    def error(self) -> float:
        """Signed error of the predicted step time, as a share of the measured one; defined only if `ran`."""
        assert self.step is not None and self.row.measured_s is not None
        return self.step.seconds / self.row.measured_s - 1.0

    @property
    def model_parallel(self) -> int:
        """Number of GPUs that share one copy of the model."""
        assert self.row.run is not None
        return self.row.run.tp * self.row.run.pp


@dataclasses.dataclass(frozen=True, slots=True)
class GpuProblem:
    """One model on a number of GPUs, under several plans of the same batch."""

    name: str
    """Model and number of GPUs."""
    rows: tuple[PricedGpuRow, ...]

    @property
    def measured(self) -> list[PricedGpuRow]:
        """Rows that have a measured time and could be rebuilt."""
        return [each for each in self.rows if each.row.measured_s is not None and each.step is not None]

    @property
    def chosen(self) -> PricedGpuRow | None:
        """The plan that we would choose among the plans that we predict to fit (`steadiest`); None if no plan fits.

        The choice does not use the measurements.
        """
        fitting = [each for each in self.rows if each.fits]
        return steadiest(fitting, _seconds, _run) if fitting else None

    @property
    def fastest(self) -> PricedGpuRow | None:
        """The plan with the least predicted time among the plans that we predict to fit; None if no plan fits."""
        fitting = [each for each in self.rows if each.fits]
        return min(fitting, key=_seconds, default=None)

    def least_parallel(self, worst: bool = False) -> PricedGpuRow:
        """Return the measured plan with the least model parallelism; there must be a measured plan.

        Ties go to the fastest such plan, or with `worst` to the slowest.
        """
        least = min(each.model_parallel for each in self.measured)
        same = [each for each in self.measured if each.model_parallel == least]
        return (max if worst else min)(same, key=_took)

    def regret(self, choice: PricedGpuRow | None) -> float | None:
        """Return the measured time of a choice over the time of the best plan.

        The regret is infinite if the source states that the choice failed. The result is None for a choice of None, and
        if fewer than two plans are measured. It is None too if the choice has no time and the source states no failure.
        """
        if len(self.measured) < 2 or choice is None:
            return None
        if choice.row.measured_s is None:
            return math.inf if choice.row.fits is False else None
        return choice.row.measured_s / min(map(_took, self.measured))


def _seconds(each: PricedGpuRow) -> float:
    """Return the predicted seconds of a step."""
    assert each.step is not None
    return each.step.seconds


def _run(each: PricedGpuRow) -> GpuRun:
    """Return the run of a row that was rebuilt."""
    assert each.row.run is not None
    return each.row.run


def _took(each: PricedGpuRow) -> float:
    """Return the measured seconds of a step."""
    assert each.row.measured_s is not None
    return each.row.measured_s


@dataclasses.dataclass(frozen=True, slots=True)
class GpuErrors:
    """Errors of the predictions of one table, as shares of the measured values; None without measured values."""

    table: str
    """Name of the table, or `all`."""
    rows: int
    """Number of rows of the table."""
    priced: int
    """Number of rows that were rebuilt."""
    mean: float | None
    """Mean error of step times, without sign."""
    median: float | None
    """Median error of step times, without sign."""
    p90: float | None
    """90th percentile of the errors of step times, without sign."""
    memory_median: float | None
    """Median error of peak memory, without sign."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuPairs:
    """All problems of a file, rebuilt and priced."""

    problems: tuple[GpuProblem, ...]

    @property
    def rows(self) -> list[PricedGpuRow]:
        """Rows of all problems."""
        return [each for problem in self.problems for each in problem.rows]

    def errors(self) -> list[GpuErrors]:
        """Return the errors of each table in the order of the file, then of all together if there are several."""
        tables = list(dict.fromkeys(each.row.table for each in self.rows))
        by_table = [_errors(table, [each for each in self.rows if each.row.table == table]) for table in tables]
        return [*by_table, _errors("all", self.rows)] if len(by_table) > 1 else by_table

    def regrets(self, choose: Callable[[GpuProblem], PricedGpuRow | None]) -> list[tuple[GpuProblem, float]]:
        """Return the problems that have a regret under the rule `choose`, with their regrets."""
        regrets = [(problem, problem.regret(choose(problem))) for problem in self.problems]
        return [(problem, regret) for problem, regret in regrets if regret is not None]

    def verdicts(self) -> tuple[int, int, int, int]:
        """Return the numbers of counted verdicts, of right ones, of rows with a known outcome, and of false "fits".

        Only rebuilt rows count. Verdicts near the limit are not counted as such, but their false "fits" are.
        """
        stated = [each for each in self.rows if each.step is not None and each.row.fits is not None]
        counted = [each for each in stated if not each.near]
        right = sum(each.fits == each.row.fits for each in counted)
        return len(counted), right, len(stated), sum(each.fits and not each.row.fits for each in stated)

    def not_for_memory(self) -> int:
        """Return the number of false "fits" that cannot have failed for memory.

        Another run that needs as much memory or more did run, according to the measurements alone. The other run has
        the same model, degrees of model parallelism and recomputation. Its microbatches are no smaller, and no fewer
        are in flight. Its state is split no further, and it has no more replicas.
        """
        ran = [each.row.run for each in self.rows if each.row.fits and each.row.run is not None]
        false = [each.row.run for each in self.rows if each.row.run and each.fits and each.row.fits is False]
        return sum(any(_holds_as_much(other, run) for other in ran) for run in false)


def _holds_as_much(other: GpuRun, run: GpuRun) -> bool:
    """Return True if a GPU of the run `other` certainly needs at least as much memory as a GPU of `run`.

    False if the two differ in model, framework, chip, sequence length, model parallelism, recomputation or chunks.
    """
    same = all(
        getattr(other, name) == getattr(run, name)
        for name in ("decoder", "framework", "seq", "tp", "pp", "recompute", "chunks")
    )
    return (
        same
        and other.topology.chip.name == run.topology.chip.name
        and other.micro_batch >= run.micro_batch
        and other.zero <= run.zero
        and other.dp <= run.dp
        and (other.dp > 1 or run.dp == 1)  # a single replica stores no copies of gradients for their sums
        and waiting(other, 0) >= waiting(run, 0)
    )


def _errors(table: str, rows: Sequence[PricedGpuRow]) -> GpuErrors:
    """Compute the errors of a table's rows; rows without a measured or predicted value are left out."""
    errors = [abs(each.error) for each in rows if each.ran]
    memory = [
        abs(each.step.peak_bytes / each.row.measured_bytes - 1.0)
        for each in rows
        if each.step is not None and each.step.runs and each.row.measured_bytes
    ]
    return GpuErrors(
        table,
        len(rows),
        sum(each.step is not None for each in rows),
        statistics.fmean(errors) if errors else None,
        statistics.median(errors) if errors else None,
        float(np.quantile(errors, 0.9)) if errors else None,
        statistics.median(memory) if memory else None,
    )


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean of some regrets, all above 0: infinite if one of them is, None if there are none."""
    return math.exp(statistics.fmean(math.log(each) for each in values)) if values else None


def validate_gpu_pairs(
    path: str | pathlib.Path, progress: Callable[[str], None] | None = None, only: Sequence[str] = ()
) -> GpuPairs:
    """Rebuild and price every row of a file, or of a shipped table (`ultrascale`, `vtrain`).

    Problems whose names contain none of the texts in `only` are left out; an empty `only` leaves out none. `progress`
    receives lines of text, for every 50th problem if there are 50 or more. Raises: `UserError` for a file that cannot
    be read, and if no problem is left.
    """
    say = progress or (lambda line: None)
    grouped: dict[str, list[GpuRow]] = {}
    for row in read_gpu_rows(SHIPPED.get(str(path), path)):
        if not only or any(text in row.problem for text in only):
            grouped.setdefault(row.problem, []).append(row)
    if not grouped:
        raise UserError(f"no problem of {path} is called {' or '.join(only)}.")
    problems = []
    for number, (name, rows) in enumerate(grouped.items()):
        if len(grouped) < 50 or number % 50 == 0:
            say(f"{number + 1}/{len(grouped)} {name}")
        problems.append(GpuProblem(name, tuple(_priced(row) for row in rows)))
    return GpuPairs(tuple(problems))


def _priced(row: GpuRow) -> PricedGpuRow:
    """Price the step of a row's run; a row without a run has no step."""
    return PricedGpuRow(row, None if row.run is None else price_step(row.run))
