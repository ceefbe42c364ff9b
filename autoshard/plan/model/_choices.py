"""Which options of a source the planner may choose, and the values that it chooses among."""

from collections.abc import Mapping
from typing import Any

from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.program import GPU_AUTO, HOSTS, LOSSLESS, Choices


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
