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
    if options.get("microbatches") == AUTO:
        batch = options.get("batch")
        found["microbatches"] = tuple(n for n in MICROBATCHES if not isinstance(batch, int) or batch % n == 0)
    return found


def settled_options(options: Mapping[str, Any], topology: str) -> dict[str, Any]:
    """Options of a source for `open_source`, and what the topology decides: which kernel attention has.

    TPUs prefer theirs; GPUs take one where `auto` asks for it.
    """
    kernel = {"splash": AUTO, "cudnn": GPU_AUTO}.get(Topology.parse(topology).traits.attention, "plain")
    settled = {**options, "preferred": {"attention": kernel} if kernel == AUTO else {}}
    if settled.get("attention") == "auto":
        settled["attention"] = kernel
    return settled
