"""What the backward pass computes again: one choice for all layers, or another for the first so many of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.program.remat_policy import BASES, Policy, read_policy, unknown_remat
from autoshard.program.torch.repeated_layers import Block, is_list


@dataclasses.dataclass(frozen=True, slots=True)
class Remat:
    """`full`, or `full:20+none`: full in the first 20 layers, none in the others."""

    parts: tuple[tuple[str, int], ...]
    """Choices, and how many layers have them; the last holds for all that are left, whatever its number."""

    def of(self, number: int) -> Policy:
        """The choice for a layer, counted from 0."""
        for choice, count in self.parts[:-1]:
            if number < count:
                return read_policy(choice)
            number -= count
        return read_policy(self.parts[-1][0])

    @property
    def names(self) -> tuple[str, ...]:
        """The values that its choices name, each once."""
        return tuple(dict.fromkeys(name for choice, _ in self.parts for name in read_policy(choice).names))

    @property
    def named(self) -> int:
        """Layers that are counted out."""
        return sum(count for _, count in self.parts[:-1])

    def __str__(self) -> str:
        return remat_text(self.parts)

    def check(self, layers: int) -> None:
        """Raises `UserError` if the model has too few layers for it."""
        if len(self.parts) > 1 and self.named >= layers:
            raise UserError(
                f"remat `{remat_text(self.parts)}` counts {self.named} layers out, but the model has {layers}: "
                "leave at least one for the last choice."
            )


def remat_text(parts: Sequence[tuple[str, int]]) -> str:
    """As the user writes it."""
    return "+".join([*(f"{choice}:{count}" for choice, count in parts[:-1]), parts[-1][0]])


def parse_remat(text: str) -> Remat:
    """Raises `UserError` for what is no choice."""
    *first, last = (part.strip() for part in text.split("+"))
    parts = []
    for part in first:
        choice, _, count = part.rpartition(":")
        if not count.isdecimal() or int(count) < 1:
            raise unknown_remat(text)
        parts.append((choice, int(count)))
    parts.append((last, 0))
    return Remat(tuple((_checked(choice, text), count) for choice, count in parts))


def _checked(choice: str, text: str) -> str:
    """One choice of a text as it is always written."""
    base, _, _ = choice.partition(",")
    if base.strip() not in BASES:
        raise unknown_remat(text)
    return str(read_policy(choice))


def numbered_layers(module: Any, blocks: Sequence[Block]) -> dict[str, int]:
    """The layers that can be rematerialised apart, in the order of the module: those of blocks, and of other lists."""
    inside = {block.layer(o, r) for block in blocks for o in range(block.period) for r in range(block.repeats)}
    apart = {*inside, *listed_layers(module, blocks)}
    return {name: number for number, name in enumerate(n for n, _ in module.named_modules() if n in apart)}


def listed_layers(module: Any, blocks: Sequence[Block]) -> list[str]:
    """Layers with parameters in lists of modules that no block holds, the outermost lists."""
    inside = {block.layer(o, r) for block in blocks for o in range(block.period) for r in range(block.repeats)}
    found: list[str] = []
    done = set(inside)
    for name, child in module.named_modules():
        listed = is_list(child) or any(block.owner == name for block in blocks)
        if not listed or any(name.startswith(other + ".") for other in done):
            continue
        for key, layer in child.named_children():
            full = f"{name}.{key}" if name else key
            holds_scan = any(other.startswith(full + ".") for other in inside)
            if full not in inside and not holds_scan and next(layer.parameters(), None) is not None:
                found.append(full)
                done.add(full)
    return found


def split_blocks(blocks: Sequence[Block], remat: Remat, numbers: Mapping[str, int]) -> tuple[Block, ...]:
    """Blocks cut where the choice changes, at whole groups; what is left as one group is no block."""
    found: list[Block] = []
    for block in blocks:
        kinds = [remat.of(numbers[block.layer(0, repeat)]) for repeat in range(block.repeats)]
        start = 0
        for stop in range(1, block.repeats + 1):
            if stop == block.repeats or kinds[stop] != kinds[start]:
                if stop - start > 1:
                    first = block.start + start * block.period
                    found.append(dataclasses.replace(block, start=first, repeats=stop - start))
                start = stop
    return tuple(found)
