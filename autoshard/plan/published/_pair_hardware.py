"""The chips that a measured group names in words, as a topology."""

import math
import re
from collections.abc import Mapping
from typing import Any

from autoshard.cost import Chip, Topology, chip_names, load_chip
from autoshard.plan.published._pair_dims import whole_number
from autoshard.plan.published._published import IncompleteError, made_of, slice_shape


def stated_topology(group: Mapping[str, Any], assumed: list[str]) -> Topology:
    """The slice that a group ran on, or its `slices`; what it leaves open is filled in, and said in `assumed`.

    Raises `IncompleteError` where no such slice is known.
    """
    chip = _chip(group)
    if not str(group["chips"]).isdigit():
        raise IncompleteError(f"the number of chips is not stated ({group['chips']})")
    count, slices = int(group["chips"]), whole_number(group, "slices", 1)
    if count % slices:
        raise IncompleteError(f"{count} chips do not make {slices} slices")
    text, each = str(group.get("topology", "")), count // slices
    shapes = [s for s in re.findall(r"\b\d+(?:x\d+)+\b", text) if math.prod(map(int, s.split("x"))) == each]
    if not shapes:
        shapes = [slice_shape(chip, each) or str(each)]
        assumed.append(f"topology {shapes[0]}")
    found = made_of(chip, shapes[0], slices)
    if found.num_chips != count:
        raise IncompleteError(f"{count} chips are stated, but {found.name} has {found.num_chips}")
    return found


def _chip(group: Mapping[str, Any]) -> Chip:
    """The chip that the hardware's text names; the one called likely where it names two."""
    words = re.findall(r"[a-z]+\d+[a-z]*", str(group["hardware"]).lower())
    known = {alias: name for name in chip_names() for alias in (name, *load_chip(name).aliases)}
    found = [known[word] for word in words if word in known]
    if not found:
        raise IncompleteError(
            f"the chip of {str(group['hardware'])[:60]!r} is not known ({', '.join(chip_names())} are)"
        )
    return load_chip(found[-1] if "likely" in str(group["hardware"]) else found[0])
