"""Topologies by pattern (`v5e:*`, `v6e:16x16*1-4`, `v5p-*`), for a choice among many."""

import difflib
import fnmatch
import math
import re
from collections.abc import Iterator

from autoshard.cost.chip import Chip, chip_names, load_chip
from autoshard.cost.topology import Topology, slice_shapes
from autoshard.errors import UserError


MOST_FOUND = 512
"""Most topologies that one pattern may stand for."""
MOST_TRIED = 64
"""Most numbers of slices that `larger_topologies` tries."""
_PATTERN = re.compile(
    r"(?P<chip>[^:*@-]*\*?)(?::(?P<shape>(?:[0-9]+|\*)(?:x(?:[0-9]+|\*))*)|-(?P<count>[0-9*]+))"
    r"(?:\*(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?)?"
)


def shapes_of(chip: Chip) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of one slice, or island, that a chip is offered in, the smallest first.

    Shapes of whole cubes are limited to those with slice names, although more exist. A CPU's devices have no shapes, so
    that the result is empty.
    """
    shapes = {tuple(shape) for shape in chip.small_shapes} | set(slice_shapes(chip).values())
    distinct = {Topology.make(chip, shape).shape for shape in shapes}
    return tuple(sorted(distinct, key=lambda shape: (math.prod(shape), shape)))


def find_topologies(pattern: str) -> tuple[Topology, ...]:
    """Return the topologies that a pattern stands for, the smallest first; a name without pattern stands for itself.

    `*` stands for any chip (`v5*`), shape (`v5e:*`), size of a shape (`v5e:4x*`) or number of a slice name (`v5p-*`).
    `*1-4` at the end stands for one to four slices. Raises: UserError with near matches if there is none, and for a
    pattern of more than `MOST_FOUND` topologies.
    """
    text = pattern.strip()
    match = _PATTERN.fullmatch(text)
    if "*" in text and not {":", "-"} & set(text):
        chip = text.removesuffix("*") if text.removesuffix("*").lower() in chip_names() else text
        raise UserError(f"topology {pattern!r} names no shapes; write '{chip}:*'.")
    if match is None or not _is_pattern(match):
        return (Topology.parse(text),)
    first = int(match["first"] or 1)
    last = int(match["last"] or first)
    if not 1 <= first <= last <= MOST_FOUND:
        raise UserError(f"topology {pattern!r}: slices from {first} to {last} are none; write SHAPE*1-4.")
    shapes = [(chip, shape) for chip in _chips(match["chip"]) for shape in _matching(chip, match)]
    if not shapes:
        raise UserError(f"topology {pattern!r} stands for none; {_offers(_chips(match['chip']))}.")
    if len(shapes) * (last - first + 1) > MOST_FOUND:
        raise UserError(
            f"topology {pattern!r} stands for {len(shapes) * (last - first + 1)} of them, more than {MOST_FOUND}; "
            "name a chip, a shape, or fewer slices."
        )
    topologies = [Topology.make(chip, shape, count) for count in range(first, last + 1) for chip, shape in shapes]
    return tuple(sorted(topologies, key=lambda each: each.num_chips))


def larger_topologies(topology: Topology, devices: int) -> Iterator[Topology]:
    """Yield topologies of the same chip with more devices than `topology` and at least `devices`.

    The shapes of one slice come first, the smallest first. Further slices (or islands) of the largest shape follow. A
    CPU yields none, since its devices have no shapes. At most `MOST_TRIED` numbers of slices follow.
    """
    if topology.chip.traits.shares_machine:
        return
    least = max(devices, topology.num_devices + 1)
    shapes = [Topology.make(topology.chip, shape) for shape in shapes_of(topology.chip)]
    yield from (each for each in shapes if each.num_devices >= least)
    largest = shapes[-1]
    first = max(2, -(-least // largest.num_devices))
    for slices in range(first, first + MOST_TRIED):
        yield Topology.make(topology.chip, largest.shape, slices)


def _is_pattern(match: re.Match[str]) -> bool:
    """Return True if a match of `_PATTERN` has a `*` in place of a name or number, or a range of slices."""
    return any("*" in (match[name] or "") for name in ("chip", "shape", "count")) or match["last"] is not None


def _chips(text: str) -> list[Chip]:
    """Return the chips of a name or pattern; a pattern omits chips whose devices have no shapes.

    Raises: UserError if no chip matches.
    """
    if "*" not in text:
        chip = load_chip(text)
        if chip.traits.shares_machine:
            raise UserError(f"{chip.name} has no list of shapes; write how many devices, such as {chip.name}:8.")
        return [chip]
    chips = [load_chip(name) for name in chip_names() if fnmatch.fnmatchcase(name, text.lower())]
    chips = [chip for chip in chips if not chip.traits.shares_machine]
    if not chips:
        near = difflib.get_close_matches(text.replace("*", ""), chip_names(), n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known chips are {', '.join(chip_names())}."
        raise UserError(f"no chip is called {text!r}; {hint}")
    return chips


def _matching(chip: Chip, match: re.Match[str]) -> list[tuple[int, ...]]:
    """Return the shapes of a chip that match a pattern, none if there are none.

    Raises: UserError for a shape without `*` that a named chip does not come in.
    """
    if match["count"] is not None:
        pattern = f"{chip.name}-{match['count']}"
        return [shape for name, shape in slice_shapes(chip).items() if fnmatch.fnmatchcase(name, pattern)]
    text = match["shape"]
    if "*" not in text:  # an ordinary shape, of which the number of slices is a range, or of several chips
        try:
            return [Topology.make(chip, tuple(int(size) for size in text.split("x"))).shape]
        except UserError:
            if "*" in match["chip"]:
                return []
            raise
    if text == "*":
        return list(shapes_of(chip))
    return [shape for shape in shapes_of(chip) if fnmatch.fnmatchcase("x".join(map(str, shape)), text)]


def _offers(chips: list[Chip]) -> str:
    """Describe the first eight shapes that the first chip is offered in, as a clause."""
    chip = chips[0]
    shapes = ["x".join(map(str, shape)) for shape in shapes_of(chip)]
    listed = ", ".join(shapes[:8]) + (f" and {len(shapes) - 8} more" if len(shapes) > 8 else "")
    return f"{chip.name} comes in {listed}"
