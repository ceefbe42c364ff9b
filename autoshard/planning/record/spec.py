"""Specs of tensors: the mesh axes that split each dim, and names of parameters that stack repeated layers."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


# The name of a part from `part_names`: the axis, the size of the part, the size of the axis.
_PART = re.compile(r"(.+)\((\d+) of (\d+)(?:, (?:outer|inner))?\)")


def part_names(axis: str, sizes: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the two parts that replace a mesh axis, outer first: `model(8 of 16)` and `model(2 of 16)`.

    Parts of equal size are `model(4 of 16, outer)` and `model(4 of 16, inner)`.
    """
    total = math.prod(sizes)
    marks = ("", "") if len(set(sizes)) == len(sizes) else (", outer", ", inner")
    return tuple(f"{axis}({size} of {total}{mark})" for size, mark in zip(sizes, marks, strict=True))


def axis_words(axes: Sequence[str]) -> tuple[str, ...]:
    """Return axes for readers: two neighbouring parts that make a whole axis become that axis; others stay."""
    words: list[str] = []
    for axis in axes:
        match, before = _PART.fullmatch(axis), _PART.fullmatch(words[-1]) if words else None
        if match and before and match[1] == before[1] and int(match[2]) * int(before[2]) == int(match[3]):
            words[-1] = match[1]
        else:
            words.append(axis)
    return tuple(words)


def original_mesh(mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the mesh as the user wrote it, with the parts of a refined axis joined."""
    sizes: dict[str, int] = {}
    for axis, size in mesh.items():
        match = _PART.fullmatch(axis)
        sizes[match[1] if match else axis] = int(match[3]) if match else size
    return sizes


def mesh_words(mesh: Mapping[str, int]) -> str:
    """Return a mesh as `data=16, model=16`, and as `data=16, model=16 as 8x2` if two parts replace an axis."""
    parts = {axis: [] for axis in original_mesh(mesh)}
    for axis, size in mesh.items():
        match = _PART.fullmatch(axis)
        parts[match[1] if match else axis].append(size)
    words = (
        f"{axis}={math.prod(p)}" + (f" as {'x'.join(map(str, p))}" if len(p) > 1 else "") for axis, p in parts.items()
    )
    return ", ".join(words)


# One dim in `spec_text`: a size or `*`, then the axes after slashes.
_SIZED = re.compile(r"(\d+|\*)(?:/(.+))?")


def spec_text(spec: "Spec", shape: Sequence[int] | None = None) -> str:
    """Return a spec as reports print it and pins accept it: `4096/data x 14336`, or `4096/data/model` for two axes on
    one dim.

    Parts of an axis are joined as in `axis_words`. Without `shape`, unknown sizes are printed as `*/data x *`. A tensor
    without dims is `scalar`.
    """
    sizes = ["*"] * len(spec.dims) if shape is None else [str(size) for size in shape]
    dims = zip(sizes, spec.dims, strict=True)
    return " x ".join("/".join((size, *axis_words(axes))) for size, axes in dims) or "scalar"


def parse_spec_text(text: str) -> tuple[tuple[int | None, tuple[str, ...]], ...] | None:
    """Return the size (None for `*`) and the axes of every dim in the text of `spec_text`; None for text of another
    form.

    A lone `*` yields None too, and `scalar` yields `()`.
    """
    if text.strip() == "scalar":
        return ()
    matches = [_SIZED.fullmatch(part.strip()) for part in re.split(r"\sx\s", text)]
    if not all(matches) or not ("/" in text or len(matches) > 1 or text.strip().isdigit()):
        return None
    return tuple(
        (None if match[1] == "*" else int(match[1]), tuple(match[2].split("/")) if match[2] else ())
        for match in matches
        if match is not None
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """Mesh axes that split each dim of one tensor, major axis first; `()` leaves a dim whole."""

    dims: tuple[tuple[str, ...], ...]

    @classmethod
    def replicated(cls, rank: int) -> "Spec":
        """Return the spec of a tensor with `rank` dims that is whole on every device."""
        return cls(((),) * rank)

    @classmethod
    def from_json(cls, value: Sequence[Sequence[str]]) -> "Spec":
        """Return the spec from the value of `to_json`: the names of the axes for each dim."""
        return cls(tuple(tuple(axes) for axes in value))

    def to_json(self) -> list[list[str]]:
        """Return for each dim the names of the axes that split it, major first."""
        return [list(axes) for axes in self.dims]

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that split the tensor, dim by dim."""
        return tuple(axis for dim in self.dims for axis in dim)

    def of_rank(self, rank: int) -> "Spec":
        """Return the spec of the first `rank` dims, with whole dims appended if there are fewer.

        A typed PRNG key is one element to JAX and a vector of words in the module; the words are never split.
        """
        return Spec((*self.dims, *((),) * (rank - len(self.dims)))[:rank])

    def shards(self, sizes: Mapping[str, int]) -> int:
        """Return the number of different shards on a mesh with the given axis sizes."""
        return math.prod(sizes[axis] for axis in self.axes)

    def local_shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of one device's shard; a dim that its axes do not divide is rounded up.

        - `shape`: shape of the whole tensor, as many dims as the spec.
        - `sizes`: size of each mesh axis.
        """
        return tuple(-(-dim // math.prod(sizes[a] for a in axes)) for dim, axes in zip(shape, self.dims, strict=True))

    def partition_spec(self) -> Any:
        """Return the spec as a `jax.sharding.PartitionSpec`, without the whole dims at its end."""
        from jax.sharding import PartitionSpec

        entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in self.dims]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def __str__(self) -> str:
        """Return the axes of each dim for readers, as in `[data, -, dataxmodel]`; `-` is a whole dim."""
        return "[" + ", ".join("x".join(axis_words(axes)) if axes else "-" for axes in self.dims) + "]"


# A number that is a whole part of a name between `.`, `[`, `]`, `/` and `_`, and a slice such as `[3:61]`.
_NUMBER = re.compile(r"(?<![^.\[\]/_])\d+(?![^.\[\]/_])")
# A number at the end of a word, as in `h0.up`.
_ATTACHED = re.compile(r"(?<=[A-Za-z])\d+(?![^.\[\]/_])")
_SLICE = re.compile(r"\[(\d*):(\d*)(?::(\d*))?\]")


def is_stacked(name: str) -> bool:
    """Return True if a part of the dotted name is `*` or a slice such as `[3:61]`.

    Such a name is that of a stack of layers, whose first dim counts the layers.
    """
    return any(part == "*" or _SLICE.fullmatch(part) for part in name.split("."))


def without_slices(name: str) -> str:
    """Return a name with `*` for each slice such as `[3:61]`."""
    return _SLICE.sub("*", name)


def layer_pattern(name: str, layers: int) -> str:
    """Return a regular expression for the parameter names of the single layers, anchored only at its end.

    `name` is the dotted name of a stack. A `*` matches any number. A slice such as `[3:61]` matches the numbers of its
    `layers` layers only.
    """
    parts = []
    for part in name.split("."):
        match = _SLICE.fullmatch(part)
        if match:
            start, step = int(match[1] or 0), int(match[3] or 1)
            parts.append(f"(?:{'|'.join(str(start + step * k) for k in range(layers))})")
        else:
            parts.append(r"\d+" if part == "*" else re.escape(part))
    return r"\.".join(parts) + "$"


def pattern(name: str) -> str:
    """Return a name with `*` for every number between separators (`.`, `[`, `]`, `/`, `_`), as layers share it.

    `layers.3.mlp.weight` becomes `layers.*.mlp.weight`; the number in `fc1` stays.
    """
    return _NUMBER.sub("*", name)


LEAST_NUMBERED = 3
"""Least names that differ in a number at the end of a word alone for that number to count layers: `fc1` and `fc2` are
two layers of one module.
"""


def patterns(names: Iterable[str]) -> dict[str, str]:
    """Return the pattern of each name, in which `*` also replaces the number in `h0`, `h1` and `h2`.

    Such a number at the end of a word counts layers if at least `LEAST_NUMBERED` of the names differ in it alone.
    """
    shared = {name: pattern(name) for name in names}
    places = defaultdict[str, set[str]](set)
    for name in set(shared.values()):
        for number in _ATTACHED.finditer(name):
            places[f"{name[: number.start()]}*{name[number.end() :]}"].add(number[0])

    def folded(name: str) -> str:
        """Return a name with `*` for each number that counts layers."""
        parts, end = [], 0
        for number in _ATTACHED.finditer(name):
            counts = len(places[f"{name[: number.start()]}*{name[number.end() :]}"]) >= LEAST_NUMBERED
            parts += [name[end : number.start()], "*" if counts else number[0]]
            end = number.end()
        return "".join(parts) + name[end:]

    return {name: folded(shown) for name, shown in shared.items()}


def stack_names(name: str, layers: int) -> list[str]:
    """Return names with `*` as the only wildcard: a name with a slice becomes one name for each of its `layers`.

    A name without a slice is returned alone, unchanged.
    """
    names = [""]
    for part in name.split("."):
        match = _SLICE.fullmatch(part)
        start, step = (int(match[1] or 0), int(match[3] or 1)) if match else (0, 1)
        parts = [str(start + step * k) for k in range(layers)] if match else [part]
        names = [f"{ahead}.{each}" if ahead else each for ahead in names for each in parts]
    return names
