"""Comparison of a planned step's results with those of the unplanned program.

The difference of a result is its largest element-wise difference over the tensor's own maximum. A difference past the
tolerance may still be at most `FACTOR` times the noise of the unplanned step (`Difference.floor`). A gradient that is
zero in exact arithmetic comes out as rounding noise, which requires care in two cases:

- A tensor of optimizer state may be noise as a whole: its maximum is below `NOISE` of its family's, such as all first
  moments. It is compared on the scale of its family.
- Adam divides one moment by the root of the other. If both are noise, the updated parameter differs by a whole learning
  rate. To first order the update u = m / (sqrt(v) + eps) changes by at most |u| (|dm/m| + |dv/v| / 2). If a parameter
  has two moments, twice |u| (|dm/m| + |dv/v|) is subtracted from each element's difference. Here m and v are the
  moments after both runs. No error escapes: m is linear in the gradient, and both moments are compared everywhere.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from autoshard.exec.run.check_inputs import ROUNDING
from autoshard.program import Program, Role


NOISE = 1e-5
"""Share of the family's maximum below which a whole tensor of optimizer state is rounding noise."""


FACTOR = 2.0
"""Largest difference that still counts as noise, in multiples of a result's noise."""


EXACT = 1e-9
"""Largest relative difference in float64 that is rounding.

A fault of the plan differs by as much in float64 as in float32, where the tolerance is 1e-5. Rounding shrinks by 2^29,
so that what it does to a tenth of a maximum in float32 is below 1e-9 in float64.
"""
AMPLIFIED = 100.0
"""Largest difference that both steps' agreement in float64 excuses, in multiples of the measured rounding.

It is that of the unplanned step: its distance from float64, from its examples in another order, and from arguments
with errors of `UNIT`. Sums in another order round at each of their terms, and not once.
"""
UNIT = 2.0**-24
"""Half a unit in the last place of float32, relative."""
GROSS = 0.1
"""Largest allowed difference, as a share of a tensor's maximum, that still shows that a planned step agrees."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Comparison of one result of the planned step with the unplanned one."""

    name: str
    """Name of the result that differs."""
    rel_diff: float
    """Largest difference over the tensor's maximum (over its family's maximum for noise); infinite for another
    shape.
    """
    compared: float
    """Share of the elements whose moments explain less than the tolerance; 1 except under Adam."""
    floor: float = 0.0
    """Noise of the unplanned step on the same scale; 0 if it was not determined."""

    def within(self, tolerance: float) -> bool:
        """Return True if the difference is at most `tolerance`, or `FACTOR` times the noise of the unplanned step."""
        return self.rel_diff <= self.allowed(tolerance)

    def allowed(self, tolerance: float) -> float:
        """Return the largest difference that passes: `tolerance`, or `FACTOR` times the noise of the unplanned step."""
        return max(tolerance, FACTOR * self.floor)

    @property
    def is_noise(self) -> bool:
        """True if the result is noise as a whole: the unplanned step itself differs by half of its maximum."""
        return FACTOR * self.floor >= 1


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """Comparison of all results; it passes if no difference exceeds both the tolerance and the noise of its result."""

    differences: tuple[Difference, ...]
    """Comparisons, in the order of the program's results."""
    tolerance: float
    """Largest relative difference that passes without noise."""
    floor_note: str = ""
    """Reason why the noise is unknown although a difference exceeds the tolerance; else empty."""
    exact: float | None = None
    """Largest relative difference of both steps in float64; None if they were not compared in it.

    Results that are noise in float64 too are left out, unless all are.
    """
    exact_note: str = ""
    """Reason why both steps were not compared in float64 although a difference exceeds the noise; else empty."""
    amplified: bool = False
    """True if both steps agree in float64, and no difference exceeds `AMPLIFIED` times the measured rounding of the
    unplanned step.
    """

    @property
    def is_rounding(self) -> bool:
        """True if differences beyond the noise are rounding: at most `GROSS`, and both steps agree in float64.

        A fault of the plan would differ as much in float64. Their size must also be explained (`amplified`).
        """
        beyond = [d.rel_diff for d in self.differences if not d.within(self.tolerance)]
        return self.amplified and 0 < max(beyond, default=0.0) <= GROSS

    @property
    def max_rel_diff(self) -> float:
        """The largest relative difference of all results; 0 if there are none."""
        return max((d.rel_diff for d in self.differences), default=0.0)

    @property
    def passed(self) -> bool:
        """True if every result is within the tolerance, or within the noise of the unplanned step, or rounding."""
        return self.is_rounding or all(d.within(self.tolerance) for d in self.differences)

    @property
    def worst(self) -> Difference | None:
        """The largest difference that exceeds its limit, else the largest one of a result that is more than noise; None
        if there are no results.
        """
        limit = self.tolerance
        return max(self.differences, key=lambda d: (not d.within(limit), not d.is_noise, d.rel_diff), default=None)


def default_tolerance(program: Program) -> float:
    """Return the largest of the tolerances of the dtypes of a program's arguments and results.

    They are 3e-2 for bfloat16, 4e-3 for float16, and 1e-5 for every other dtype.
    """
    # About four units in the last place of 1: 2^-7 for bfloat16, and 2^-10 for float16.
    narrow = {"bfloat16": 3e-2, "float16": 4e-3}
    return max([narrow.get(t.dtype, 1e-5) for t in (*program.arguments, *program.results)], default=1e-5)


def compare(
    program: Program,
    planned: Sequence[Any],
    unplanned: Sequence[Any],
    tolerance: float | None = None,
    before: Sequence[Any] | None = None,
    floor: tuple[Sequence[float], str] | None = None,
) -> Check:
    """Compare flat results of the planned and the unplanned step, in the order of the program's results.

    - `planned`, `unplanned`: arrays of any kind that numpy reads.
    - `tolerance`: largest relative difference. None for `default_tolerance`, and for one unit in the last place of
      results in float8.
    - `before`: flat arguments of the step; without them, moments explain no difference.
    - `floor`: noise of every result, and the reason if it is unknown (`noise_floor`); None for no noise.

    The scale of a result is its largest finite magnitude in `unplanned`, or its family's for noise.
    """
    limit = default_tolerance(program) if tolerance is None else tolerance
    actual = [_as_numbers(value) for value in planned]
    wanted = [_as_numbers(value) for value in unplanned]
    families = _families(program)
    scales = {family: max((_largest(wanted[i]) for i in members), default=0.0) for family, members in families.items()}
    family_of = {i: family for family, members in families.items() for i in members}
    noise = {
        i for i, family in family_of.items() if _largest(wanted[i]) < NOISE * scales[family] or scales[family] == 0.0
    }
    differences = []
    for i, result in enumerate(program.results):
        scale = scales[family_of[i]] if i in noise else _largest(wanted[i])
        explained = _explained(program, i, actual, wanted, before)
        compared = 1.0
        if explained is not None and explained.size:
            compared = float((explained <= limit * scale).mean())
        own_noise = floor[0][i] / scale if floor is not None and scale > 0 else 0.0
        if tolerance is None and result.dtype.startswith("float8"):
            # Another order of a sum moves a result by one unit in its last place: at most 4 roundings of the largest.
            own_noise = max(own_noise, 4 * ROUNDING.get(result.dtype, 0.0) / FACTOR)
        differences.append(
            Difference(result.name, _rel_diff(actual[i], wanted[i], scale, explained), compared, own_noise)
        )
    return Check(tuple(differences), limit, floor[1] if floor is not None else "")


def _as_numbers(value: Any) -> np.ndarray:
    """Convert a value to a numpy array, of float64 unless it is boolean, whole or complex."""
    array = np.asarray(value)
    return array if array.dtype.kind in "biuc" else array.astype(np.float64)


def _largest(array: np.ndarray) -> float:
    """Return the largest finite magnitude in an array; 0 if there is none."""
    finite = np.abs(array[np.isfinite(array)].astype(np.complex128 if array.dtype.kind == "c" else np.float64))
    return float(finite.max()) if finite.size else 0.0


def _rel_diff(found: np.ndarray, wanted: np.ndarray, scale: float, explained: np.ndarray | None) -> float:
    """Return the largest difference that moments do not explain, over `scale`; infinite for different shapes.

    NaN equals NaN; another difference that is not finite, or any on scale 0, is infinite. Empty arrays give 0.
    """
    if found.shape != wanted.shape:
        return math.inf
    kind = np.complex128 if wanted.dtype.kind == "c" else np.float64
    a, b = found.astype(kind), wanted.astype(kind)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(a - b))
    if explained is not None:
        difference = np.maximum(0.0, difference - explained)
    if not difference.size:
        return 0.0
    largest = float(difference.max())
    if largest == 0.0:
        return 0.0
    return largest / scale if scale > 0 and math.isfinite(largest) else math.inf


def _families(program: Program) -> dict[str, list[int]]:
    """Group the results that are optimizer state by the part of their name before the parameter's name.

    Returns positions of results by that part; results whose names end in no parameter's name are in no family.
    """
    families: dict[str, list[int]] = {}
    tails = [_tails(a.name) for a in program.arguments if a.role is Role.PARAMETER]
    for i, result in enumerate(program.results):
        if result.argument is None or program.arguments[result.argument].role is not Role.OPTIMIZER_STATE:
            continue
        for names in tails:
            tail = next((t for t in names if result.name.endswith("." + t)), None)
            if tail is not None:
                families.setdefault(result.name[: -len(tail)], []).append(i)
                break
    return families


def _tails(name: str) -> tuple[str, ...]:
    """Return a parameter's name, and the same without its first part, the function's argument, if it has several
    parts.
    """
    return (name, name.partition(".")[2]) if "." in name else (name,)


def _explained(
    program: Program,
    index: int,
    found: Sequence[np.ndarray],
    wanted: Sequence[np.ndarray],
    before: Sequence[Any] | None,
) -> np.ndarray | None:
    """Return each element's difference of an updated parameter that its moments explain; None if it has no moments.

    - `index`: position of the parameter among the results.
    - `found`, `wanted`: results of the planned and of the unplanned step.
    - `before`: flat arguments of the step; None gives None.

    Moments are results of optimizer state that have the parameter's shape and end in its name; there must be two. A
    moment that is zero in the unplanned step only explains any difference.
    """
    argument = program.results[index].argument
    if before is None or argument is None or program.arguments[argument].role is not Role.PARAMETER:
        return None
    shape = wanted[index].shape
    moments = [
        i
        for i, result in enumerate(program.results)
        if result.argument is not None
        and program.arguments[result.argument].role is Role.OPTIMIZER_STATE
        and wanted[i].shape == shape
        and any(result.name.endswith("." + tail) for tail in _tails(program.results[index].name))
    ]
    if len(moments) < 2 or any(found[i].shape != shape for i in (index, *moments)):
        return None
    relative = np.zeros(shape)
    for i in moments:
        change, size = np.abs(found[i] - wanted[i]), np.abs(wanted[i])
        # A moment that is zero in one run and noise in the other explains any difference.
        relative += np.divide(change, size, out=np.where(change > 0, np.inf, 0.0), where=size > 0)
    start = _as_numbers(before[argument])
    update = np.maximum(np.abs(wanted[index] - start), np.abs(found[index] - start))
    with np.errstate(invalid="ignore"):
        # Twice the first-order bound |u| (|dm/m| + |dv/v|); see the module's docstring.
        return np.nan_to_num(2 * update * relative, nan=0.0)
