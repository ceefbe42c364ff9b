"""PyTorch/XLA's extension module: everything that has no public Python interface goes through here."""

import functools
import importlib
from typing import Any


@functools.cache  # asked for each tensor of every step
def xlac() -> Any:
    """`torch_xla._XLAC`."""
    return importlib.import_module("torch_xla")._XLAC
