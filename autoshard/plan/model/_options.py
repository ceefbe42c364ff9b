"""What may be said of a plan that is to be made, in one record from what users call down to the solver."""

import dataclasses
import numbers
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from autoshard.cost import Fit
from autoshard.errors import UserError
from autoshard.plan.model._asked import Asked, read_asked
from autoshard.plan.record._plan import Plan
from autoshard.plan.record._store import parameter_specs


class PlanOptions(TypedDict, total=False):
    """The options of `autoshard.plan`, by the names that users write; `refine` and `sweep` take them too."""

    mesh: str | Mapping[str, int] | None
    memory_limit: float | None
    time_limit: float
    seed: int
    pins: Mapping[str, Any] | None
    replicate: Iterable[str] | str | None
    forbid: Mapping[str, Any] | None
    axis_only: Mapping[str, Any] | None
    pin_from: "Plan | str | os.PathLike[str] | None"
    asked: Asked | None
    refine_axes: bool
    calibration: bool | Fit
    ignore_constraints: bool
    xla_flags: str | Iterable[str] | None
    form: str | None
    candidates: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All that decides a plan beside its program. An option that is added here reaches whatever makes plans."""

    topology: str
    """Chips and their shape, such as `v5p:4x8x8` or `cpu:8`."""
    mesh: str | Mapping[str, int] | None = None
    """Axes and sizes; None asks `XLA_AUTO_SPMD_MESH`, then the program, and `auto` looks for the best."""
    memory_limit: int | None = None
    """Bytes of one device; None is the chip's usable memory."""
    time_limit: float = 60.0
    """Seconds of processor for each solve; the work of a solve is bounded apart from it."""
    seed: int = 0
    """Where the solver's local searches begin."""
    asked: Asked = dataclasses.field(default_factory=Asked)
    """Pins and other demands, see `read_asked`."""
    refine_axes: bool = True
    """Whether an axis may be cut where a dim is divided by a part of it only."""
    calibration: bool | Fit = True
    """Whether prices are those learned of the topology, or a fit made before."""
    ignore_constraints: bool = False
    """Whether what the program itself asks for is lifted before it is planned."""
    xla_flags: str | Iterable[str] | None = None
    """Compiler flags that the step will run with."""
    form: str | None = None
    """An export's form that must be able to hold the plan; None for any plan."""
    candidates: int = 1
    """Plans to offer at most, the chosen one first."""


def read_options(topology: str, said: PlanOptions) -> Options:
    """The record of what a user wrote, with the defaults of what was left out.

    Raises `UserError` for demands that cannot be read, and `TypeError` for an option that does not exist.
    """
    options: dict[str, Any] = dict(said)
    if unknown := sorted(set(options) - PlanOptions.__annotations__.keys()):
        names = ", ".join(sorted(PlanOptions.__annotations__))
        raise TypeError(f"there is no option {unknown[0]!r}; the options of a plan are topology, {names}")
    pins, replicate, forbid, axis_only = (
        options.pop(name, None) for name in ("pins", "replicate", "forbid", "axis_only")
    )
    pinned = options.pop("pin_from", None)
    asked = options.pop("asked", None)
    if asked is None:
        if not isinstance(pinned, Plan | str | os.PathLike | None):
            raise UserError(f"pin_from is {pinned!r}; give a plan, or the path of one.")
        asked = read_asked(pins, replicate, forbid, axis_only, None if pinned is None else parameter_specs(pinned))
    elif any((pins, replicate, forbid, axis_only)) or pinned is not None:
        raise TypeError("`asked` has all demands: leave out pins, replicate, forbid, axis_only and pin_from beside it")
    read = Options(topology=topology, asked=asked, **options)
    _check_kinds(read)
    # Bytes are counted in whole numbers, and numbers of numpy would not go into a plan's file.
    limit = None if read.memory_limit is None else int(read.memory_limit)
    return dataclasses.replace(read, memory_limit=limit, seed=int(read.seed), candidates=int(read.candidates))


def _check_kinds(options: Options) -> None:
    """Refuse values that are no numbers, or none that can be meant."""
    limit, seconds = options.memory_limit, options.time_limit
    if limit is not None and (not _is_number(limit, numbers.Real) or not 1 <= limit < 2**63):
        raise UserError(f"memory_limit is {limit!r}, expected the bytes of one device, a number from 1 up.")
    if not _is_number(seconds, numbers.Real) or not seconds > 0:
        raise UserError(f"time_limit is {seconds!r}, expected seconds above 0 (math.inf for no limit).")
    if not _is_number(options.seed, numbers.Integral) or not -(2**63) <= options.seed < 2**63:
        raise UserError(f"seed is {str(options.seed)[:60]!r}, expected a whole number of 64 bits.")
    if not _is_number(options.candidates, numbers.Integral) or options.candidates < 1:
        raise UserError(f"candidates is {options.candidates!r}, expected a whole number above 0.")
    if not isinstance(options.mesh, (str, Mapping, type(None))):
        raise UserError(f"mesh is {options.mesh!r}; write 'data=4,model=2' or a dict of axes and sizes.")


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one search may spend."""

    memory_bytes: int
    """The peak of one device that no choice may pass."""
    seconds: float
    """Seconds of processor for all solves together."""
    seed: int
    """Where the solver's local searches begin."""

    def share(self, part: float) -> "Limits":
        """The same with a part of the time."""
        return dataclasses.replace(self, seconds=part * self.seconds)
