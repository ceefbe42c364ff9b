"""Finding layers that repeat in a torch module, so that they run as one scan over stacked parameters."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any


MAX_PERIOD = 4
"""Longest repeating group of unlike layers that is looked for (alternating attention has 2)."""

_POSITIONS = {"layer_idx", "layer_id", "layer_index", "layer_number", "layer_num", "block_idx", "idx", "index"}
"""Attributes that only say where a layer stands."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """`repeats` groups of `period` layers of one list, each group structurally equal to the first."""

    owner: str
    """Name of the list in the module, such as `model.layers`."""
    start: int
    """Number of the first layer, as its name says it."""
    period: int
    repeats: int
    length: int
    """Number of layers in the whole list."""
    first: int = 0
    """Number of the list's first layer: a dict may hold layers 16 to 31 of a model."""
    stem: str = ""
    """What stands before the number in a layer's name in the list: `layer_` of `layer_0`, `layer_1`."""
    unlike: bool = False
    """True if fractions among the attributes of its layers differ, so that what they compute has to be compared."""

    @property
    def stop(self) -> int:
        """One past the last layer."""
        return self.start + self.period * self.repeats

    def layer(self, offset: int, repeat: int = 0) -> str:
        """Module name of one layer."""
        name = f"{self.stem}{self.start + repeat * self.period + offset}"
        return f"{self.owner}.{name}" if self.owner else name

    def label(self, offset: int) -> str:
        """`model.layers.*` if the block is the whole list, else with a slice: `model.layers.[3:61]`, `[0::2]`."""
        end = self.first + self.length
        whole = self.start == self.first and self.stop == end
        if whole and self.period == 1:
            text = "*"
        else:
            first = self.start + offset
            last = "" if self.stop == end else str(self.stop)
            text = f"[{first}:{last}:{self.period}]" if self.period > 1 else f"[{first}:{last}]"
        text = f"{self.stem}{text}"
        return f"{self.owner}.{text}" if self.owner else text


def find_blocks(module: Any, within: Sequence[Block] = (), fractions: Collection[str] = ()) -> tuple[Block, ...]:
    """All blocks of `module`, outermost lists first; lists inside a block are left to the block.

    With `within`, only those in the layers of these blocks. Layers in the lists of `fractions` are told apart by
    fractions among their attributes too (a rate of dropout, a scale of initial values), others only by all else.
    """
    import torch

    owners = Counter(id(p) for child in module.modules() for p in child._parameters.values() if p is not None)
    found: list[Block] = []
    for name, child in module.named_modules():
        sequence = isinstance(child, torch.nn.Sequential) and _is_numbered(child)
        if not (is_list(child) or sequence) or within and not any(_inside(name, block) for block in within):
            continue
        if any(_inside(name, block) for block in found):
            continue
        found += _blocks_of(name, child, owners, name in fractions)
    return tuple(found)


def _blocks_of(name: str, child: Any, owners: Counter[int], fractions: bool) -> list[Block]:
    """The blocks of one list."""
    layers, stem, first = list(child._modules.values()), _stem(child), _first_number(child)
    exact = [_signature(layer, owners, True) for layer in layers]
    marks = exact if fractions else [_signature(layer, owners, False) for layer in layers]
    found: list[Block] = []
    for start, period, repeats in _runs(marks):
        groups = {tuple(exact[start + r * period : start + (r + 1) * period]) for r in range(repeats)}
        block = Block(name, first + start, period, repeats, len(layers), first, stem, len(groups) > 1)
        found.append(block)
    return found


def is_list(module: Any) -> bool:
    """True for what holds layers by number: a module list, or a dict from numbers that follow one another."""
    import torch

    return isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict) and _is_numbered(module)


def _is_numbered(module: Any) -> bool:
    first, stem = _first_number(module), _stem(module)
    return list(module._modules) == [f"{stem}{first + place}" for place in range(len(module._modules))]


def _stem(module: Any) -> str:
    """What stands before the number in the name of a list's first child."""
    return next(iter(module._modules), "").rstrip("0123456789")


def _first_number(module: Any) -> int:
    """What the name of a list's first child says."""
    number = next(iter(module._modules), "")[len(_stem(module)) :]
    return int(number) if number.isdecimal() else 0


def _inside(name: str, block: Block) -> bool:
    prefix = f"{block.owner}." if block.owner else ""
    if not name.startswith(prefix) or name == block.owner:
        return False
    index = name[len(prefix) :].split(".")[0].removeprefix(block.stem)
    return index.isdecimal() and block.start <= int(index) < block.stop


def _runs(marks: Sequence[str]) -> list[tuple[int, int, int]]:
    """(start, period, repeats) of repeating groups, longest cover first at each place, shortest period on a tie."""
    runs: list[tuple[int, int, int]] = []
    position = 0
    while position < len(marks):
        best = (0, 0, 0)
        for period in range(1, MAX_PERIOD + 1):
            group = marks[position : position + period]
            if len(group) < period or "" in group:
                break
            repeats = 1
            while list(marks[position + repeats * period : position + (repeats + 1) * period]) == list(group):
                repeats += 1
            if repeats > 1 and repeats * period > best[0]:
                best = (repeats * period, period, repeats)
        if best[0]:
            runs.append((position, best[1], best[2]))
            position += best[0]
        else:
            position += 1
    return runs


def _signature(layer: Any, owners: Counter[int], fractions: bool) -> str:
    """A digest of what the layer computes apart from its weights; empty if it cannot be repeated.

    Without `fractions`, fractions among its attributes are not looked at.

    A layer without parameters is not worth a scan, and one that shares a parameter with anything else has no slice
    of its own in a stack.
    """
    digest = hashlib.sha256()
    count = 0
    for name, child in layer.named_modules():
        digest.update(f"|{name}:{type(child).__module__}.{type(child).__qualname__}".encode())
        for key, value in sorted(child.__dict__.items()):
            if not key.startswith("_") and key != "training" and key not in _POSITIONS:
                digest.update(f";{key}={_plain(value if fractions or type(value) is not float else 0.0)}".encode())
        for key, parameter in child._parameters.items():
            if parameter is None:
                continue
            if owners[id(parameter)] > 1:
                return ""
            count += 1
            digest.update(f";{key}:{tuple(parameter.shape)}:{parameter.dtype}".encode())
        for key, buffer in child._buffers.items():
            if buffer is None:
                continue
            digest.update(f";{key}:{tuple(buffer.shape)}:{buffer.dtype}".encode())
            if key in child._non_persistent_buffers_set and buffer.device.type == "cpu":
                digest.update(str(buffer.detach().tolist()).encode())
    return digest.hexdigest() if count else ""


def _plain(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(_plain(item) for item in value) + ")"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return type(value).__qualname__
