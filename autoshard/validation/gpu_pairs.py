"""Measured runs on GPUs beside what we predict for them: what we would choose, whether it fits, how far we are."""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.degrees.gpu_run import GpuRun, waiting
from autoshard.degrees.gpu_stage import host_figures
from autoshard.degrees.gpu_step import GpuStep, price_step
from autoshard.degrees.node_waits import steadiest
from autoshard.errors import UserError
from autoshard.validation.gpu_rows import GpuRow, read_gpu_rows


SHIPPED = {
    "ultrascale": pathlib.Path(__file__).with_name("ultrascale.json"),
    "vtrain": pathlib.Path(__file__).with_name("vtrain.json"),
}
"""Tables that come with the package."""
NEAR = 0.1
"""Within this share of the limit a verdict is not counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class PricedGpuRow:
    """A measured run and its prediction; `step` is None where it cannot be rebuilt."""

    row: GpuRow
    step: GpuStep | None

    @property
    def limit(self) -> float:
        """Bytes that a GPU's program may hold by our word."""
        assert self.row.run is not None
        return self.row.run.topology.usable_bytes * host_figures().usable_share

    @property
    def fits(self) -> bool:
        """Whether we say that it runs."""
        return self.step is not None and self.step.runs and self.step.peak_bytes <= self.limit

    @property
    def near(self) -> bool:
        """Whether the predicted peak is so near the limit that a verdict is not counted."""
        return self.step is not None and self.step.runs and abs(self.step.peak_bytes / self.limit - 1.0) < NEAR

    @property
    def ran(self) -> bool:
        """Whether there is a measured time to compare with."""
        return self.step is not None and self.step.runs and self.row.measured_s is not None

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less one."""
        assert self.step is not None and self.row.measured_s is not None
        return self.step.seconds / self.row.measured_s - 1.0

    @property
    def model_parallel(self) -> int:
        """GPUs that share one copy of the model."""
        assert self.row.run is not None
        return self.row.run.tp * self.row.run.pp


@dataclasses.dataclass(frozen=True, slots=True)
class GpuProblem:
    """One model on so many GPUs, under several plans of the same batch."""

    name: str
    rows: tuple[PricedGpuRow, ...]

    @property
    def measured(self) -> list[PricedGpuRow]:
        """Rows that ran."""
        return [each for each in self.rows if each.row.measured_s is not None and each.step is not None]

    @property
    def chosen(self) -> PricedGpuRow | None:
        """The plan that we would choose of those that we say fit, none told which ran: see `steadiest`."""
        fitting = [each for each in self.rows if each.fits]
        return steadiest(fitting, _seconds, _run) if fitting else None

    @property
    def fastest(self) -> PricedGpuRow | None:
        """That of the least predicted time alone."""
        fitting = [each for each in self.rows if each.fits]
        return min(fitting, key=_seconds, default=None)

    def least_parallel(self, worst: bool = False) -> PricedGpuRow:
        """Of the plans that ran, the one with the least model parallelism; of several its fastest, or slowest."""
        least = min(each.model_parallel for each in self.measured)
        same = [each for each in self.measured if each.model_parallel == least]
        return (max if worst else min)(same, key=_took)

    def regret(self, choice: PricedGpuRow | None) -> float | None:
        """Measured time of a choice over the best one's; infinite if it did not run, None without two that ran."""
        if len(self.measured) < 2 or choice is None:
            return None
        if choice.row.measured_s is None:
            return math.inf if choice.row.fits is False else None
        return choice.row.measured_s / min(map(_took, self.measured))


def _seconds(each: PricedGpuRow) -> float:
    assert each.step is not None
    return each.step.seconds


def _run(each: PricedGpuRow) -> GpuRun:
    assert each.row.run is not None
    return each.row.run


def _took(each: PricedGpuRow) -> float:
    assert each.row.measured_s is not None
    return each.row.measured_s


@dataclasses.dataclass(frozen=True, slots=True)
class GpuErrors:
    """How far predictions of one table are from what was measured; shares, None where no row tells."""

    table: str
    rows: int
    priced: int
    mean: float | None
    median: float | None
    p90: float | None
    memory_median: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class GpuPairs:
    """All of a file."""

    problems: tuple[GpuProblem, ...]

    @property
    def rows(self) -> list[PricedGpuRow]:
        """Rows of all problems."""
        return [each for problem in self.problems for each in problem.rows]

    def errors(self) -> list[GpuErrors]:
        """By table, in their order, and of all."""
        tables = list(dict.fromkeys(each.row.table for each in self.rows))
        found = [_errors(table, [each for each in self.rows if each.row.table == table]) for table in tables]
        return [*found, _errors("all", self.rows)] if len(found) > 1 else found

    def regrets(self, choose: Callable[[GpuProblem], PricedGpuRow | None]) -> list[tuple[GpuProblem, float]]:
        """Problems and their regrets, of those that have one."""
        found = [(problem, problem.regret(choose(problem))) for problem in self.problems]
        return [(problem, regret) for problem, regret in found if regret is not None]

    def verdicts(self) -> tuple[int, int, int, int]:
        """Verdicts that count, those that are right, rows that say whether they ran, and false "fits" of those."""
        said = [each for each in self.rows if each.step is not None and each.row.fits is not None]
        counted = [each for each in said if not each.near]
        right = sum(each.fits == each.row.fits for each in counted)
        return len(counted), right, len(said), sum(each.fits and not each.row.fits for each in said)

    def not_for_memory(self) -> int:
        """Of the false "fits", those that did not fail for memory: a run that holds as much or more did run.

        Told by what was measured alone. Such a run is one of the same model, degrees of model parallelism and
        recomputation, with no smaller microbatch, no more of its state split, over no more replicas, and no fewer
        microbatches under way.
        """
        ran = [each.row.run for each in self.rows if each.row.fits and each.row.run is not None]
        false = [each.row.run for each in self.rows if each.row.run and each.fits and each.row.fits is False]
        return sum(any(_holds_as_much(other, run) for other in ran) for run in false)


def _holds_as_much(other: GpuRun, run: GpuRun) -> bool:
    """Whether a GPU of the other run holds no less than one of this."""
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
        and (other.dp > 1 or run.dp == 1)  # a single replica keeps no copies for its sums
        and waiting(other, 0) >= waiting(run, 0)
    )


def _errors(table: str, rows: Sequence[PricedGpuRow]) -> GpuErrors:
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
    """Geometric mean of regrets; infinite if one is, None of none."""
    return math.exp(statistics.fmean(math.log(each) for each in values)) if values else None


def validate_gpu_pairs(
    path: str | pathlib.Path, progress: Callable[[str], None] | None = None, only: Sequence[str] = ()
) -> GpuPairs:
    """Every row of a file, or of a shipped table (`ultrascale`, `vtrain`), rebuilt and priced.

    `only` keeps problems whose names contain one of its texts. Raises: `UserError` for a file that cannot be read, and
    where no problem is left.
    """
    say = progress or (lambda line: None)
    grouped: dict[str, list[GpuRow]] = {}
    for row in read_gpu_rows(SHIPPED.get(str(path), path)):
        if not only or any(text in row.problem for text in only):
            grouped.setdefault(row.problem, []).append(row)
    if not grouped:
        raise UserError(f"no problem of {path} is called {' or '.join(only)}.")
    found = []
    for number, (name, rows) in enumerate(grouped.items()):
        if len(grouped) < 50 or number % 50 == 0:
            say(f"{number + 1}/{len(grouped)} {name}")
        found.append(GpuProblem(name, tuple(_priced(row) for row in rows)))
    return GpuPairs(tuple(found))


def _priced(row: GpuRow) -> PricedGpuRow:
    return PricedGpuRow(row, None if row.run is None else price_step(row.run))
