"""Attributes in which layers of one kind differ, and detection of code that reads them.

A layer whose code reads no attribute that differs computes the same as the others. Layers that read one are traced and
compared.
"""

import contextlib
import enum
import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from autoshard.program.torch.module_state import reachable


Difference = tuple[str, str]
"""Path of a module within its layer, and the name of one of its attributes."""

_COMPARED_ELEMENTS = 1 << 16
"""Largest number of elements of a tensor or array that is compared by value."""

# Attributes of every module that torch manages; the layers' structure is compared elsewhere.
_REGISTERED = {"_parameters", "_buffers", "_modules", "training"}
_LOOKS = (os.path.join("torch", "nn", "modules", "module.py"), os.path.dirname(os.path.dirname(__file__)))
"""Path end and path prefix of the files that may read a module's `__dict__` without computing from it."""


class LayerComparison:
    """Comparison of the layer `first` with other layers of its list that have the same structure."""

    def __init__(self, first: Any) -> None:
        """Store the layer with which others are compared."""
        self.first = first
        self.modules = dict(first.named_modules())
        self.own = {id(child.__dict__) for child in first.modules()}
        self.apart: dict[int, bool] = {}
        """True for each object, by `id`, from which no module of `first` can be reached."""

    def differences(self, other: Any) -> set[Difference]:
        """Return every attribute of the modules of `first` or `other` that is not known to be equal in both.

        Parameters, buffers and submodules are not compared.
        """
        theirs = dict(other.named_modules())
        pairs = {id(child): theirs[path] for path, child in self.modules.items()}
        unlike: set[Difference] = set()
        for path, child in self.modules.items():
            mine, its = child.__dict__, theirs[path].__dict__
            for key in mine.keys() | its.keys():
                if key in _REGISTERED:
                    continue
                if key not in mine or key not in its:
                    unlike.add((path, key))
                elif not _Pair(pairs, self.is_apart).equal(_plain(key, mine), _plain(key, its)):
                    unlike.add((path, key))
        return unlike

    def is_apart(self, value: Any) -> bool:
        """Return True if no module of `first` can be reached from an object, through attributes and references."""
        if isinstance(value, _ATOMS):
            return True
        if id(value) not in self.apart:
            self.apart[id(value)] = not any(id(each) in self.own for each in reachable(value))
        return self.apart[id(value)]


# Types of objects from which no module can be reached.
_ATOMS = (str, int, float, complex, bytes, type(None), type, types.BuiltinFunctionType, types.ModuleType)


def _plain(key: str, held: dict[str, Any]) -> Any:
    """Return an attribute's value, or for a module's hooks the functions alone.

    The keys of hooks are counters of the process, and so differ between equal layers.
    """
    value = held[key]
    return list(value.values()) if key.startswith("_") and "hooks" in key and isinstance(value, dict) else value


class _Pair:
    """Comparison of two objects by their whole content; equal only if the equality is certain."""

    def __init__(self, pairs: dict[int, Any], is_apart: Callable[[Any], bool]) -> None:
        """Store the corresponding modules of the two objects.

        `pairs` maps the `id` of each module of the first object to its counterpart in the second. An object that
        belongs to both equals itself only if it `is_apart` from the modules of the first.
        """
        self.pairs, self.is_apart = pairs, is_apart
        self.assumed: set[tuple[int, int]] = set()

    def equal(self, a: Any, b: Any) -> bool:
        """Return True if two values are known to be equal; cycles are assumed to be equal where they close.

        Types must be the same. Large or remote tensors and objects with a state that Python does not see count as
        unequal.
        """
        import numpy as np
        import torch

        if a is b:
            return self.is_apart(a)
        if type(a) is not type(b):
            return False
        if id(a) in self.pairs:
            return self.pairs[id(a)] is b
        if isinstance(a, type | types.ModuleType | types.BuiltinFunctionType | enum.Enum | torch.dtype | torch.device):
            return isinstance(a, torch.device) and a == b
        if isinstance(a, bool | int | float | complex | str | bytes | range | slice):
            return repr(a) == repr(b)
        if isinstance(a, torch.Tensor):
            return _same_tensor(a, b)
        if isinstance(a, np.ndarray | np.generic):
            same = a.dtype == b.dtype and a.shape == b.shape and a.size <= _COMPARED_ELEMENTS
            return same and a.dtype != object and a.tobytes() == b.tobytes()
        if (id(a), id(b)) in self.assumed:
            return True
        self.assumed.add((id(a), id(b)))
        return self._contents(a, b)

    def _contents(self, a: Any, b: Any) -> bool:
        """Compare functions, containers and objects by their parts and attributes."""
        if isinstance(a, types.FunctionType):
            return a.__code__ == b.__code__ and self._all(_parts(a), _parts(b))
        if isinstance(a, types.MethodType):
            return self._all((a.__func__, a.__self__), (b.__func__, b.__self__))
        if isinstance(a, functools.partial):
            return self._all((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
        if isinstance(a, tuple | list):
            return len(a) == len(b) and self._all(a, b) and self._attributes(a, b)
        if isinstance(a, dict):
            return len(a) == len(b) and self._all((*a, *a.values()), (*b, *b.values())) and self._attributes(a, b)
        if isinstance(a, set | frozenset):
            return sorted(map(repr, a)) == sorted(map(repr, b)) and a == b
        if isinstance(a, types.SimpleNamespace):
            return self._attributes(a, b)
        kind = type(a)
        ways = ("__reduce_ex__", "__reduce__", "__getstate__")
        if any(getattr(kind, way) is not getattr(object, way) for way in ways):
            return False  # the custom state may be incomplete
        try:
            return self.equal(a.__reduce_ex__(2)[2], b.__reduce_ex__(2)[2])
        except TypeError:  # state that only C code sees
            return False

    def _attributes(self, a: Any, b: Any) -> bool:
        """Compare two objects by their `__dict__` alone."""
        mine, its = getattr(a, "__dict__", {}), getattr(b, "__dict__", {})
        return mine.keys() == its.keys() and self._all(mine.values(), (its[key] for key in mine))

    def _all(self, mine: Iterable[Any], its: Iterable[Any]) -> bool:
        """Return True if all pairs of values are known to be equal."""
        return all(self.equal(x, y) for x, y in zip(mine, its, strict=True))


def _parts(function: Any) -> tuple[Any, ...]:
    """Return the globals, defaults, closure values and attributes of a function."""
    cells = tuple(getattr(cell, "cell_contents", None) for cell in function.__closure__ or ())
    return function.__globals__, function.__defaults__, function.__kwdefaults__, cells, function.__dict__


def _same_tensor(a: Any, b: Any) -> bool:
    """Return True if two tensors on the host are small and equal in shape, dtype, gradient flag and values.

    Tensors on other devices count as unequal.
    """
    import torch

    if (a.shape, a.dtype, a.device, a.requires_grad) != (b.shape, b.dtype, b.device, b.requires_grad):
        return False
    return a.device.type == "cpu" and a.numel() <= _COMPARED_ELEMENTS and torch.equal(a.detach(), b.detach())


@contextlib.contextmanager
def reads(layer: Any, unlike: Iterable[Difference]) -> Iterator[list[Difference]]:
    """Record which attributes of `unlike` the code of the layer's modules reads while inside.

    Yields the list of the attributes that were read, filled as code runs.
    """
    watched: dict[int, dict[str, str]] = {}
    for path, key in unlike:
        watched.setdefault(id(layer.get_submodule(path)), {})[key] = path
    kinds = {type(child) for child in layer.modules() if id(child) in watched}
    seen: list[Difference] = []
    before = {kind: kind.__dict__.get("__getattribute__") for kind in kinds}

    def watching(kind: type) -> Any:
        """Return a `__getattribute__` for a class that records reads of the watched attributes."""
        plain: Any = kind.__getattribute__

        def read(self: Any, name: str) -> Any:
            own = watched.get(id(self))
            if own is not None:
                if name in own:
                    seen.append((own[name], name))
                elif name == "__dict__" and not _looks(sys._getframe(1).f_code.co_filename):
                    seen.extend((path, key) for key, path in own.items())
            return plain(self, name)

        return read

    try:
        for kind, function in [(kind, watching(kind)) for kind in kinds]:
            setattr(kind, "__getattribute__", function)  # noqa: B010
        yield seen
    finally:
        for kind, function in before.items():
            if function is None:
                del kind.__getattribute__
            else:
                setattr(kind, "__getattribute__", function)  # noqa: B010


def _looks(file: str) -> bool:
    """Return True if code in `file` may read a module's `__dict__` without computing from it."""
    return file.endswith(_LOOKS[0]) or file.startswith(_LOOKS[1])


class OpaqueNumber:
    """A stand-in for an attribute that is a whole number.

    Each use of the number's value is recorded; passing the object on is no use.
    """

    def __init__(self, value: int, used: list[int]) -> None:
        """Represent `value`, which each use appends to `used`."""
        self._value, self._used = value, used

    @property
    def __class__(self) -> type:  # `isinstance` reads this property
        """The type int; reading it is a use of the number."""
        self._used.append(self._value)
        return int

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the number, and record a use."""
        self._used.append(self._value)
        return getattr(self._value, name)


def _using(name: str) -> Any:
    """Return a method that records a use of the number and then calls the method `name` of int."""

    def method(self: Any, *args: Any) -> Any:
        self._used.append(self._value)
        return getattr(self._value, name)(*args)

    return method


for _name in set(dir(int)) - set(dir(object)) | {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}:
    if _name.startswith("__"):
        setattr(OpaqueNumber, _name, _using(_name))
for _name in ("__hash__", "__str__", "__repr__", "__format__", "__reduce_ex__"):
    setattr(OpaqueNumber, _name, _using(_name))


def number_of(value: Any) -> Any:
    """Return the number behind an `OpaqueNumber` without recording a use; any other value is returned unchanged.

    Callers must not let the number change a computation.
    """
    return vars(value)["_value"] if type(value) is OpaqueNumber else value


@contextlib.contextmanager
def opaque_numbers(layer: Any, numbers: Iterable[Difference]) -> Iterator[list[int]]:
    """Replace whole numbers among the attributes of a layer's modules by `OpaqueNumber`s while inside.

    Yields the list of the numbers that were used, filled as code runs.
    """
    used: list[int] = []
    places = [(layer.get_submodule(path).__dict__, key) for path, key in numbers]
    before = [attributes[key] for attributes, key in places]
    try:
        for (attributes, key), value in zip(places, before, strict=True):
            attributes[key] = OpaqueNumber(value, used)
        yield used
    finally:
        for (attributes, key), value in zip(places, before, strict=True):
            attributes[key] = value
