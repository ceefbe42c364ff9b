"""Fit of the few constants that published step times determine; `experiments/fidelity/validate_sources.py` runs it.

The constants are one matmul efficiency for each TPU generation, and five figures that all generations share. Every
constant has a prior from elsewhere and a width, so that a generation with few runs stays near it. Errors beyond `HUBER`
count linearly, so that no single run dominates. Nothing is fitted to one model or one row.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost import Bill, Calibration, Compute, load_calibration, robust_fit, with_flags
from autoshard.planning.price.step_ledger import itemise
from autoshard.validation.published_runs import IncompleteError, MatmulRun, Run, parse_run, read_rows
from autoshard.validation.rebuilt_runs import LEFT_OUT, rebuild, source_group


DATE = "2026-11-29"
SIGMA, HUBER = 0.08, 0.10
"""Expected error of one run in log time, and the error above which errors count linearly."""


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """One constant to fit: a figure of the calibration, of one chip or (None) of all TPU generations."""

    figure: str
    chip: str | None
    prior: float
    width: float
    why: str

    @property
    def name(self) -> str:
        return f"{self.figure} ({self.chip or 'all TPUs'})"


_MXU = "mean of 0.937, 0.922, 0.939, which libtpu 0.0.51 estimates for a 16384^3 bf16 matmul on v4, v5e, v5p"
_NETWORK = (
    "54 to 58 % hidden in the schedules of a decoder with FSDP on two slices of v5e and of v6e by libtpu 0.0.51 "
    "(experiments/fidelity/overlap.py)"
)
_SPREAD = (
    "90th percentile of the logged steps of a U-Net on 8 chips of v5p, 2.6 % above their median "
    "(mlcommons/training_results_v4.1: cloud-tpu-v5p-16-maxdiffusion)"
)
CONSTANTS = (
    *(Constant("matmul_efficiency", chip, 0.93, 0.04, _MXU) for chip in ("v4", "v5e", "v5p", "v6e", "tpu7x")),
    Constant("pipelined_overlap", None, 0.0, 0.25, "synchronous ops in the schedules of libtpu 0.0.51"),
    Constant("network_overlap", None, 0.56, 0.1, _NETWORK),
    Constant("network_contention", None, 0.3, 0.3, "assumed"),
    Constant("slice_spread", None, 0.02, 0.02, _SPREAD),
    Constant("attention_ops", None, 5.0, 2.0, "mask, maximum, exponential, sum and casts over two matmuls, counted"),
)
TPUS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One published run, with the work that other constants price again."""

    id: str
    source: str
    chip: str
    theirs: float
    bill: Bill | None
    """Work of the run's step; None for a matmul."""
    matmul: MatmulRun | None
    work: float | None
    """Model FLOPs of a step on one chip."""
    complete: bool
    """False if rebuilding the run needed an assumption; its expected error is then twice as large."""
    flags: tuple[str, ...] = ()
    """Compiler flags of the run."""

    def seconds(self, calibration: Calibration) -> float:
        if self.matmul is not None:
            n = self.matmul.size
            return float(Compute(self.matmul.topology, calibration).dot_seconds(n, n, n))
        assert self.bill is not None
        return self.bill.seconds(with_flags(calibration, self.flags).calibration)


def load_cases(path: str | pathlib.Path | None = None) -> list[Case]:
    """Load every complete TPU run of a file (default: the shipped one)."""
    cases = []
    for row in read_rows(path):
        try:
            run = parse_run(row)
            if run.topology.backend != "tpu":
                continue
            bill = None if isinstance(run, MatmulRun) else _bill(run)
        except IncompleteError:
            continue
        print(row["id"], file=sys.stderr)
        matmul = run if isinstance(run, MatmulRun) else None
        work = None if isinstance(run, MatmulRun) else run.flops(causal=True) / run.topology.num_chips
        chip, source = run.topology.chip.name, source_group(row["source"])
        complete = "assume" not in row
        flags = () if isinstance(run, MatmulRun) else run.flags
        cases.append(Case(row["id"], source, chip, run.step_s, bill, matmul, work, complete, flags))
    return cases


def _bill(run: Run) -> Bill:
    """Return the work of a rebuilt run's step; raise `IncompleteError` as `rebuild` does."""
    model, choices = rebuild(run)
    return Bill.of(model.mesh, (charge for row in itemise(model, choices).rows for charge in row.charges))


def with_constants(chip: str, values: Sequence[float]) -> Calibration:
    """Return the shipped calibration of a chip with the fitted constants in place."""
    return dataclasses.replace(load_calibration(chip), **figures_of(chip, values))


def figures_of(chip: str, values: Sequence[float]) -> dict[str, Any]:
    """Return the constants that are figures of a chip, by figure."""
    mine = zip(CONSTANTS, values, strict=True)
    return {c.figure: v for c, v in mine if c.chip in (None, chip)}


def write_left_out(found: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Store for each source and chip the constants that were fitted without the source, to three digits."""
    sources = {
        source: {
            chip: {figure: round(value, 3) for figure, value in figures_of(chip, values).items()}
            for chip, values in chips.items()
        }
        for source, chips in found.items()
    }
    LEFT_OUT.write_text(json.dumps({"sources": sources}, indent=1) + "\n")


def shipped(constant: Constant) -> float:
    """Return a constant as it is shipped; a constant of all generations is read from the first, which has no
    exception.
    """
    return getattr(load_calibration(constant.chip or TPUS[0]), constant.figure)


def errors(cases: Sequence[Case], values: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Return log(ours / theirs) of every case, with the shipped calibration if no constants are given."""
    chips = {case.chip for case in cases}
    own = {chip: load_calibration(chip) if values is None else with_constants(chip, values) for chip in chips}
    return np.array([np.log(case.seconds(own[case.chip]) / case.theirs) for case in cases])


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Log errors at the priors, and their slopes in each constant."""

    errors: NDArray[np.float64]
    slopes: NDArray[np.float64]
    widths: NDArray[np.float64]
    """Expected error of every case, in log time."""


def priors() -> list[float]:
    return [c.prior for c in CONSTANTS]


def linear(cases: Sequence[Case]) -> Line:
    """Approximate the errors around the priors to first order.

    Every case is priced once for each constant that it depends on.
    """
    now = errors(cases, priors())
    slopes = np.zeros((len(cases), len(CONSTANTS)))
    for k, constant in enumerate(CONSTANTS):
        mine = [i for i, case in enumerate(cases) if constant.chip in (None, case.chip)]
        if mine:
            moved = priors()
            moved[k] += 0.3 * constant.width
            slopes[mine, k] = (errors([cases[i] for i in mine], moved) - now[mine]) / (0.3 * constant.width)
    return Line(now, slopes, np.array([SIGMA if case.complete else 2.0 * SIGMA for case in cases]))


def fit(line: Line, members: Sequence[int], rounds: int = 20) -> list[float]:
    """Fit the constants to some cases: least squares on Huber-weighted log errors, regularised by the priors."""
    prior, width = np.array(priors()), np.array([c.width for c in CONSTANTS])
    start, slopes, sigma = (part[list(members)] for part in (line.errors, line.slopes, line.widths))
    limits = 0.0, [20.0 if c.figure == "attention_ops" else 0.98 for c in CONSTANTS]
    return [float(v) for v in robust_fit(start, slopes, sigma, prior, width, limits, HUBER, rounds)]


def groups(cases: Sequence[Case], key: str) -> Mapping[str, list[int]]:
    members: dict[str, list[int]] = {}
    for number, case in enumerate(cases):
        members.setdefault(getattr(case, key), []).append(number)
    return members


def write(values: Sequence[float], figures: Collection[str]) -> None:
    """Store constants of these figures (all if none are named), to three digits, with their source."""
    file = pathlib.Path(__file__).parents[2] / "autoshard" / "cost" / "calibration.json"
    document = json.loads(file.read_text())
    for constant, value in zip(CONSTANTS, values, strict=True):
        if figures and constant.figure not in figures:
            continue
        source = (
            "fitted to published runs by experiments/fidelity/validate_sources.py; "
            f"prior {constant.prior:g}: {constant.why}"
        )
        for chip in (constant.chip,) if constant.chip else TPUS:
            document["chips"][chip][constant.figure] = {"value": round(value, 3), "source": source, "date": DATE}
    file.write_text(json.dumps(document, indent=1) + "\n")
