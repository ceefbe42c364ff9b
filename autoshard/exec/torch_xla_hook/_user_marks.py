"""Which tensors the script has sharded itself: all other splits are ours, or follow from ours."""

import functools
from collections.abc import Iterable
from typing import Any

from autoshard.exec.torch_xla_hook._marks import held_spec, is_split
from autoshard.exec.torch_xla_hook._tensors import handles, on_xla, pending, plain
from autoshard.exec.torch_xla_hook._xlac import xlac


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
