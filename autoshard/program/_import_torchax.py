"""The import of torch and torchax, in versions that fit one another."""

import contextlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from autoshard.base.tested import known_versions, minor_of, newer_than_tested
from autoshard.errors import UserError, reason_of


_OLDEST = (2, 9)
"""Minor version of torch that the lowerings need at least."""


def require_torch(*others: str) -> None:
    """Raise `UserError` if torch, torchax or one of the `others` is missing, or torch is too old."""
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
    """Return a clause that says that torch is newer than the tested ones; empty if it is not."""
    version = _torch_version()
    if not newer_than_tested("torch", version):
        return ""
    return f"; torch {version} is newer than the tested versions {known_versions('torch')}, which may be why"


@contextlib.contextmanager
def importing_torchax() -> Iterator[None]:
    """Let torchax be imported, while inside, though its tables name overloads that this torch has removed.

    Raises `UserError` if torchax does not load for another reason.
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


def _torch_version() -> str:
    import torch

    return str(torch.__version__)
