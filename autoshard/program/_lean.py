"""Importing model code without packages that it takes in wherever they are installed, and that no program here needs.

transformers imports accelerate, which imports torch_xla and with it all of torch's compilers, and scipy's optimisers:
together a third of the imports' time.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType


_UNNEEDED = ("accelerate", "scipy")
_lean = False


def import_lean() -> None:
    """From now on leave out of `hf:` models' imports what they do not need.

    For a process that runs one command: transformers remembers for good that the packages are not there.
    """
    global _lean
    _lean = True


def import_model_code(name: str) -> ModuleType:
    """The module of that name; lean, if `import_lean` was called."""
    if not _lean:
        return importlib.import_module(name)
    try:
        with _hidden():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in _UNNEEDED:
            raise
        return importlib.import_module(name)  # it cannot do without after all


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    """Inside, the packages cannot be imported; one that is here already stays."""
    hidden = [name for name in _UNNEEDED if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # says that there is no such module
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
