"""Options of a plan, and the options of a program source that the planner may choose."""

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
from autoshard.program import GPU_AUTO, HOSTS, INPUT, LOSSLESS, Choices


class PlanOptions(TypedDict, total=False):
    """Options of `autoshard.plan` under the names that users write; `refine` and `sweep` accept them too.

    They are those of `Options`. The demands `pins`, `replicate`, `forbid`, `axis_only` and `pin_from`, as `read_asked`
    reads them, stand for `asked`. `pin_from` is a plan or the path of one.
    """

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
    """All inputs of a plan in addition to its program; every maker of plans receives this record."""

    topology: str
    """Chips and their shape, such as `v5p:4x8x8` or `cpu:8`."""
    mesh: str | Mapping[str, int] | None = None
    """Axes and sizes; None reads `XLA_AUTO_SPMD_MESH`, then the program; `auto` searches for the best mesh."""
    memory_limit: int | None = None
    """Bytes of one device; None stands for the chip's usable memory."""
    time_limit: float = 60.0
    """Processor seconds of each solve; the work of a solve is bounded separately."""
    seed: int = 0
    """Seed of the solver's local searches."""
    asked: Asked = dataclasses.field(default_factory=Asked)
    """Pins and other demands of the user, see `read_asked`."""
    refine_axes: bool = True
    """True if an axis may be cut where only a part of it divides a dim."""
    calibration: bool | Fit = True
    """True for the calibration learned on the topology, False for none, or a fit made earlier."""
    ignore_constraints: bool = False
    """True if the program's own sharding constraints are lifted before planning."""
    xla_flags: str | Iterable[str] | None = None
    """Compiler flags that the step will run with."""
    form: str | None = None
    """Export form that must be able to express the plan; None for any plan."""
    candidates: int = 1
    """Largest number of plans to offer, the chosen plan first."""


def read_options(topology: str, user_options: PlanOptions) -> Options:
    """Convert the options that a user wrote into a record, with defaults for absent ones.

    Raises `UserError` for demands that cannot be read and for values of a wrong type or out of range. Raises
    `TypeError` for an option that does not exist, and for demands in addition to `asked`.
    """
    options: dict[str, Any] = dict(user_options)
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
        raise TypeError("`asked` has all demands: leave out pins, replicate, forbid, axis_only and pin_from with it")
    read = Options(topology=topology, asked=asked, **options)
    _check_kinds(read)
    # Bytes are whole numbers, and a plan's file cannot store numpy scalars.
    limit = None if read.memory_limit is None else int(read.memory_limit)
    return dataclasses.replace(read, memory_limit=limit, seed=int(read.seed), candidates=int(read.candidates))


def _check_kinds(options: Options) -> None:
    """Raise `UserError` for a memory limit, time limit, seed, number of candidates or mesh of wrong type or range."""
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
    """Return True if a value is a number of the kind, an abstract class of `numbers`; booleans are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Resources that one search may use."""

    memory_bytes: int
    """Peak bytes of one device that no choice may exceed."""
    seconds: float
    """Processor seconds for all solves together."""
    seed: int
    """Seed of the solver's local searches."""

    def share(self, part: float) -> "Limits":
        """Return the limits with `part` times the seconds."""
        return dataclasses.replace(self, seconds=part * self.seconds)


REMATS = ("none", "dots", "full")
"""Remat policies to choose from, least recomputation first."""

MICROBATCHES = (1, 2, 4, 8)
"""Numbers of microbatches to choose from."""

BATCHES = (1, 2, 4, 8, 16, 32)
"""Examples per device to choose from; halves of a single example per device are tried if none fits."""

FULL = "full"
"""Remat policy that recomputes everything."""

OFFLOADED = f"{FULL},offload={INPUT}"
"""Remat policy of least memory: layers recompute everything from inputs that the hosts hold."""

PADS = ("vocabulary=128", "vocabulary=128,heads=8")
"""Padding to choose from: the lanes of a TPU's register, and the most devices that share the heads of small models."""

RINGS = ("auto", "ring")
"""Attention exchanges to choose from: as the solver decides, or around a ring."""

SCHEDULES = ("gpipe", "circular:2", "circular:3", "circular:4")
"""Pipeline schedules to choose from."""

MOST_STAGES = 64
"""Largest number of pipeline stages that the planner chooses."""

PARTS = ("stages", "schedule", "microbatches")
"""Options that decide how a step is computed in parts, one after the other or by stages."""

_MADE_FOR = {"splash": ("splash", "TPUs"), "cached": ("splash", "TPUs"), "cudnn": ("cudnn", "NVIDIA's GPUs")}
"""Attention kernel -> (kernel family, as in `Traits.attention`; name of the chips that have this family)."""

AUTO = "auto"
"""Value of an option that leaves the choice to the planner."""


def with_open_defaults(options: Mapping[str, Any], topology: str) -> dict[str, Any]:
    """Return the options of a source, with `auto` for the memory levers of a training step that nobody set.

    These are recomputation, microbatches, and state on the hosts of TPUs. A step with stages has as many microbatches
    as stages, so their number stays closed. Sources without the option `train` have no such levers.
    """
    if not options.get("train"):
        return dict(options)
    levers = ["remat"]
    if options.get("stages") is None:
        levers.append("microbatches")
        if Topology.parse(topology).traits.compiles_ahead:
            levers.append("host")
    return {**options, **{name: AUTO for name in levers if options.get(name) is None}}


def source_choices(options: Mapping[str, Any], topology: str) -> Choices:
    """Return the values to choose from for each source option that is `auto`, by name; empty if none is.

    - `options`: options of the source by name.
    - `topology`: chips and their shape.

    Microbatches without stages are those of `MICROBATCHES` that divide a given batch. Gradient groups that are open
    have the value None alone. Raises `UserError` if `auto` contradicts another option.
    """
    choices: dict[str, tuple[Any, ...]] = {}
    if options.get("remat") == AUTO:
        choices["remat"] = REMATS
    if options.get("host") == AUTO:
        choices["host"] = HOSTS[:1] if Topology.parse(topology).traits.shares_machine else HOSTS
    if options.get("experts") == AUTO:
        if options.get("capacity_factor") is not None:
            raise UserError(
                "--experts auto chooses among forms that drop no token, and --capacity-factor says how many may be "
                "sent; give --experts slots or sorted:8 with it, or leave it out."
            )
        choices["experts"] = LOSSLESS
    if options.get("batch") == AUTO:
        devices = Topology.parse(topology).num_devices
        halves = [devices >> n for n in range(1, devices.bit_length()) if devices % (1 << n) == 0]
        choices["batch"] = (*(devices * each for each in BATCHES), *halves)
    if options.get("exchange") == AUTO:
        choices["exchange"] = RINGS
    if options.get("pad") == AUTO:
        choices["pad"] = ("none", *PADS)
    if options.get("quantize") == AUTO:
        if not options.get("train"):
            raise UserError("--quantize is for training steps; add --train, or leave it out.")
        choices["quantize"] = ("none", *_faster_forms(Topology.parse(topology)))
    parts = _part_choices(options, topology)
    if parts:
        choices |= parts
    open_groups = options.get("gradient_groups") is None and AUTO in (options.get(name) for name in PARTS)
    if open_groups or options.get("gradient_groups") == AUTO:
        choices["gradient_groups"] = (None,)  # the possible numbers are known only after planning
    if not parts and options.get("microbatches") == AUTO:
        batch = options.get("batch")
        choices["microbatches"] = tuple(n for n in MICROBATCHES if not isinstance(batch, int) or batch % n == 0)
    return choices


def _part_choices(options: Mapping[str, Any], topology: str) -> dict[str, tuple[Any, ...]]:
    """Return the values of all `PARTS` if one of them is `auto` and there are stages, else nothing.

    Open stages are the divisors of the number of devices up to `MOST_STAGES`. Each stage has 1, 2, 4 or 8 microbatches,
    unless their number is given; numbers that do not divide a given batch are left out. One stage without a schedule
    stands for no pipeline.

    Raises `UserError` for an open schedule without stages, and if no open number of microbatches divides the batch.
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
        if not counts:
            raise UserError(
                f"no number of microbatches that is 1, 2, 4 or 8 for each stage divides the batch of {batch}; say "
                "--microbatches, or use another batch."
            )
    return {"stages": tuple(numbers), "schedule": (None, *ways) if stages == AUTO else ways, "microbatches": counts}


def _faster_forms(topology: Topology) -> list[str]:
    """Return the forms of 8 bits that a chip multiplies faster than bfloat16, in a fixed order; none for CPUs."""
    forms = [] if topology.traits.shares_machine else ["int8", "fp8"]
    faster = [form for form in forms if topology.peak_flops(form) > topology.peak_flops("bf16")]
    return [form for form in faster if form != "int8" or topology.traits.int8_to_floats]


def _check_rate(topology: Topology, form: str | None) -> None:
    """Raise `UserError` if a chip multiplies the 8 bits of `form` no faster than bfloat16; CPUs imitate all chips."""
    chip, traits = topology.chip, topology.traits
    if form in (None, "none") or traits.shares_machine or form not in chip.peak_flops_per_s:
        return
    faster = _faster_forms(topology)
    if form == "int8" and not traits.int8_to_floats:
        other = "use fp8" if "fp8" in faster else "leave it out"
        raise UserError(f"--quantize int8: XLA has no such matmuls with results in floats for {chip.name}; {other}.")
    if form not in faster:
        raise UserError(
            f"--quantize {form}: compiled steps multiply {form} no faster than bfloat16 on {chip.name}; leave it out."
        )


def settled_options(options: Mapping[str, Any], topology: str) -> dict[str, Any]:
    """Return the options for `open_source`, with the attention kernel that the topology decides.

    The option `preferred` is added: the kernel to use if `attention` is absent. The kernel `auto` becomes that of the
    topology's chips, or `plain`.

    TPUs and GPUs prefer their own kernel. On CPUs, which only imitate kernels, any kernel is allowed. Raises
    `UserError` for a kernel of other hardware, and for matmuls of 8 bits where they are not faster.
    """
    place = Topology.parse(topology)
    _check_rate(place, options.get("quantize"))
    own, asked = place.traits.attention, options.get("attention")
    needs, chips = _MADE_FOR.get(str(asked), (own, ""))
    if own not in ("plain", needs):
        raise UserError(f"--attention {asked} is a kernel for {chips}, not for {topology}; use auto.")
    kernel = {"splash": AUTO, "cudnn": GPU_AUTO}.get(own, "plain")
    settled = {**options, "preferred": {"attention": kernel} if kernel != "plain" else {}}
    if settled.get("attention") == "auto":
        settled["attention"] = kernel
    return settled
