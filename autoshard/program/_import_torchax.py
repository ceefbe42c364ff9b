"""The import of torchax, whose tables name overloads that newer releases of torch have removed."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def removed_overloads() -> Iterator[None]:
    """Give torchax, while inside, an object that equals no operation for each overload that this torch lacks.

    torchax 0.0.13 lists overloads by attribute (`torch.ops.aten.prod.dim_Dimname`); torch 2.13 has no named tensors.
    """
    from torch._ops import OpOverloadPacket

    packet: Any = OpOverloadPacket
    look_up = packet.__getattr__

    def lenient(self: Any, name: str) -> Any:
        try:
            return look_up(self, name)
        except AttributeError:
            # Other code asks packets for attributes to find out what they are.
            asking = sys._getframe(1).f_globals.get("__name__", "")
            if name.startswith("_") or asking.partition(".")[0] != "torchax":
                raise
            return object()

    packet.__getattr__ = lenient
    try:
        yield
    finally:
        packet.__getattr__ = look_up
