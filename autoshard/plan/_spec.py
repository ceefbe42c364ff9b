"""How one tensor is split: mesh axes for each of its dims."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """Mesh axes that split each dim of one tensor, major axis first; `()` leaves a dim whole."""

    dims: tuple[tuple[str, ...], ...]

    @classmethod
    def replicated(cls, rank: int) -> "Spec":
        return cls(((),) * rank)

    @classmethod
    def from_json(cls, value: Sequence[Sequence[str]]) -> "Spec":
        return cls(tuple(tuple(axes) for axes in value))

    def to_json(self) -> list[list[str]]:
        return [list(axes) for axes in self.dims]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for dim in self.dims for axis in dim)

    def shards(self, sizes: Mapping[str, int]) -> int:
        """Number of different shards on a mesh with the given axis sizes."""
        return math.prod(sizes[axis] for axis in self.axes)

    def local_shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one device's shard, padded up where a dim does not divide."""
        return tuple(-(-dim // math.prod(sizes[a] for a in axes)) for dim, axes in zip(shape, self.dims, strict=True))

    def partition_spec(self) -> Any:
        """The same as `jax.sharding.PartitionSpec`."""
        from jax.sharding import PartitionSpec

        entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in self.dims]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def __str__(self) -> str:
        return "[" + ", ".join("x".join(axes) if axes else "-" for axes in self.dims) + "]"
