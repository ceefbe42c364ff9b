"""Specs on live tensors: the plan's mesh for PyTorch/XLA, our marks, and the script's own."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.values.lazy_tensors import handles, on_xla, pending, plain, xlac
from autoshard.planning import Spec, hlo_sharding, parse_hlo_sharding


class LiveMesh:
    """A mesh over the devices of the runtime, and the shardings of specs on it in PyTorch/XLA's records.

    `sizes` are sizes by axis, in order; `devices` are PyTorch/XLA's device numbers, row-major over the mesh.
    """

    def __init__(self, sizes: Mapping[str, int], devices: Sequence[int]) -> None:
        self.sizes = dict(sizes)
        self.devices = tuple(devices)
        self._shardings: dict[Spec, Any] = {}

    @functools.cached_property
    def mesh(self) -> Any:
        """The mesh as a `torch_xla.distributed.spmd.Mesh`."""
        import torch_xla.distributed.spmd as xs

        return xs.Mesh(np.array(self.devices), tuple(self.sizes.values()), tuple(self.sizes))

    def sharding(self, spec: Spec) -> Any:
        """Return the `_XLAC.OpSharding` of a spec; the same object for the same spec."""
        if spec not in self._shardings:
            self._shardings[spec] = self.mesh.get_op_sharding(partition(spec))
        return self._shardings[spec]

    def write(self, spec: Spec) -> str:
        """Return the HLO sharding string of a spec on this mesh, such as `{devices=[2,1]0,1}`."""
        return hlo_sharding(spec, self.sizes, self.devices)

    def divides(self, spec: Spec, shape: Sequence[int]) -> bool:
        """Return True if the axes of each dim of a spec divide the dim's size."""
        parts = (math.prod(self.sizes[axis] for axis in axes) for axes in spec.dims)
        return all(size % count == 0 for size, count in zip(shape, parts, strict=True))

    def read(self, text: str, rank: int) -> Spec | None:
        """Parse the HLO sharding string of a tensor of `rank` dims into a spec; None if this mesh cannot express it."""
        try:
            return parse_hlo_sharding(text, rank, self.sizes, self.devices)
        except UserError:
            return None

    def read_dims(self, text: str, rank: int) -> tuple[tuple[str, ...], ...] | None:
        """Parse an HLO sharding string of `rank` dims into mesh axes per dim; None if this mesh cannot express it."""
        spec = self.read(text, rank)
        return None if spec is None else spec.dims


def partition(spec: Spec) -> tuple[Any, ...]:
    """Convert a spec to PyTorch/XLA's partition spec: for each dim an axis name, a tuple of names, or None if
    unsplit.
    """
    return tuple(axes[0] if len(axes) == 1 else axes if axes else None for axes in spec.dims)


def mark(tensor: Any, sharding: Any) -> None:
    """Shard a tensor in place by an `_XLAC.OpSharding`: move its data, or constrain it if it is pending.

    PyTorch/XLA skips scalars and tensors with this sharding. The script's record of marks does not change.
    """
    _own("_xla_mark_sharding")(tensor, sharding)


def unmark(tensor: Any) -> None:
    """Replicate a tensor's data on every device again, and remove its sharding."""
    _own("_xla_clear_sharding")(tensor)


def _own(name: str) -> Any:
    """Return a function of `torch_xla._XLAC` by name, even if a wrapper that records a script's marks has
    replaced it.
    """
    function = getattr(xlac(), name)
    return getattr(function, "__wrapped__", function)


def constrain(tensor: Any, shardings: Sequence[Any]) -> None:
    """Apply shardings, at least one, to a pending value in order; the last becomes the tensor's own sharding."""
    *before, last = shardings
    for sharding in before:
        xlac()._xla_annotate_custom_sharding(tensor, sharding)
    mark(tensor, last)


def annotated(tensor: Any, shardings: Sequence[Any]) -> Any:
    """Return a copy of a pending tensor that is constrained to these shardings in order; `tensor` keeps its own
    sharding.
    """
    import torch

    value = torch.clone(tensor)
    for sharding in shardings:
        xlac()._xla_annotate_custom_sharding(value, sharding)
    return value


def sharding_text(tensor: Any) -> str:
    """Return the tensor's HLO sharding string; empty if it has none yet."""

    return xlac()._get_xla_sharding_spec(tensor)


def is_split(text: str) -> bool:
    """Return True if an HLO sharding string splits any dim: it begins with `{devices=`."""
    return text.startswith("{devices=")


class UserMarks:
    """The tensors that a script marks through PyTorch/XLA's functions; our own marks bypass these functions."""

    def __init__(self) -> None:
        from torch.utils.weak import WeakTensorKeyDictionary

        self.tensors: Any = WeakTensorKeyDictionary()

    def record(self, tensors: Iterable[Any]) -> None:
        """Add tensors to the record."""
        for tensor in tensors:
            self.tensors[plain(tensor)] = None

    def holds(self, tensor: Any) -> bool:
        """Return True if the script marked this very tensor, given without its `XLAShardedTensor`."""
        return tensor in self.tensors

    def data(self) -> set[int]:
        """Return handles of the device data of the marked live tensors that are not pending."""
        known = [tensor for tensor in self.tensors if on_xla(tensor)]
        waiting = pending(known)
        return set(handles([tensor for tensor, waits in zip(known, waiting, strict=True) if not waits]))

    def watch(self) -> None:
        """Wrap PyTorch/XLA's functions that mark and clear, so that they record or forget the script's tensors.

        The wrappers stay until the process ends.
        """
        extension = xlac()
        mark, clear = extension._xla_mark_sharding, extension._xla_clear_sharding

        @functools.wraps(mark)
        def recorded_mark(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            """Mark a tensor for the script and record it; replace our own split if PyTorch/XLA rejects a second mark.

            If the split is not ours, PyTorch/XLA's RuntimeError passes through.
            """
            ours = not self.holds(plain(tensor)) and is_split(sharding_text(tensor))
            self.record([tensor])
            try:
                return mark(tensor, *args, **kwargs)
            except RuntimeError:
                if not ours:
                    raise
            clear(tensor)  # the script does not know the plan's split
            return mark(tensor, *args, **kwargs)

        @functools.wraps(clear)
        def recorded_clear(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            """Remove a tensor from the record, then clear its sharding."""
            self.tensors.pop(plain(tensor), None)
            return clear(tensor, *args, **kwargs)

        extension._xla_mark_sharding, extension._xla_clear_sharding = recorded_mark, recorded_clear
