"""Imports of torch, torchax and model code, and construction of modules without their weights."""

import contextlib
import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from autoshard.base.tested_versions import known_versions, minor_of, newer_than_tested
from autoshard.errors import UserError, reason_of


_OLDEST = (2, 9)
"""Oldest minor version of torch that the lowerings support."""


def require_torch(*others: str) -> None:
    """Raise `UserError` if torch, torchax or one of the packages `others` is missing, or if torch is older than
    `_OLDEST`.
    """
    missing = [name for name in ("torch", "torchax", *others) if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"torch modules and `hf:` models need packages that are not installed ({', '.join(missing)}): "
            f"pip install {' '.join(missing)}."
        )
    version = _torch_version()
    if minor_of(version) < _OLDEST:
        raise UserError(
            f"torch {version} is too old for torch modules and `hf:` models, which need torch "
            f"{'.'.join(map(str, _OLDEST))} or newer (tested: {known_versions('torch')}): pip install --upgrade torch."
        )


def untested_torch() -> str:
    """Return a clause for messages if torch is newer than the tested versions, else an empty text; imports torch."""
    version = _torch_version()
    if not newer_than_tested("torch", version):
        return ""
    return f"; torch {version} is newer than the tested versions {known_versions('torch')}, which may be why"


@contextlib.contextmanager
def importing_torchax() -> Iterator[None]:
    """Allow imports of torchax while inside, even if its tables name overloads that this torch has removed.

    Raises `UserError` if an `AttributeError` or `ImportError` leaves the context for another reason.
    """
    try:
        with _removed_overloads():
            yield
    except (AttributeError, ImportError) as error:
        version, known = _torch_version(), known_versions("torch")
        raise UserError(
            f"torchax {importlib.metadata.version('torchax')} cannot be loaded with torch {version} "
            f"({type(error).__name__}: {reason_of(error)}): install a tested torch ({known}) or another torchax."
        ) from error


@contextlib.contextmanager
def _removed_overloads() -> Iterator[None]:
    """Give torchax, while inside, a placeholder for each overload that this torch lacks; it equals no operation.

    Code outside of torchax still gets the `AttributeError`. torchax 0.0.13 lists overloads by attribute
    (`torch.ops.aten.prod.dim_Dimname`); torch 2.13 has no named tensors.
    """
    from torch._ops import OpOverloadPacket

    packet: Any = OpOverloadPacket
    look_up = packet.__getattr__

    def lenient(self: Any, name: str) -> Any:
        """Return the overload, or a new object if torchax asks for a removed one."""
        try:
            return look_up(self, name)
        except AttributeError:
            # Other code probes packets for attributes, so that only torchax may get a placeholder.
            asking = sys._getframe(1).f_globals.get("__name__", "")
            if name.startswith("_") or asking.partition(".")[0] != "torchax":
                raise
            return object()

    packet.__getattr__ = lenient
    try:
        yield
    finally:
        packet.__getattr__ = look_up


def _torch_version() -> str:
    """Return the version of the installed torch, such as `2.9.1+cpu`."""
    import torch

    return str(torch.__version__)


# Optional packages of transformers that `hf:` models do not need.
_UNNEEDED = ("accelerate", "scipy")
_lean = False


def import_lean() -> None:
    """Exclude packages that are not needed from all later imports of `hf:` models.

    Only for a process that runs one command: transformers remembers for good that the packages are missing.
    """
    global _lean
    _lean = True


def import_model_code(name: str) -> ModuleType:
    """Import and return the module `name`, without unneeded packages if `import_lean` was called.

    If the module needs one of these packages, it is imported with them.
    """
    if not _lean:
        return importlib.import_module(name)
    try:
        with _hidden():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in _UNNEEDED:
            raise
        return importlib.import_module(name)  # the module needs a hidden package


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    """Prevent imports of the unneeded packages while inside; packages that are already imported stay."""
    hidden = [name for name in _UNNEEDED if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # makes imports of it fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


_LARGE = 1 << 20
"""Number of elements above which a filled tensor goes to the meta device: only weights are that large."""

_ZEROS = 1 << 26
"""The same limit for zeros, which use no memory until written: position tables are filled from zeros."""


def build(make: Callable[[], Any]) -> Any:
    """Return `make()`, run with weights on the meta device.

    Uninitialised and random tensors have no useful values and go to the meta device. So do tensors filled with one
    value above `_LARGE` elements, or `_ZEROS` for zeros. Small tensors with computed values (rotary frequencies,
    position ids) stay real, so that they can be constants of the program.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    shapeless = {torch.empty, torch.rand, torch.randn, torch.empty_strided, torch.normal}
    filled = {torch.ones: _LARGE, torch.zeros: _ZEROS, torch.full: _LARGE}

    class WeightsOnMeta(TorchFunctionMode):
        """Mode of torch that redirects constructors of weights to the meta device."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func in shapeless or (func in filled and _elements(args, kwargs) > filled[func]):
                kwargs["device"] = "meta"
            return func(*args, **kwargs)

    with WeightsOnMeta():
        return make()


def _elements(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of elements that a constructor such as `torch.ones` is called for.

    The size may be a tuple or several numbers, positional or as `size`.
    """
    size = kwargs.get("size", args[0] if args else ())
    if not isinstance(size, (tuple, list)):  # separate sizes, or one size
        size = tuple(int(a) for a in args) or (int(size),)
    return math.prod(int(each) for each in size)
