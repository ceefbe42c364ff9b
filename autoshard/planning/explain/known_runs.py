"""Expected error of a predicted step time, from measured runs that are like the planned one.

The file `known_runs.json` has one row for each measured run: its features, its source, and the natural logarithm of
measured over predicted seconds. Each prediction used figures that were fitted without the
run's source. `experiments/quality/known_runs.py --write` makes the file from the tables that it names.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from autoshard.cost import load_chip
from autoshard.planning.record.plan_parts import TimeError


FILE = pathlib.Path(__file__).with_name("known_runs.json")
SHARE = 0.8
"""Share of runs that an interval should contain."""
COMPILED = "xla"
"""Framework of steps that XLA compiles, as plans are."""

_FAR = 8.0
"""Factor between the tokens of two devices above which their runs are not alike."""
_FEWEST = 5
"""Fewest runs of which an interval is made."""
_OTHER = {"chip": 0.2, "kind": 0.5, "slices": 0.5}
"""Weight of a run that differs in one feature, relative to one that does not."""


@dataclasses.dataclass(frozen=True, slots=True)
class KnownRun:
    """Features of a run, and of a measured one its error."""

    chip: str
    kind: str
    """`dense` or `mixture` for training steps of decoders; `serving`."""
    tokens: float
    """Tokens of a step for each device."""
    slices: int
    framework: str
    """`xla`, or the name of an eager framework."""
    source: str = ""
    """Document of a measured run."""
    log_error: float = 0.0
    """Natural logarithm of measured over predicted seconds."""


@functools.cache
def known_runs() -> tuple[KnownRun, ...]:
    """Return the measured runs of the shipped file."""
    document = json.loads(FILE.read_text())
    return tuple(KnownRun(**dict(zip(document["columns"], row, strict=True))) for row in document["runs"])


@functools.cache
def ratio_error() -> float:
    """Return the share of the longer of two predicted steps of one model by which their difference may be wrong.

    The error is that of `SHARE` of the ratios of measured plans.
    """
    return -math.expm1(-json.loads(FILE.read_text())["ratio_log_error"])


def time_error(run: KnownRun, runs: Iterable[KnownRun] | None = None) -> TimeError | None:
    """Return the interval of the error of a predicted step from runs like it; None if too few are known.

    A run is alike if framework, backend and phase (training, serving) are the same. The tokens of a device may differ
    by a factor of `_FAR`. Runs that differ in chip, kind or in having several slices weigh less. Errors of one source
    are alike, so a source weighs as much as a single run.

    - `runs`: measured runs, by default the shipped ones.
    """
    like = [each for each in (known_runs() if runs is None else runs) if _alike(run, each)]
    if len(like) < _FEWEST:
        return None
    of_source = Counter(each.source for each in like)
    weights = np.array([_weight(run, each) / of_source[each.source] for each in like])
    errors = np.array([each.log_error for each in like])
    low, high = (float(math.expm1(_quantile(errors, weights, q))) for q in ((1 - SHARE) / 2, (1 + SHARE) / 2))
    return TimeError(low, high, len(like), ratio_error())


def _alike(run: KnownRun, other: KnownRun) -> bool:
    """Return True if the error of one run tells of that of the other."""
    same = run.framework == other.framework and _backend(run.chip) == _backend(other.chip)
    phases = (run.kind == "serving") == (other.kind == "serving")
    return same and phases and abs(math.log(run.tokens / other.tokens)) <= math.log(_FAR)


def _weight(run: KnownRun, other: KnownRun) -> float:
    """Return the weight of a run: 1 if it is alike in all features, less for each that differs."""
    differs = {
        "chip": run.chip != other.chip,
        "kind": run.kind != other.kind,
        "slices": (run.slices > 1) != (other.slices > 1),
    }
    distance = abs(math.log(run.tokens / other.tokens)) / math.log(_FAR)
    return math.prod(_OTHER[name] for name, differ in differs.items() if differ) * (1.0 - 0.5 * distance)


@functools.cache
def _backend(chip: str) -> str:
    """Return the backend of a chip, such as `tpu`."""
    return load_chip(chip).backend


def _quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    """Return the value at which the weight of smaller ones passes `share`; an outlier of less weight has no effect."""
    order = np.argsort(values)
    passed = np.searchsorted(np.cumsum(weights[order]), share * weights.sum())
    return float(values[order][min(passed, len(values) - 1)])


def coverage(runs: Sequence[KnownRun]) -> tuple[int, int]:
    """Return the number of runs inside the interval that all other sources give, and the number with an interval."""
    inside = counted = 0
    for run in runs:
        interval = time_error(run, [each for each in runs if each.source != run.source])
        if interval is not None:
            counted += 1
            inside += interval.low <= math.expm1(run.log_error) <= interval.high
    return inside, counted
