"""Specs on live tensors: the plan's mesh for PyTorch/XLA, our marks, and the script's own."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.values.lazy_tensors import handles, on_xla, pending, plain, xlac
from autoshard.planning import Spec, hlo_sharding, parse_hlo_sharding


class LiveMesh:
    """A mesh over the devices that are here, and specs on it in PyTorch/XLA's own records.

    `devices` are PyTorch/XLA's device numbers, row-major over the mesh.
    """

    def __init__(self, sizes: Mapping[str, int], devices: Sequence[int]) -> None:
        self.sizes = dict(sizes)
        self.devices = tuple(devices)
        self._shardings: dict[Spec, Any] = {}

    @functools.cached_property
    def mesh(self) -> Any:
        """`torch_xla.distributed.spmd.Mesh`."""
        import torch_xla.distributed.spmd as xs

        return xs.Mesh(np.array(self.devices), tuple(self.sizes.values()), tuple(self.sizes))

    def sharding(self, spec: Spec) -> Any:
        """`_XLAC.OpSharding` of a spec; the same object for the same spec."""
        if spec not in self._shardings:
            self._shardings[spec] = self.mesh.get_op_sharding(partition(spec))
        return self._shardings[spec]

    def write(self, spec: Spec) -> str:
        """The HLO sharding string of a spec."""
        return hlo_sharding(spec, self.sizes, self.devices)

    def read(self, text: str, rank: int) -> Spec | None:
        """The spec of an HLO sharding string; None if this mesh cannot express it."""
        try:
            return parse_hlo_sharding(text, rank, self.sizes, self.devices)
        except UserError:
            return None

    def read_dims(self, text: str, rank: int) -> tuple[tuple[str, ...], ...] | None:
        spec = self.read(text, rank)
        return None if spec is None else spec.dims


def partition(spec: Spec) -> tuple[Any, ...]:
    """A spec as PyTorch/XLA's partition spec: axis names, None, or tuples of names."""
    return tuple(axes[0] if len(axes) == 1 else axes if axes else None for axes in spec.dims)


def mark(tensor: Any, sharding: Any) -> None:
    """Shard a tensor in place (data: moved; pending: constrained). A scalar, or what is so sharded, is left alone."""
    _own("_xla_mark_sharding")(tensor, sharding)


def unmark(tensor: Any) -> None:
    """Have every device hold the whole of a tensor's data again."""
    _own("_xla_clear_sharding")(tensor)


def _own(name: str) -> Any:
    """PyTorch/XLA's own function, where one that records what scripts do stands in for it."""
    function = getattr(xlac(), name)
    return getattr(function, "__wrapped__", function)


def constrain(tensor: Any, shardings: Sequence[Any]) -> None:
    """Constrain a pending value to one sharding after the other; it keeps the last."""
    *before, last = shardings
    for sharding in before:
        xlac()._xla_annotate_custom_sharding(tensor, sharding)
    mark(tensor, last)


def annotated(tensor: Any, shardings: Sequence[Any]) -> Any:
    """The value of a pending tensor in these shardings, one after the other; the tensor keeps its own."""
    import torch

    value = torch.clone(tensor)
    for sharding in shardings:
        xlac()._xla_annotate_custom_sharding(value, sharding)
    return value


def held_spec(tensor: Any) -> str:
    """The tensor's HLO sharding string; empty if it has none yet."""

    return xlac()._get_xla_sharding_spec(tensor)


def is_split(text: str) -> bool:
    """Whether an HLO sharding string splits anything."""
    return text.startswith("{devices=")


class UserMarks:
    """The tensors that are marked through PyTorch/XLA's functions, which our own marks go past."""

    def __init__(self) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self.tensors: Any = WeakTensorKeyDictionary()

    def record(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            self.tensors[plain(tensor)] = None

    def holds(self, tensor: Any) -> bool:
        return tensor in self.tensors

    def data(self) -> set[int]:
        """Handles of the device data of those that are not pending."""
        known = [tensor for tensor in self.tensors if on_xla(tensor)]
        waiting = pending(known)
        return set(handles([tensor for tensor, waits in zip(known, waiting, strict=True) if not waits]))

    def watch(self) -> None:
        """Stand in for the functions that a script marks with, until the process ends."""
        extension = xlac()
        mark, clear = extension._xla_mark_sharding, extension._xla_clear_sharding

        @functools.wraps(mark)
        def recorded_mark(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            ours = not self.holds(plain(tensor)) and is_split(held_spec(tensor))
            self.record([tensor])
            try:
                return mark(tensor, *args, **kwargs)
            except RuntimeError:
                if not ours:
                    raise
            clear(tensor)  # the script knows nothing of how a plan has split it
            return mark(tensor, *args, **kwargs)

        @functools.wraps(clear)
        def recorded_clear(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.tensors.pop(plain(tensor), None)
            return clear(tensor, *args, **kwargs)

        extension._xla_mark_sharding, extension._xla_clear_sharding = recorded_mark, recorded_clear
