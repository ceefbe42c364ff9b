"""Do the results of a planned step equal those of the unplanned program?

Every result is compared with the unplanned one: the largest difference over the tensor's own maximum. Two things
need care, both because a gradient that is zero in exact arithmetic comes out as rounding noise:

- A tensor of optimizer state that is noise as a whole (its maximum below `NOISE` of its family's, such as all first
  moments) is compared on the scale of its family.
- Adam divides by the root of the second moment, so where a gradient is noise the updated parameter differs by a
  whole learning rate. An updated parameter is therefore compared where its moments, in the unplanned run, stand
  out of the noise (|first| > 1e-4 of its maximum, second > 1e-8 of its maximum). Nothing escapes: the first moment
  is linear in the gradient and is compared everywhere.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from autoshard.program import Program, Role


NOISE = 1e-5
"""Below this share of its family's maximum, a whole tensor of optimizer state is rounding noise."""

FIRST_MOMENT, SECOND_MOMENT = 1e-4, 1e-8
"""An element stands out if its moment is larger than this share of the tensor's maximum."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One result of the planned step against the unplanned one."""

    name: str
    rel_diff: float
    """Largest difference over the tensor's maximum (or its family's, for noise)."""
    compared: float
    """Share of the elements that were compared, 1 except under Adam."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """All results; passed if no difference exceeds the tolerance."""

    differences: tuple[Difference, ...]
    tolerance: float

    @property
    def max_rel_diff(self) -> float:
        return max((d.rel_diff for d in self.differences), default=0.0)

    @property
    def passed(self) -> bool:
        return self.max_rel_diff <= self.tolerance

    @property
    def worst(self) -> Difference | None:
        return max(self.differences, key=lambda d: d.rel_diff, default=None)


def default_tolerance(program: Program) -> float:
    """1e-5 for a program in 32-bit floats; a few units in the last place where it has narrower ones."""
    narrow = {"bfloat16": 3e-2, "float16": 4e-3}
    return max([narrow.get(t.dtype, 1e-5) for t in (*program.arguments, *program.results)], default=1e-5)


def compare(
    program: Program, planned: Sequence[Any], unplanned: Sequence[Any], tolerance: float | None = None
) -> Check:
    """Compare flat results, in order; arrays of any kind that numpy can read."""
    found = [_as_numbers(value) for value in planned]
    wanted = [_as_numbers(value) for value in unplanned]
    families = _families(program)
    scales = {family: max((_largest(wanted[i]) for i in members), default=0.0) for family, members in families.items()}
    family_of = {i: family for family, members in families.items() for i in members}
    noise = {
        i for i, family in family_of.items() if _largest(wanted[i]) < NOISE * scales[family] or scales[family] == 0.0
    }
    differences = []
    for i, result in enumerate(program.results):
        keep = _standing_out(program, i, wanted, noise)
        scale = scales[family_of[i]] if i in noise else _largest(wanted[i])
        differences.append(
            Difference(
                result.name,
                _rel_diff(found[i], wanted[i], scale, keep),
                1.0 if keep is None else float(keep.mean()) if keep.size else 1.0,
            )
        )
    return Check(tuple(differences), default_tolerance(program) if tolerance is None else tolerance)


def _as_numbers(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array if array.dtype.kind in "biuc" else array.astype(np.float64)


def _largest(array: np.ndarray) -> float:
    finite = np.abs(array[np.isfinite(array)].astype(np.float64)) if array.dtype.kind != "c" else np.abs(array)
    return float(finite.max()) if finite.size else 0.0


def _rel_diff(found: np.ndarray, wanted: np.ndarray, scale: float, keep: np.ndarray | None) -> float:
    if found.shape != wanted.shape:
        return math.inf
    kind = np.complex128 if wanted.dtype.kind == "c" else np.float64
    a, b = found.astype(kind), wanted.astype(kind)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(a - b))
    if keep is not None:
        difference = difference[keep]
    if not difference.size:
        return 0.0
    largest = float(difference.max())
    if largest == 0.0:
        return 0.0
    return largest / scale if scale > 0 and math.isfinite(largest) else math.inf


def _families(program: Program) -> dict[str, list[int]]:
    """Results that are optimizer state, by what stands before the name of the parameter they belong to."""
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
    """A parameter's name, and the same without the name of the function's argument."""
    return (name, name.partition(".")[2]) if "." in name else (name,)


def _standing_out(program: Program, index: int, wanted: Sequence[np.ndarray], noise: set[int]) -> np.ndarray | None:
    """Mask of the elements of an updated parameter whose moments stand out of the noise; None for all."""
    argument = program.results[index].argument
    if argument is None or program.arguments[argument].role is not Role.PARAMETER:
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
    if len(moments) < 2:
        return None
    keep = np.ones(shape, dtype=bool)
    for i in moments:
        if i in noise:
            return np.zeros(shape, dtype=bool)
        share = SECOND_MOMENT if (wanted[i] >= 0).all() else FIRST_MOMENT
        keep &= np.abs(wanted[i]) > share * _largest(wanted[i])
    return keep
