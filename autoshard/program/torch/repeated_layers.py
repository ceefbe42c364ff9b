"""Search for repeated layers in a torch module, which then run as one scan over stacked parameters."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.program.torch.layer_differences import Difference, LayerComparison
from autoshard.program.torch.module_mode import is_batch_norm, reads_training


MAX_PERIOD = 4
"""Longest repeating group of unlike layers that is searched for (alternating attention has 2)."""

_POSITIONS = {"layer_idx", "layer_id", "layer_index", "layer_number", "layer_num", "block_idx", "idx", "index"}
"""Attributes that often only number a layer; if code reads one, every layer is traced."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """`repeats` groups of `period` layers of one list; all groups may compute the same."""

    owner: str
    """Name of the list in the module, such as `model.layers`; empty if the module itself is the list."""
    start: int
    """Number of the first layer, as in its name."""
    period: int
    """Number of layers of a group."""
    repeats: int
    """Number of groups, at least two when found by `find_blocks`."""
    length: int
    """Number of layers in the whole list."""
    first: int = 0
    """Number of the list's first layer: a dict may have only layers 16 to 31 of a model."""
    stem: str = ""
    """Text before the number in a layer's name in the list: `layer_` of `layer_0`, `layer_1`."""
    unlike: tuple[tuple[int, Difference], ...] = ()
    """Pairs (offset in a group, attribute) in which groups differ or may differ.

    If a layer's code reads one, the layers' traces are compared.
    """

    @property
    def stop(self) -> int:
        """Number after that of the last layer."""
        return self.start + self.period * self.repeats

    def layer(self, offset: int, repeat: int = 0) -> str:
        """Return the name, in the whole module, of the layer at `offset` (0 to period - 1) of group `repeat`."""
        name = f"{self.stem}{self.start + repeat * self.period + offset}"
        return f"{self.owner}.{name}" if self.owner else name

    def label(self, offset: int) -> str:
        """Return the name of the stack of layers at `offset` of all groups.

        It is `model.layers.*` if the block is the whole list and its period is 1. Else it has a slice with the layers'
        own numbers: `model.layers.[3:61]`, `[0::2]`. The slice's end is empty if the block ends with the list.
        """
        end = self.first + self.length
        is_whole = self.start == self.first and self.stop == end
        if is_whole and self.period == 1:
            text = "*"
        else:
            first = self.start + offset
            last = "" if self.stop == end else str(self.stop)
            text = f"[{first}:{last}:{self.period}]" if self.period > 1 else f"[{first}:{last}]"
        text = f"{self.stem}{text}"
        return f"{self.owner}.{text}" if self.owner else text


def find_blocks(
    module: Any, within: Sequence[Block] = (), computed: Mapping[str, str] | None = None, trained: bool = False
) -> tuple[Block, ...]:
    """Return the blocks of `module`, in the order of `named_modules`; a list inside a block yields none of its own.

    Lists are those of `is_list`, and a `Sequential` whose children are numbered. Layers without a repeated neighbour
    are in no block, so the result may be empty.

    - `within`: if not empty, only lists inside the layers of these blocks are searched.
    - `computed`: digests of some layers' traces by name; layers with different digests, or one without, are unlike.
    - `trained`: if True, layers share a block only if the same parameters require gradients, and the same modules are
      in training mode.
    """
    import torch

    index = _Index(module)
    blocks: list[Block] = []
    for name, child in index.modules.items():
        sequence = isinstance(child, torch.nn.Sequential) and _is_numbered(child)
        if not (is_list(child) or sequence) or within and not any(_inside(name, block) for block in within):
            continue
        if any(_inside(name, block) for block in blocks):
            continue
        blocks += _blocks_of(index, name, child, computed or {}, trained)
    return tuple(blocks)


class _Index:
    """The modules of a module by name, and the modules that own each tensor."""

    def __init__(self, module: Any) -> None:
        """Index a module, its submodules and their tensors."""
        self.modules = dict(module.named_modules())
        self.names = {id(child): name for name, child in self.modules.items()}
        """First name of each module, by `id`."""
        self.holders: dict[int, list[int]] = {}
        """Modules, by `id`, that have a parameter or buffer, by `id`, of their own."""
        for child in self.modules.values():
            for tensor in _own_tensors(child):
                self.holders.setdefault(id(tensor), []).append(id(child))


def _blocks_of(index: _Index, name: str, child: Any, computed: Mapping[str, str], trained: bool) -> list[Block]:
    """Return the blocks of the list `child`, whose name is `name`; `computed` and `trained` are as in `find_blocks`."""
    layers, stem, first = list(child._modules.values()), _stem(child), _first_number(child)
    names = [f"{name}.{key}" if name else key for key in child._modules]
    signatures = _signatures(index, names, layers, trained)
    marks = [f"{mark}{computed.get(layer, '')}" if mark else "" for mark, layer in zip(signatures, names, strict=True)]
    blocks: list[Block] = []
    for start, period, repeats in _runs(marks):
        unlike: dict[tuple[int, Difference], None] = {}
        for offset in range(period):
            group = layers[start + offset : start + period * repeats : period]
            comparison = LayerComparison(group[0])
            for other in group[1:]:
                unlike |= {(offset, each): None for each in comparison.differences(other)}
        blocks.append(Block(name, first + start, period, repeats, len(layers), first, stem, tuple(sorted(unlike))))
    return blocks


def is_list(module: Any) -> bool:
    """Return True for a `ModuleList` or `ModuleDict` whose keys are consecutive numbers after one stem, also if empty.

    A `ModuleDict` may start at any number. A `Sequential` is no list here.
    """
    import torch

    return isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict) and _is_numbered(module)


def _is_numbered(module: Any) -> bool:
    """Return True if the names of a module's children are consecutive numbers after a common stem, or if it has none.

    Leading zeros (`layer_00`) do not count as numbers.
    """
    first, stem = _first_number(module), _stem(module)
    return list(module._modules) == [f"{stem}{first + place}" for place in range(len(module._modules))]


def _stem(module: Any) -> str:
    """Return the text before the trailing number in the name of a list's first child; empty without children."""
    return next(iter(module._modules), "").rstrip("0123456789")


def _first_number(module: Any) -> int:
    """Return the trailing number in the name of a list's first child, or 0 if there is none."""
    number = next(iter(module._modules), "")[len(_stem(module)) :]
    return int(number) if number.isdecimal() else 0


def _inside(name: str, block: Block) -> bool:
    """Return True if the module `name` is a layer of a block or inside one."""
    prefix = f"{block.owner}." if block.owner else ""
    if not name.startswith(prefix) or name == block.owner:
        return False
    index = name[len(prefix) :].split(".")[0].removeprefix(block.stem)
    return index.isdecimal() and block.start <= int(index) < block.stop


def _runs(marks: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return (start, period, repeats) of the runs in which a group of marks repeats at least twice, in order.

    The search is greedy from left to right, with periods up to `MAX_PERIOD`. At each place the run that covers most
    layers wins, and on a tie the one with the shortest period. A layer with an empty mark is in no run.
    """
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


def _signatures(index: _Index, names: Sequence[str], layers: Sequence[Any], trained: bool) -> list[str]:
    """Return a digest for each layer of a list.

    Layers with equal digests may compute the same, apart from their weights. The digest is empty for a layer that
    cannot be repeated: one that stands elsewhere too, or that has no parameter of its own. A tensor that all layers
    of one structure share under one name stays one tensor. A tensor that is shared in another way cannot be stacked,
    so its layer has an empty digest.
    """
    inside = {id(child) for layer in layers for child in layer.modules()}
    owners: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        for tensor in {id(t): t for child in layer.modules() for t in _own_tensors(child)}.values():
            owners.setdefault(id(tensor), []).append(number)
    structures = [_structure(layer, trained) for layer in layers]
    kinds = {mark: [k for k, each in enumerate(structures) if each == mark] for mark in structures}
    ordinals = _ordinals(layers)
    signatures: list[str] = []
    for number, (name, layer, structure) in enumerate(zip(names, layers, structures, strict=True)):
        digest = hashlib.sha256(structure.encode())
        parameters = 0
        repeatable = index.names.get(id(layer)) == name
        for path, child in layer.named_modules():
            for key, value in sorted(child.__dict__.items()):
                if not key.startswith("_") and key != "training" and (path, key) not in ordinals:
                    digest.update(f";{path}:{key}={_plain(0.0 if type(value) is float else value)}".encode())
            for key, tensor in (*child._parameters.items(), *child._buffers.items()):
                if tensor is None:
                    continue
                sharing = owners[id(tensor)]
                if sharing != [number] or not inside.issuperset(index.holders[id(tensor)]):
                    digest.update(f";{path}:{key} is {id(tensor)}".encode())
                    common = len(sharing) > 1 and set(kinds[structure]) <= set(sharing)
                    repeatable = repeatable and common and _stands_at(layers, sharing, path, key, tensor)
                elif key in child._parameters:
                    parameters += 1
        signatures.append(digest.hexdigest() if repeatable and parameters else "")
    return signatures


def _own_tensors(child: Any) -> list[Any]:
    """List the parameters, then the buffers of one module, without those of its children and without None."""
    return [t for t in (*child._parameters.values(), *child._buffers.values()) if t is not None]


def _stands_at(layers: Sequence[Any], sharing: Sequence[int], path: str, key: str, tensor: Any) -> bool:
    """Return True if all layers numbered in `sharing` have `tensor` itself as `key` of their module `path`.

    A layer without that module makes the result False.
    """

    def there(layer: Any) -> Any:
        """Return the tensor of a layer at the path and key, or None."""
        child = layer.get_submodule(path)
        return child._parameters.get(key) if key in child._parameters else child._buffers.get(key)

    try:
        return all(there(layers[number]) is tensor for number in sharing)
    except AttributeError:
        return False


def _ordinals(layers: Sequence[Any]) -> set[Difference]:
    """Return the attributes that only number layers; none for fewer than two layers.

    An attribute counts if its name is in `_POSITIONS` and its values are whole numbers or None. Otherwise it counts if
    it grows by one from layer to layer of the list.
    """
    numbers: dict[Difference, set[Any]] = {}
    for place, layer in enumerate(layers):
        for path, child in layer.named_modules():
            for key, value in child.__dict__.items():
                named = key in _POSITIONS and isinstance(value, int | None)
                offset = "named" if named else value - place if type(value) is int else None
                numbers.setdefault((path, key), set()).add(offset)
    return {
        place for place, offsets in numbers.items() if len(offsets) == 1 and None not in offsets and len(layers) > 1
    }


def _structure(layer: Any, trained: bool) -> str:
    """Return a text that is equal for layers of one structure.

    It has the paths and classes of the modules, and names, shapes and dtypes of parameters and buffers. Values of
    non-persistent buffers on the CPU count too. With `trained` it also tells which parameters require gradients, and
    which modules are in training mode and compute something else there.
    """
    words: list[str] = []
    for name, child in layer.named_modules():
        words.append(f"|{name}:{type(child).__module__}.{type(child).__qualname__}:{id(type(child))}")
        if trained and child.training and (is_batch_norm(child) or reads_training(type(child))):
            words.append(":training")
        for key, parameter in child._parameters.items():
            if parameter is not None:
                gradient = trained and parameter.requires_grad
                words.append(f";{key}:{tuple(parameter.shape)}:{parameter.dtype}:{gradient}")
        for key, buffer in child._buffers.items():
            if buffer is None:
                continue
            words.append(f";{key}:{tuple(buffer.shape)}:{buffer.dtype}")
            if key in child._non_persistent_buffers_set and buffer.device.type == "cpu":
                words.append(hashlib.sha256(str(buffer.detach().tolist()).encode()).hexdigest())
    return "".join(words)


def _plain(value: Any) -> str:
    """Return a text for an attribute's value: plain values by `repr`, tuples and lists alike item by item.

    Functions and classes are described by their qualified name, other objects by their type's.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(_plain(item) for item in value) + ")"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return type(value).__qualname__
