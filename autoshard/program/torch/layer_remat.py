"""The choice of values that the backward pass recomputes: one policy for all layers, or one for each run of layers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.program.remat_policy import BASES, Policy, read_policy, unknown_remat
from autoshard.program.torch.repeated_layers import Block, is_list


@dataclasses.dataclass(frozen=True, slots=True)
class Remat:
    """Rematerialisation policies of a model's layers.

    `full` applies to all layers; `full:20+none` is full in the first 20 layers and none in the others.
    """

    parts: tuple[tuple[str, int], ...]
    """Policies with the number of layers that each covers; the last covers all remaining layers."""

    def of(self, number: int) -> Policy:
        """Return the policy of layer `number`, counted from 0; the last one for all numbers beyond the parts."""
        for choice, count in self.parts[:-1]:
            if number < count:
                return read_policy(choice)
            number -= count
        return read_policy(self.parts[-1][0])

    @property
    def names(self) -> tuple[str, ...]:
        """Values that the policies name, each once."""
        return tuple(dict.fromkeys(name for choice, _ in self.parts for name in read_policy(choice).names))

    @property
    def named(self) -> int:
        """Number of layers that all policies but the last cover."""
        return sum(count for _, count in self.parts[:-1])

    def __str__(self) -> str:
        """Return the text that `parse_remat` parses into these policies."""
        return remat_text(self.parts)

    def check(self, layers: int) -> None:
        """Raise `UserError` if the `layers` of the model leave none for the last of several policies."""
        if len(self.parts) > 1 and self.named >= layers:
            raise UserError(
                f"remat `{remat_text(self.parts)}` counts {self.named} layers out, but the model has {layers}: "
                "leave at least one for the last choice."
            )


def remat_text(parts: Sequence[tuple[str, int]]) -> str:
    """Return the policies in the user's notation."""
    return "+".join([*(f"{choice}:{count}" for choice, count in parts[:-1]), parts[-1][0]])


def parse_remat(text: str) -> Remat:
    """Parse the user's notation, such as `full:20+none`.

    Raises `UserError` if the text names no known policy, and if a policy but the last lacks a positive number.
    """
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
    """Return one policy of `text` in canonical form. Raises `UserError` if it is none."""
    base, _, _ = choice.partition(",")
    if base.strip() not in BASES:
        raise unknown_remat(text)
    return str(read_policy(choice))


def numbered_layers(module: Any, blocks: Sequence[Block]) -> dict[str, int]:
    """Return name -> number, from 0, of the layers that have a policy of their own, in the order of the module.

    These are the layers of blocks, and those of other lists.
    """
    inside = {block.layer(o, r) for block in blocks for o in range(block.period) for r in range(block.repeats)}
    apart = {*inside, *listed_layers(module, blocks)}
    return {name: number for number, name in enumerate(n for n, _ in module.named_modules() if n in apart)}


def listed_layers(module: Any, blocks: Sequence[Block]) -> list[str]:
    """Return the names of layers with parameters in module lists and in no block; only the outermost lists count.

    A layer that contains a block is left out.
    """
    inside = {block.layer(o, r) for block in blocks for o in range(block.period) for r in range(block.repeats)}
    layers: list[str] = []
    done = set(inside)
    for name, child in module.named_modules():
        listed = is_list(child) or any(block.owner == name for block in blocks)
        if not listed or any(name.startswith(other + ".") for other in done):
            continue
        for key, layer in child.named_children():
            full = f"{name}.{key}" if name else key
            holds_scan = any(other.startswith(full + ".") for other in inside)
            if full not in inside and not holds_scan and next(layer.parameters(), None) is not None:
                layers.append(full)
                done.add(full)
    return layers


def split_blocks(blocks: Sequence[Block], remat: Remat, numbers: Mapping[str, int]) -> tuple[Block, ...]:
    """Return the blocks, split between groups where the policy of the group's first layer changes.

    A part of one group alone is no block, and is left out. `numbers` are those of `numbered_layers`.
    """
    parts: list[Block] = []
    for block in blocks:
        kinds = [remat.of(numbers[block.layer(0, repeat)]) for repeat in range(block.repeats)]
        start = 0
        for stop in range(1, block.repeats + 1):
            if stop == block.repeats or kinds[stop] != kinds[start]:
                if stop - start > 1:
                    first = block.start + start * block.period
                    parts.append(dataclasses.replace(block, start=first, repeats=stop - start))
                start = stop
    return tuple(parts)
