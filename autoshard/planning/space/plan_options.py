"""Options of a plan that is to be made, and the options of a source that the planner may choose."""

import dataclasses
import numbers
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from autoshard.cost import Fit, Topology
from autoshard.errors import UserError
from autoshard.planning.record.plan_files import parameter_specs
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.space.user_constraints import Asked, read_asked
from autoshard.program import GPU_AUTO, HOSTS, LOSSLESS, Choices


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


REMATS = ("none", "dots", "full")
"""What may be computed again in the backward pass, what computes least first."""

MICROBATCHES = (1, 2, 4, 8)
"""In how many parts a batch may be computed, where that is left to the planner."""

BATCHES = (1, 2, 4, 8, 16, 32)
"""Examples for each device, where the batch is left to the planner; halves of one are tried if one does not fit."""

FULL = "full"
"""What computes everything again."""

RINGS = ("auto", "ring")
"""How queries meet keys and values, where that is left to the planner: as the solver chooses, or around a ring."""

SCHEDULES = ("gpipe", "circular:2", "circular:3", "circular:4")
"""How microbatches go through stages, where that is left to the planner."""

MOST_STAGES = 64
"""Stages of a pipeline, where their number is left to the planner."""

PARTS = ("stages", "schedule", "microbatches")
"""What says how a step is computed in parts, one after the other or by stages."""

_MADE_FOR = {"splash": ("splash", "TPUs"), "cached": ("splash", "TPUs"), "cudnn": ("cudnn", "NVIDIA's GPUs")}
"""A kernel of attention -> that which chips it is for have (`Traits.attention`), and what these are called."""

AUTO = "auto"
"""The value of an option that leaves the choice to the planner."""


def source_choices(options: Mapping[str, Any], topology: str) -> Choices:
    """The values of those options of a source that are left to the planner (`auto`).

    Raises `UserError` where a batch that is not known would have to be divided.
    """
    found: dict[str, tuple[Any, ...]] = {}
    if options.get("remat") == AUTO:
        found["remat"] = REMATS
    if options.get("host") == AUTO:
        found["host"] = HOSTS[:1] if Topology.parse(topology).traits.shares_machine else HOSTS
    if options.get("experts") == AUTO:
        if options.get("capacity_factor") is not None:
            raise UserError(
                "--experts auto chooses among forms that drop no token, and --capacity-factor says how many may be "
                "sent; give --experts slots or sorted:8 with it, or leave it out."
            )
        found["experts"] = LOSSLESS
    if options.get("batch") == AUTO:
        devices = Topology.parse(topology).num_devices
        halves = [devices >> n for n in range(1, devices.bit_length()) if devices % (1 << n) == 0]
        found["batch"] = (*(devices * each for each in BATCHES), *halves)
    if options.get("exchange") == AUTO:
        found["exchange"] = RINGS
    parts = _part_choices(options, topology)
    if parts:
        found |= parts
    open_groups = options.get("gradient_groups") is None and AUTO in (options.get(name) for name in PARTS)
    if open_groups or options.get("gradient_groups") == AUTO:
        found["gradient_groups"] = (None,)  # how many there may be is known once there is a plan
    if not parts and options.get("microbatches") == AUTO:
        batch = options.get("batch")
        found["microbatches"] = tuple(n for n in MICROBATCHES if not isinstance(batch, int) or batch % n == 0)
    return found


def _part_choices(options: Mapping[str, Any], topology: str) -> dict[str, tuple[Any, ...]]:
    """Values of all `PARTS` where one of them is left to the planner and there are stages; nothing otherwise.

    Stages are as many as a part of the devices; each has 1, 2, 4 or 8 microbatches, or the pipeline has as many as
    are given. No stages are stages too: one, by no schedule.
    """
    stages, schedule, count, batch = (options.get(name) for name in (*PARTS, "batch"))
    if schedule == AUTO and stages is None:
        raise UserError("--schedule auto is for stages; add --stages auto or a number of them, or leave it out.")
    if stages in (None, 1) or AUTO not in (stages, schedule, count):
        return {}
    devices = Topology.parse(topology).num_devices
    if stages == AUTO:
        numbers = [n for n in range(1, min(devices, MOST_STAGES) + 1) if devices % n == 0]
    else:
        numbers = [stages]
    if isinstance(schedule, str) and schedule != AUTO:
        ways: tuple[str, ...] = (schedule,)
    else:
        ways = SCHEDULES if AUTO in (stages, schedule) else ("gpipe",)
    if isinstance(count, int):
        counts: tuple[int, ...] = (count,)
    else:
        every = sorted({n * k for n in numbers for k in MICROBATCHES})
        counts = tuple(n for n in every if not isinstance(batch, int) or batch % n == 0)
    return {"stages": tuple(numbers), "schedule": (None, *ways) if stages == AUTO else ways, "microbatches": counts}


def settled_options(options: Mapping[str, Any], topology: str) -> dict[str, Any]:
    """Options of a source for `open_source`, and what the topology decides: which kernel attention has.

    TPUs prefer theirs; GPUs take one where `auto` asks for it. Raises `UserError` for a kernel of other hardware; on
    CPUs, where all of them are only imitated, any may be tried.
    """
    own, asked = Topology.parse(topology).traits.attention, options.get("attention")
    needs, chips = _MADE_FOR.get(str(asked), (own, ""))
    if own not in ("plain", needs):
        raise UserError(f"--attention {asked} is a kernel for {chips}, not for {topology}; use auto.")
    kernel = {"splash": AUTO, "cudnn": GPU_AUTO}.get(own, "plain")
    settled = {**options, "preferred": {"attention": kernel} if kernel == AUTO else {}}
    if settled.get("attention") == "auto":
        settled["attention"] = kernel
    return settled
